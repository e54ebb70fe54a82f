"""A store of entries that machines share: any file system that `fsspec` knows (s3://, gs://, file://, memory://…).

It is asked for what the folder has not, and gets what the folder gets. Both happen beside serving: reads where something would be
compiled otherwise, writes in a thread with a short queue. A store that fails, or does not answer in time, is left alone for a
while; that costs a compile, and is counted. Entries are as anywhere: signed, and believed only under a trusted key, since others
may write to the store.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections import Counter
from typing import Any

from hotfuse.base.errors import InputError
from hotfuse.base.faults import is_alive, is_begun

SUFFIX = ".hf"
QUEUED = 256
"""Entries that wait to be written; more are left out, and counted."""
AWAY_S = 60.0
"""A store that failed is not asked again for so long."""
ANSWER_S = 10.0
"""A store that says nothing for so long has failed: a capture waits for what it reads, and some file systems wait for ever."""
MAX_ENTRY = 256 << 20
_numbers = itertools.count()


class SharedStore:
    """Entries behind a URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.counts: Counter[str] = Counter()
        self.trouble = ""
        """What went wrong last; empty while nothing does."""
        self._until = 0.0
        self._unanswered: threading.Thread | None = None
        """It asked and was given up; while it waits, nothing else is asked."""
        self._writing_since: float | None = None
        self._waiting: queue.Queue[tuple[str, bytes]] = queue.Queue(QUEUED)
        self._writer: threading.Thread | None = None
        self._lock = threading.Lock()
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as e:
            hint = "s3://bucket/folder, file:///mnt/folder; the file system's package must be installed"
            raise InputError(f"the shared cache {url!r} cannot be used", because=str(e), hint=hint) from e

    @property
    def about(self) -> str:
        """What it is called in words."""
        return "the shared cache"

    @property
    def machine(self) -> str:
        """It has entries for any."""
        return ""

    @property
    def counted(self) -> str:
        """What is counted when it has an entry."""
        return "from_shared"

    @property
    def kept(self) -> bool:
        """The next lookup shall not go so far."""
        return True

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name[:2]}/{name}{SUFFIX}"

    def read(self, name: str) -> bytes | None:
        """An entry as bytes, not believed yet; None where there is none, or the store is away."""
        if time.monotonic() < self._until or is_alive(self._unanswered):
            return None
        answers = queue.SimpleQueue[bytes | None]()
        asker = threading.Thread(target=lambda: answers.put(self._fetched(name)), name="hotfuse-shared-read", daemon=True)
        if not is_begun(asker):
            return None
        try:
            return answers.get(timeout=ANSWER_S)
        except queue.Empty:
            self._unanswered = asker
            self._away(TimeoutError(f"no answer for {ANSWER_S:g} s"))
            return None

    def _fetched(self, name: str) -> bytes | None:
        try:
            with self._files.open(self._path(name), "rb") as file:
                return bytes(file.read(MAX_ENTRY + 1))
        except FileNotFoundError:
            return None
        except Exception as e:  # each file system has errors of its own
            self._away(e)
            return None

    def write(self, name: str, data: bytes) -> None:
        """Have an entry written soon."""
        with self._lock:
            if self._writer is None or not self._writer.is_alive():
                writer = threading.Thread(target=self._write_all, name="hotfuse-shared-cache", daemon=True)
                self._writer = writer if is_begun(writer) else None
        try:
            self._waiting.put_nowait((name, data))
        except queue.Full:
            self.counts["left_out"] += 1

    def _write_all(self) -> None:
        while True:
            name, data = self._waiting.get()
            try:
                self._writing_since = time.monotonic()
                if self._writing_since < self._until or is_alive(self._unanswered):
                    self.counts["left_out"] += 1
                    continue
                self._put(self._path(name), data)
                self.counts["written"] += 1
            except Exception as e:
                self._away(e)
            finally:
                self._writing_since = None
                self._waiting.task_done()

    def _put(self, path: str, data: bytes) -> None:
        """Whole or not at all: object stores write so anyway, elsewhere a file gets its name when it is whole."""
        new = f"{path}.new-{os.getpid()}-{next(_numbers)}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            with self._files.open(new, "wb") as file:
                file.write(data)
            self._files.mv(new, path)
        except Exception:
            with contextlib.suppress(Exception):
                self._files.rm_file(new)
            raise

    def _away(self, error: Exception) -> None:
        self.counts["failed"] += 1
        self.trouble = f"{type(error).__name__}: {error}"[:200]
        self._until = time.monotonic() + AWAY_S

    def drain(self, seconds: float) -> bool:
        """Wait until what was queued is written; whether it was."""
        until = time.monotonic() + seconds
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)
        return not self._waiting.unfinished_tasks

    def to_dict(self) -> dict[str, Any]:
        """For `stats()` and `explain()`."""
        counts, since = {k: self.counts[k] for k in ("written", "left_out", "failed")}, self._writing_since
        waited = 0.0 if since is None else time.monotonic() - since
        state = f"no answer for {waited:.0f} s" if waited > ANSWER_S else self.trouble or "in use"
        return {"url": self.url, "state": state, **counts}
