"""Keys that sign entries: one of the user's own, made at first use, and perhaps one that a fleet shares.

A key is 32 random bytes in a file that nobody else can read. A file that others may read or write, or that belongs to another user,
is no key: whoever could put code into the cache could run it here.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from hotfuse.base.errors import InputError

BYTES = 32
USER_KEY = "cache.key"
"""The user's own, in the cache folder."""


@dataclass(frozen=True, slots=True)
class Key:
    """A secret, and what it is called in entries."""

    secret: bytes

    def __repr__(self) -> str:  # a secret is never printed
        return f"Key({self.name})"

    @property
    def name(self) -> str:
        """Public: tells keys apart and says nothing of the secret."""
        return hashlib.sha256(b"hotfuse key\0" + self.secret).hexdigest()[:16]

    def sign(self, *parts: bytes | memoryview) -> bytes:
        """Over the parts in order; their lengths are the caller's to include."""
        mac = hmac.new(self.secret, digestmod="sha256")
        for part in parts:
            mac.update(part)
        return mac.digest()


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Who is trusted: what signs new entries, and all whose entries are read."""

    own: Key
    trusted: tuple[Key, ...]

    def named(self, name: str) -> Key | None:
        """A trusted key."""
        return next((k for k in self.trusted if k.name == name), None)


def read_key(path: Path) -> Key:
    """A key from its file; raises InputError where it is none, or others may know it."""
    try:
        with path.open("rb") as f:
            about = os.fstat(f.fileno())
            text = f.read(1024)
    except OSError as e:
        raise InputError(f"the key {path} cannot be read", because=str(e)) from e
    if hasattr(os, "getuid") and about.st_uid not in (os.getuid(), 0):
        raise InputError(f"the key {path} is not trusted", because=f"it belongs to user {about.st_uid}")
    if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"the key {path} is not trusted", because="others than its owner have access to it", hint="chmod 600")
    try:
        secret = bytes.fromhex(text.decode("ascii").strip())
    except ValueError as e:
        raise InputError(f"{path} is no key", because="it is not written in hexadecimal digits") from e
    if len(secret) < BYTES:
        raise InputError(f"{path} is no key", because=f"it has {len(secret)} bytes instead of {BYTES}")
    return Key(secret)


def make_key(path: Path) -> Key:
    """The key in a file, made where there is none: whole or not at all, and the same one for all who make it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            f.write(secrets.token_hex(BYTES) + "\n")
        with contextlib.suppress(FileExistsError):  # another process was first, and its key is the one
            os.link(written, path)
    finally:
        written.unlink(missing_ok=True)
    return read_key(path)


def keys_for(cache_dir: Path, fleet: str | None) -> TrustedKeys:
    """The user's key, and before it the fleet's where one is named; raises InputError or OSError where there is none to be had."""
    path = cache_dir / USER_KEY
    if fleet is not None:
        shared = read_key(Path(fleet).expanduser())
        own = (read_key(path),) if path.exists() else ()
        return TrustedKeys(shared, (shared, *own))
    key = read_key(path) if path.exists() else make_key(path)
    return TrustedKeys(key, (key,))
