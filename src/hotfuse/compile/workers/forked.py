"""A worker that begins as a fork of the serving process: what that has imported, torch and the user's library, is there at once.

A fork copies one thread and every lock, held or not. So the child uses little of what it inherited (`_prepare_child`),
says hello, and is believed only then; one that is silent, or stands still later, is killed, and a fresh interpreter does its work
(`compile.workers.starting`). Decision 19 says what was weighed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import logging
import os
import random
import select
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

import numpy as np
import torch

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.compile.workers import wire, worker
from hotfuse.compile.workers.priority import LOWEST, step_back
from hotfuse.compile.workers.process import Worker

QUIET_S = 1.0
"""A child that slept so long before its hello waits for a lock that nobody will release."""
HELLO_S = 20.0
"""Most seconds until a hello, however busy the machine."""
LOOK_S = 0.05
IMPORT_S = 0.3
"""How long a fork waits for imports of other threads."""
FORBIDDEN_S = 1.0
"""How long it waits for a library that forbids it."""

# Python 3.12 and later warn of forks beside threads, which is what this file is about.
warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning, __name__.replace(".", r"\."))


class ForkFailed(CaptureError):
    """There is no forked worker, and why."""


class ForkedProcess:
    """A child process by its id: what `subprocess.Popen` has, for one that was forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._taking = threading.Lock()
        """The system tells how a child ended once; a second thread that asks meanwhile would hear that there is no such child."""

    def poll(self) -> int | None:
        """How it ended; None while it runs, and while another thread is about to know."""
        if self.returncode is None and self._taking.acquire(blocking=False):
            try:
                return self._waited(os.WNOHANG)
            finally:
                self._taking.release()
        return self.returncode

    def wait(self) -> int:
        """Until it has ended."""
        with self._taking:
            return cast(int, self._waited(0))

    def _waited(self, how: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, how)
            except ChildProcessError:  # the application takes the status of every child there is
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        """Nothing where it has ended: its id may be another's by now."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)


class ForkedWorker(Worker):
    """One process, forked; raises ForkFailed where it does not come up."""

    forked = True

    def __init__(self, memory: int = 0, before_hello: Callable[[], None] | None = None, level: int = LOWEST,
                 *, whole: bool = True) -> None:
        """`whole`: one that will get requests of every kind. `before_hello` is for tests: run in the child before its hello."""
        requests_out, requests_in = os.pipe()
        answers_out, answers_in = os.pipe()
        log = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - lives as long as the worker
        parent = os.getpid()
        # No signal is handled before the child has handlers of its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = _fork()
            if pid == 0:
                _child(parent, requests_out, answers_in, log.fileno(), memory, before_hello, level, whole=whole)
        except OSError as e:
            for end in (requests_out, requests_in, answers_out, answers_in):
                os.close(end)
            log.close()
            raise ForkFailed("the system refuses to fork", because=str(e), why=Why.WORKER_DIED) from e
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(requests_out)
        os.close(answers_in)
        self._hold(ForkedProcess(pid), os.fdopen(requests_in, "wb", 0), os.fdopen(answers_out, "rb", 0), log, level)
        self._inherited = 0
        self._greeted()
        self._inherited = super().rss()

    def _greeted(self) -> None:
        begin, quiet = time.monotonic(), 0.0
        poll = select.poll()
        poll.register(self._out.fileno(), select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            quiet = quiet + LOOK_S if self._process.pid > 0 and self.sleeps() else 0.0
            if quiet > QUIET_S or time.monotonic() - begin > HELLO_S:
                self.close()
                raise ForkFailed("a forked worker does not say hello", because="a lock was held when it was forked",
                                 why=Why.TIMEOUT)  # fmt: skip
        try:
            hello, _ = wire.receive(self._out)
        except EOFError as e:
            self.close()
            raise ForkFailed(f"a forked worker ended with status {self.status}", because=self.last_words(),
                             why=Why.WORKER_DIED) from e  # fmt: skip
        self._process.pid = int(hello["pid"])

    def ask_where(self) -> None:
        """Have it write down where it stands."""
        self._signal(signal.SIGUSR1)

    def where(self) -> str:
        """The line of code it stood in when it was asked last."""
        try:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").rpartition("most recent call first")[2].splitlines()
        except ValueError:  # it is closed
            return ""
        return next((line.strip().replace('"', "") for line in lines if line.lstrip().startswith("File")), "")

    def rss(self) -> int:
        """Bytes beyond what it shared with this process when it began."""
        return max(0, super().rss() - self._inherited)


# --- before the fork -----------------------------------------------------------------------------


def importing(wait_s: float = IMPORT_S) -> str:
    """A module that somebody is importing, after waiting a while for the end of it: in a child it would stay half there, with its
    lock taken. Empty where there is none.
    """
    until = time.monotonic() + wait_s
    while (name := _half_there()) and time.monotonic() < until:
        time.sleep(0.01)
    return name


def _half_there() -> str:
    """A module that is being imported. While its file is still being searched, only the import lock shows it."""
    for name, module in list(sys.modules.items()):
        if name != "__main__" and getattr(getattr(module, "__spec__", None), "_initializing", False) is True:
            return name
    me = threading.get_ident()
    for name, found in list(getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {}).items()):
        if getattr(found(), "owner", None) not in (None, me):
            return name
    return ""


def _fork() -> int:
    """Fork while no thread is inside the linker or imports; 0 in the child, -1 where only the child knows its number.

    A library may forbid forks while something of its own changes (`filelock`: while another thread forks), by an audit hook, which
    is asked before anything happens. That is soon over, as imports are; where it is not, the fork has failed.
    """
    jit = sys.modules.get("hotfuse.native.jit")
    until = time.monotonic() + FORBIDDEN_S
    while True:
        try:
            with contextlib.nullcontext() if jit is None else jit.quiet():  # let go of on both sides
                if name := _half_there():  # somebody began since this was asked, perhaps while the linker was waited for
                    raise RuntimeError(f"module {name} is being imported")
                return os.fork()
        except DeprecationWarning:  # warnings are errors here: the fork happened all the same
            return -1
        except RuntimeError as e:
            if time.monotonic() > until:
                raise OSError(f"it cannot be done now: {e}") from e
            time.sleep(0.005)


# --- in the child --------------------------------------------------------------------------------


def _child(
    parent: int, requests_in: int, answers_out: int, log: int, memory: int, before_hello: Callable[[], None] | None, level: int,
    *, whole: bool,
) -> NoReturn:  # fmt: skip
    """Everything a forked worker ever does: nothing of the server's runs behind it, neither code nor exit handlers."""
    status = 1
    try:
        worker.end_with_parent(parent)
        worker.name_process()
        answers = _descriptors(requests_in, answers_out, log)
        _signals()
        _prepare_child()
        if before_hello is not None:
            before_hello()
        inherited = int(worker.usage()["peak_rss"])
        out = os.fdopen(answers, "wb")
        wire.send(out, {"pid": os.getpid()})
        _begin(level, whole=whole)
        worker.bound_memory(memory)
        worker.collect_rarely()
        worker.serve(os.fdopen(0, "rb", closefd=False), out, inherited)
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _begin(level: int, *, whole: bool) -> None:
    """Import what requests take, and only then step back: at the lowest priority a second of imports takes ten on a busy machine,
    while the first plan waits for them.
    """
    given = os.getpriority(os.PRIO_PROCESS, 0)
    if whole:
        worker.import_common()
    if os.getpriority(os.PRIO_PROCESS, 0) == given:  # else the pool has said meanwhile what it shall be
        step_back(level)


def _descriptors(requests_in: int, answers_out: int, log: int) -> int:
    """Requests come in at 0, prints go to the log; where answers go. Everything else that was open leads nowhere.

    The server's sockets and files must not be held by a process it knows nothing of. Their numbers stay taken: an inherited object
    that is dropped later closes its number, which must not be somebody else's by then. What is written to goes to memory, where its
    position shows that a traced model writes (`frontends.native_state`).
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(requests_in, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    answers = os.dup(answers_out)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (answers, nowhere):
            with contextlib.suppress(OSError):  # the list itself was open, too
                let_go(int(name), nowhere)
    # What prints goes through new objects: the old ones may have been in use, by a thread that is not here.
    sys.stdin = open(os.devnull)  # noqa: SIM115 - lives as long as the process
    sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    return answers


def let_go(number: int, nowhere: int) -> None:
    """Have an open descriptor lead nowhere; raises OSError where it is not open."""
    socket = stat.S_ISSOCK(os.fstat(number).st_mode)
    if socket or fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        os.dup2(nowhere, number, inheritable=False)
        return
    try:
        written = _memory()
    except OSError:  # it must not lead to the server's file, whatever shows of it
        written = os.dup(nowhere)
    os.dup2(written, number, inheritable=False)
    os.close(written)


def _memory() -> int:
    """A file of memory; where the system or this interpreter (built for an older one) has none, a file without a name."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            return os.memfd_create("hotfuse")
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


def _signals() -> None:
    """As a fresh process has them; Ctrl-C is the parent's to handle."""
    signal.set_wakeup_fd(-1)
    ignored = (signal.SIGINT, signal.SIGPIPE)
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN) or number in ignored:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _prepare_child() -> None:
    """One thread, settings like a fresh interpreter's, and random numbers of its own.

    Where one of the locks taken here was held by another thread at the fork, this waits for ever, and the parent notices.
    """
    sys.settrace(None)
    sys.setprofile(None)
    gc.disable()  # looking through what was inherited would copy it
    os.environ.update(OMP_NUM_THREADS="1", HOTFUSE_CAPTURE="off")
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):  # the server's log is the server's
            logger.handlers.clear()
    learned = sys.modules.get("hotfuse.compile.learn.learned")
    if learned is not None:
        learned.forget()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    seed = int.from_bytes(os.urandom(4))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def resident() -> int:
    """Bytes of this process that a fork would have to copy the tables of."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon:")), 0)
