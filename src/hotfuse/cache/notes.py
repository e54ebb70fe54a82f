"""What a process found out before it could read its first entry, noted for the next one.

    sources    a digest of Hotfuse's own files        while they have the same names, sizes and times
    features   what each CPU feature's trial showed   during the same boot, on the same kind of core, for the same trials

Both took longer than all else of a second start: reading 650 files, and a process that executes an instruction of each feature.
A note is believed where its signature holds and its circumstances are those of now; else it is found out again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.cache.entry import Refused, pack, unpack
from hotfuse.cache.keys import TrustedKeys, unblocked

MAX_BYTES = 1 << 16
"""Of a note; what is larger is none."""


@dataclass(frozen=True, slots=True)
class StartNotes:
    """Notes in the directory that has the user's key."""

    home: Path
    keys: TrustedKeys

    def recall(self, name: str, circumstances: str) -> Any:
        """What was noted in the same circumstances; None where nothing was, or where it is not believed."""
        try:
            with open(self._path(name), "rb", opener=unblocked) as file:
                data = file.read(MAX_BYTES + 1)
            body, _ = unpack(data, name, self.keys, frozenset())
        except (OSError, Refused):
            return None
        return body.get("value") if body.get("circumstances") == circumstances else None

    def keep(self, name: str, circumstances: str, value: Any) -> None:
        """Note it; a directory that cannot be written has no notes, and costs the next process what it cost this one."""
        new = self.home / f".new-{os.getpid()}-{threading.get_ident()}"
        data = pack(name, {"circumstances": circumstances, "value": value}, [], self.keys)
        with contextlib.suppress(OSError):
            try:
                with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                    file.write(data)
                new.replace(self._path(name))
            finally:
                new.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.home / f"{name}.note"
