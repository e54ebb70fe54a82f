"""One database that many processes write, and what happens when it cannot be had.

    busy      writers take turns: they wait, then try again with growing pauses
    corrupt   the file is moved aside, one process at a time, and a new one begun
    replaced  a process that has just opened the file which another one moves aside gets an I/O error: it opens the new one
    full, read-only
              this process goes on with a copy in memory: what was learned is known, what it learns is lost when it ends
    newer, still busy after all tries
              the same, beginning with nothing

A file or memory that begins with nothing gets what rows of this process refer to (`renewed`): they would not be taken otherwise.

Each of these is counted and told to the caller; none of them reaches a serving call as an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from hotfuse.profile.store_schema import STEPS, Migration, NewerSchema, migrate, version_of

T = TypeVar("T")
BUSY_S = 5.0
"""How long SQLite itself waits for a lock."""
TRIES = 6
REPLACED, REPAIRS = 5, 3
"""How often a process opens the file again after an I/O error, and puts a new one in the place of a damaged one."""
SIDE_FILES = ("-wal", "-shm")
MAX_COPY_BYTES = 64 * 2**20
"""The largest file that is copied into memory where it cannot be written."""


class Trouble(StrEnum):
    """Why a database could not be used as it was."""

    CORRUPT = "the file is damaged; it was moved aside and a new one begun"
    FULL = "there is no room to write"
    READ_ONLY = "it cannot be written"
    NEWER = "it was written by a newer version"
    BUSY = "others kept it locked"
    FAILED = "the database failed"


Tell = Callable[[Trouble, str], None]


def trouble_of(error: BaseException) -> Trouble | None:
    """What an error of the database means; None where it says nothing about the database's state."""
    if isinstance(error, NewerSchema):
        return Trouble.NEWER
    cause = error.orig if isinstance(error, DBAPIError) else error
    text = str(cause).lower()
    if "malformed" in text or "not a database" in text or "disk image" in text:
        return Trouble.CORRUPT
    if "full" in text or "disk i/o error" in text:
        return Trouble.FULL
    if "readonly" in text or "read-only" in text or "unable to open" in text or isinstance(cause, PermissionError):
        return Trouble.READ_ONLY
    if "locked" in text or "busy" in text:
        return Trouble.BUSY
    if isinstance(cause, OSError):
        return Trouble.FULL if cause.errno == 28 else Trouble.READ_ONLY
    return Trouble.FAILED if isinstance(cause, sqlite3.OperationalError | sqlite3.InternalError) else None


class Database:
    """An SQLite file with write-ahead log, or memory."""

    def __init__(
        self, path: Path | None, tell: Tell, steps: Sequence[Migration] = STEPS,
        renewed: Callable[[Connection], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.path = path
        """None once in memory."""
        self.copied: Path | None = None
        """The file that memory began with a copy of: it can be read, and not written."""
        self.counts: Counter[str] = Counter()
        self._tell, self._steps, self._renewed = tell, steps, renewed
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._engine = self._opened()

    # -- opening

    def _opened(self) -> Engine:
        """The engine of the file, brought up to date; memory where that cannot be."""
        while self.path is not None:
            try:
                return self._file(self.path)
            except (DBAPIError, OSError, NewerSchema) as e:
                self._give_way(e)
        return self._memory()

    def _give_way(self, error: Exception) -> None:
        """After an error: the file is opened again, replaced, or left for memory."""
        assert self.path is not None
        trouble = trouble_of(error) or Trouble.FAILED
        if trouble is Trouble.FULL and "disk i/o error" in str(error).lower() and self.counts["reopened"] < REPLACED:
            self.counts["reopened"] += 1
            _pause(self.counts["reopened"])
            return
        if trouble is Trouble.CORRUPT and self.counts[Trouble.CORRUPT.name.lower()] < REPAIRS:
            try:
                aside = _moved_aside(self.path)
            except OSError as e:
                self._report(trouble_of(e) or Trouble.FAILED, f"{self.path}: {e}")
                self.path = None
                return
            self._report(
                trouble, f"{self.path} is now {aside}" if aside else f"{self.path} was replaced by another process"
            )
            return
        self._report(trouble, f"{self.path}: {_first_line(error)}; going on in memory")
        self.copied = self.path if trouble in (Trouble.READ_ONLY, Trouble.FULL) else None
        self.path = None

    def _report(self, trouble: Trouble, detail: str) -> None:
        self.counts[trouble.name.lower()] += 1
        self._tell(trouble, detail)

    def _file(self, path: Path) -> Engine:
        path.parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_S})
        _prepare(engine, wal=True)
        try:
            _retried(lambda: self._migrated(engine), self.counts)
        except BaseException:
            engine.dispose()
            raise
        return engine

    def _memory(self) -> Engine:
        engine = create_engine("sqlite://", connect_args={"check_same_thread": False}, poolclass=StaticPool)
        _prepare(engine, wal=False)
        if self.copied is not None:
            with engine.connect() as connection:
                raw: Any = connection.connection.dbapi_connection
                self.copied = self.copied if _copy(self.copied, raw) else None
        self._migrated(engine)
        return engine

    def _migrated(self, engine: Engine) -> None:
        with _writing(engine) as connection:
            migrate(connection, self._steps)

    # -- use

    @property
    def engine(self) -> Engine:
        """The engine of this process: connections of a parent are not touched after a fork."""
        if self._pid != os.getpid():
            self._engine.dispose(close=False)
            self._lock = threading.RLock()
            self._pid = os.getpid()
        return self._engine

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run work in a transaction of its own, in which nobody else writes; it may be run again after it failed."""
        return self._tried(work, _writing)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run work that only reads."""
        return self._tried(work, _reading)

    def _tried(self, work: Callable[[Connection], T], begin: Callable[[Engine], Any]) -> T:
        for _ in range(REPLACED + REPAIRS + 2):  # and once more as it is, once in memory
            engine = self.engine

            def once(engine: Engine = engine) -> T:
                with begin(engine) as connection:
                    return work(connection)

            try:
                return self._in_memory(once) if self.path is None else _retried(once, self.counts)
            except (DBAPIError, OSError) as e:
                if self.path is None or trouble_of(e) is None:
                    raise
                with self._lock:
                    if self._engine is engine:  # nobody else has given way meanwhile
                        engine.dispose()
                        self._give_way(e)
                        self._engine = self._opened()
                        with contextlib.suppress(DBAPIError), _writing(self._engine) as connection:  # the work itself tells, if not
                            self._renewed(connection)
        raise AssertionError("memory does not give way")

    def _in_memory(self, once: Callable[[], T]) -> T:
        with self._lock:  # one connection for all threads
            return once()

    @property
    def place(self) -> str:
        """Where it is, for readers."""
        return str(self.path) if self.path else f"memory, with a copy of {self.copied}" if self.copied else "memory"

    def describe(self, c: Connection) -> dict[str, Any]:
        """Facts for `hotfuse db info`."""
        files = (Path(f"{self.path}{ending}") for ending in ("", "-wal")) if self.path is not None else ()
        size = sum(f.stat().st_size for f in files if f.exists())
        return {"version": version_of(c), "journal": str(c.exec_driver_sql("PRAGMA journal_mode").scalar()), "bytes": size}

    def maintain(self) -> None:
        """Give room that deleted rows left back to the system."""
        self._outside("VACUUM")
        if self.path is not None:
            self._outside("PRAGMA wal_checkpoint(TRUNCATE)")

    def _outside(self, statement: str) -> None:
        """Run a statement that must stand outside transactions."""

        def once() -> None:
            with self.engine.connect() as connection:
                raw: Any = connection.connection.dbapi_connection
                raw.execute(statement)

        if self.path is None:
            self._in_memory(once)
        else:
            _retried(once, self.counts)

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()


def _prepare(engine: Engine, *, wal: bool) -> None:
    """Transactions begin where we say, and every connection waits for locks."""

    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions on its own
        if wal:
            connection.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    def begun(connection: Connection) -> None:
        mode = "IMMEDIATE" if connection.get_execution_options().get("writes") else "DEFERRED"
        connection.exec_driver_sql(f"BEGIN {mode}")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)


@contextlib.contextmanager
def _writing(engine: Engine) -> Generator[Connection]:
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        yield connection


@contextlib.contextmanager
def _reading(engine: Engine) -> Generator[Connection]:
    with engine.connect() as connection, connection.begin():
        yield connection


def _retried(once: Callable[[], T], counts: Counter[str]) -> T:
    for attempt in range(TRIES):
        try:
            return once()
        except DBAPIError as e:
            if trouble_of(e) is not Trouble.BUSY or attempt == TRIES - 1:
                raise
            counts["retries"] += 1
            _pause(attempt)
    raise AssertionError("the last attempt returns or raises")


def _pause(attempt: int) -> None:
    time.sleep(random.uniform(0.5, 1.0) * 0.01 * 2**attempt)


def _copy(path: Path, into: sqlite3.Connection) -> bool:
    """Copy a file that cannot be written; False where it cannot be read either, or is too large.

    SQLite reads a file with a write-ahead log only where it may make a file beside it. Where it may not, and no log is left, the
    file is all there is (`immutable`).
    """
    try:
        logged = Path(f"{path}-wal")
        left = logged.stat().st_size if logged.exists() else 0
        if path.stat().st_size + left > MAX_COPY_BYTES:
            return False
        for how in ("mode=ro", *(() if left else ("mode=ro&immutable=1",))):
            with (
                contextlib.suppress(sqlite3.OperationalError),
                contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, timeout=BUSY_S)) as found,
            ):
                found.backup(into)
                return True
    except (OSError, sqlite3.Error):
        return False
    return False


def _first_line(error: Exception) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return (str(cause).splitlines() or [type(cause).__name__])[0]


def _moved_aside(path: Path) -> Path | None:
    """Move a damaged file and what belongs to it; None where another process has done so already."""
    with open(f"{path}.lock", "a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not damaged(path):
            return None
        aside = path.with_name(f"{path.name}.corrupt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        for ending in SIDE_FILES:
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{ending}", f"{aside}{ending}")
        os.rename(path, aside)
        return aside


def damaged(path: Path) -> bool:
    """Whether SQLite itself finds fault with a file."""
    if not path.exists():
        return False
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
            return connection.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok"
    except sqlite3.DatabaseError as e:
        return trouble_of(e) is Trouble.CORRUPT
