"""Keys that sign entries: one of the user's own, made at first use, and those of a fleet.

    shared    32 random bytes that every machine of a fleet has: a machine that can read entries can also make them
    pair      an Ed25519 key pair: one machine signs with the private key, all others hold only the public one

Secrets are in files that nobody else can read; a public key is in a file that nobody else can write. A file that is otherwise is no
key: code in the cache is code that runs here.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Any, Protocol

from hotfuse.base.errors import InputError
from hotfuse.base.lazy_dataclass import dataclass

BYTES = 32
USER_KEY = "cache.key"
"""The user's own, in the cache folder."""
PRIVATE, PUBLIC = "ed25519-private", "ed25519-public"
"""What stands before the digits in files of a pair."""
PUBLIC_SUFFIX = ".pub"


class Verifier(Protocol):
    """Something that tells whether a signature holds."""

    @property
    def name(self) -> str:
        """Public: tells keys apart and says nothing of a secret."""
        ...

    @property
    def signature_bytes(self) -> int:
        """How long its signatures are."""
        ...

    def holds(self, data: bytes | memoryview, signature: bytes | memoryview) -> bool:
        """Whether the data were signed with it."""
        ...


class Signer(Verifier, Protocol):
    """Something that signs."""

    def sign(self, *parts: bytes | memoryview) -> bytes:
        """Over the parts in order; their lengths are the caller's to include."""
        ...


@dataclass(frozen=True, slots=True)
class Key:
    """A secret that is shared, and what it is called in entries."""

    secret: bytes

    def __repr__(self) -> str:  # a secret is never printed
        return f"Key({self.name})"

    @property
    def name(self) -> str:
        """Public: tells keys apart and says nothing of the secret."""
        return hashlib.sha256(b"hotfuse key\0" + self.secret).hexdigest()[:16]

    @property
    def signature_bytes(self) -> int:
        """Bytes of a SHA-256 code."""
        return 32

    def sign(self, *parts: bytes | memoryview) -> bytes:
        """Over the parts in order; their lengths are the caller's to include."""
        mac = hmac.new(self.secret, digestmod="sha256")
        for part in parts:
            mac.update(part)
        return mac.digest()

    def holds(self, data: bytes | memoryview, signature: bytes | memoryview) -> bool:
        """Compared in constant time."""
        return hmac.compare_digest(self.sign(data), signature)


@dataclass(frozen=True, slots=True)
class PublicKey:
    """The half of a pair that believes."""

    public: bytes

    @property
    def name(self) -> str:
        """The pair's name, equal for both halves."""
        return hashlib.sha256(b"hotfuse public key\0" + self.public).hexdigest()[:16]

    @property
    def signature_bytes(self) -> int:
        """Bytes of an Ed25519 signature."""
        return 64

    def holds(self, data: bytes | memoryview, signature: bytes | memoryview) -> bool:
        """Whether the private half made this signature of the data's SHA-256 digest."""
        from cryptography.exceptions import InvalidSignature

        try:
            _ed25519().Ed25519PublicKey.from_public_bytes(self.public).verify(bytes(signature), _digest(data))
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """The half of a pair that signs."""

    secret: bytes

    def __repr__(self) -> str:  # a secret is never printed
        return f"PrivateKey({self.name})"

    @property
    def public(self) -> PublicKey:
        """The other half."""
        return PublicKey(_ed25519().Ed25519PrivateKey.from_private_bytes(self.secret).public_key().public_bytes_raw())

    @property
    def name(self) -> str:
        """The pair's name, equal for both halves."""
        return self.public.name

    @property
    def signature_bytes(self) -> int:
        """Bytes of an Ed25519 signature."""
        return 64

    def sign(self, *parts: bytes | memoryview) -> bytes:
        """Over the SHA-256 digest of the parts in order."""
        return _ed25519().Ed25519PrivateKey.from_private_bytes(self.secret).sign(_digest(*parts))

    def holds(self, data: bytes | memoryview, signature: bytes | memoryview) -> bool:
        """As the public half says."""
        return self.public.holds(data, signature)


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Who is trusted: what signs new entries, and all whose entries are read."""

    own: Signer
    trusted: tuple[Verifier, ...]

    def named(self, name: str) -> Verifier | None:
        """A trusted key."""
        return next((k for k in self.trusted if k.name == name), None)


def _digest(*parts: bytes | memoryview) -> bytes:
    made = hashlib.sha256()
    for part in parts:
        made.update(part)
    return made.digest()


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as e:
        raise InputError("a key pair needs the package 'cryptography'", because=str(e), hint="pip install 'hotfuse[fleet]'") from e
    return ed25519


def read_key(path: Path) -> Key | PrivateKey:
    """A key that signs, from its file; raises InputError where it is none, or others may know it."""
    kind, digits = _read(path, stat.S_IRWXG | stat.S_IRWXO, "others than its owner have access to it", "chmod 600")
    if kind == PUBLIC:
        raise InputError(f"{path} signs nothing", because="it is a public key", hint="name it in trusted_keys")
    if kind == PRIVATE:
        _ed25519()
        return PrivateKey(_secret(path, digits))
    return Key(_secret(path, digits))


def read_public(path: Path) -> PublicKey:
    """A public key from its file; raises InputError where it is none, or others could have written it."""
    kind, digits = _read(path, stat.S_IWGRP | stat.S_IWOTH, "others than its owner may write it", "chmod 644")
    if kind != PUBLIC:
        raise InputError(f"{path} is no public key", because=f"it does not begin with {PUBLIC}")
    _ed25519()
    return PublicKey(_secret(path, digits))


def unblocked(name: str, flags: int) -> int:
    """Open a file without waiting: a pipe in its place would hold its reader up for ever."""
    return os.open(name, flags | os.O_NONBLOCK)


def _read(path: Path, forbidden: int, because: str, hint: str) -> tuple[str, str]:
    """What kind of key a file holds, and its digits."""
    try:
        with open(path, "rb", opener=unblocked) as f:
            about = os.fstat(f.fileno())
            text = f.read(1024)
    except OSError as e:
        raise InputError(f"the key {path} cannot be read", because=str(e)) from e
    if hasattr(os, "getuid") and about.st_uid not in (os.getuid(), 0):
        raise InputError(f"the key {path} is not trusted", because=f"it belongs to user {about.st_uid}")
    if about.st_mode & forbidden:
        raise InputError(f"the key {path} is not trusted", because=because, hint=f"{hint} {path}")
    kind, _, digits = text.decode("ascii", errors="replace").strip().rpartition(" ")
    return kind, digits


def _secret(path: Path, digits: str) -> bytes:
    try:
        secret = bytes.fromhex(digits)
    except ValueError as e:
        raise InputError(f"{path} is no key", because="it is not written in hexadecimal digits") from e
    if len(secret) < BYTES:
        raise InputError(f"{path} is no key", because=f"it has {len(secret)} bytes instead of {BYTES}")
    return secret


def make_key(path: Path) -> Key | PrivateKey:
    """The key in a file, made where there is none: whole or not at all, and the same one for all who make it at once."""
    _write_once(path, secrets.token_hex(BYTES), 0o600)
    return read_key(path)


def make_pair(path: Path) -> PrivateKey:
    """A pair: the private half in a file that nobody else can read, the public one beside it."""
    _ed25519()
    _write_once(path, f"{PRIVATE} {secrets.token_hex(BYTES)}", 0o600)
    made = read_key(path)
    if not isinstance(made, PrivateKey):
        raise InputError(f"{path} holds a shared key", hint="another name: a key is never replaced")
    _write_once(path.with_name(path.name + PUBLIC_SUFFIX), f"{PUBLIC} {made.public.public.hex()}", 0o644)
    return made


def _write_once(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as f:
            f.write(text + "\n")
        with contextlib.suppress(FileExistsError):  # another process was first, and its key is the one
            os.link(written, path)
    finally:
        written.unlink(missing_ok=True)


def keys_for(cache_dir: Path, fleet: str | None, trusted: str | None = None) -> TrustedKeys:
    """The user's key, before it the fleet's where one is named, and public keys behind them; raises InputError or OSError where one
    cannot be had. `trusted` names a public key or a folder of them."""
    path = cache_dir / USER_KEY
    believed = tuple(map(read_public, public_files(trusted)))
    if fleet is not None:
        shared = read_key(Path(fleet).expanduser())
        own = (read_key(path),) if path.exists() else ()
        return TrustedKeys(shared, (shared, *own, *believed))
    key = read_key(path) if path.exists() else make_key(path)
    return TrustedKeys(key, (key, *believed))


def public_files(named: str | None) -> list[Path]:
    """The files of public keys that a setting names: one, or all in a folder."""
    if named is None:
        return []
    path = Path(named).expanduser()
    return sorted(path.glob(f"*{PUBLIC_SUFFIX}")) if path.is_dir() else [path]
