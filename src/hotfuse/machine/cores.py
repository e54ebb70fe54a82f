"""The cores this process may use: its affinity, which is its main thread's, and the control group's quota.

Both change while a process serves: a server forks its workers and gives each some cores, an administrator narrows one that is
in the way (`taskset -ap`). What runs beside calls keeps within the mask as it is, so it is asked for again now and then (decision
400).

An OpenMP runtime that is told to bind threads (`OMP_PROC_BIND=true`) does so to the thread that loads it, and every thread and
process started afterwards inherits that one core. There the mask is the one at import, restored in whatever runs beside calls.
Where torch came first, the runtime is asked for its places: those are what it found before it bound anything.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from pathlib import Path

from hotfuse.base.environment import BINDING

RUNTIMES = ("libgomp", "libomp", "libiomp")
AGAIN_S, QUOTA_AGAIN_S = 1.0, 10.0
"""Seconds after which the mask, and the quota, which stands in files, are asked for once more."""
SETTLED_S = 5.0
"""A mask that the main thread was seen with from another one is believed after so long. OpenVINO binds it to a core for the time of
a call; taken for the process's, that opened every decision again and had workers share the core (decision 431)."""


def allowed_now() -> frozenset[int]:
    """The cores this process may run on, those of an OpenMP runtime's places among them; empty where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    mask = os.sched_getaffinity(os.getpid())
    return frozenset(mask | places() if threads_are_bound() else mask)


def threads_are_bound() -> bool:
    """Whether OpenMP runtimes of this process are told to bind threads: then a thread's mask does not say what is allowed."""
    return any(os.environ.get(name) for name in BINDING)


def places() -> set[int]:
    """The cores that OpenMP runtimes loaded by now bind threads to."""
    import ctypes  # hardly any process has bound threads

    maps = _text(Path("/proc/self/maps")) or ""
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if any(n in line for n in RUNTIMES)}
    found: set[int] = set()
    for path in sorted(p for p in paths if p.startswith("/")):
        with contextlib.suppress(OSError, AttributeError):  # no library, or one of another version
            library = ctypes.CDLL(path)
            for place in range(library.omp_get_num_places()):
                cores = (ctypes.c_int * library.omp_get_place_num_procs(place))()
                library.omp_get_place_proc_ids(place, cores)
                found |= set(cores)
    return found


def allowed() -> frozenset[int]:
    """The cores this process may run on, those at import where runtimes bind threads; empty where the system does not say."""
    global _ask_at
    if (now := time.monotonic()) >= _ask_at or (_changed is not None and on_main_thread()):
        _ask_at = now + AGAIN_S
        if not (_bound or threads_are_bound()):
            with contextlib.suppress(OSError):  # the main thread has ended
                _look(allowed_now(), now)
    return _allowed


def _look(mask: frozenset[int], now: float) -> None:
    """The main thread has this mask. Where that is another one than before it is believed at once if that thread itself asks, which
    it does between other things; elsewhere when it has stayed for `SETTLED_S`.
    """
    global _allowed, _changed
    if mask != _allowed and not on_main_thread():
        if _changed is None or _changed[0] != mask:
            _changed = (mask, now)
        if now - _changed[1] < SETTLED_S:
            return
    _allowed, _changed = mask, None


def on_main_thread() -> bool:
    """Whether the calling thread is the process's main one, whose mask is the process's."""
    return threading.get_native_id() == os.getpid()


def quota(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> float | None:
    """How many cores' worth of time the control group allows, the tightest one around this process; None is unlimited."""
    found = [q for folder in _groups(sys_root, proc_root) if (q := _quota_in(folder)) is not None]
    return min(found, default=None)


def _groups(sys_root: Path, proc_root: Path) -> list[Path]:
    """Folders that may hold a quota: the root of the control groups, as a container sees them, and those down to this process."""
    roots = {"": sys_root / "fs/cgroup", "cpu": sys_root / "fs/cgroup/cpu"}
    found = list(roots.values())
    for line in (_text(proc_root / "self/cgroup") or "").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        root = roots.get("cpu" if "cpu" in names.split(",") else names)
        if root is not None:
            parts = [p for p in path.split("/") if p and p != ".."]
            found += [root.joinpath(*parts[: i + 1]) for i in range(len(parts))]
    return found


def _quota_in(folder: Path) -> float | None:
    if (text := _text(folder / "cpu.max")) is not None:
        most, _, period = text.partition(" ")
        return int(most) / int(period or 100_000) if most.isdecimal() else None
    most, period = (_text(folder / f"cpu.cfs_{n}_us") for n in ("quota", "period"))
    return int(most) / int(period) if most and period and int(most) > 0 else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def usable_cores() -> int:
    """How many cores this process may keep busy: those of its affinity, within its quota."""
    cores, most = len(allowed()) or os.cpu_count() or 1, _quota_now()
    return cores if most is None else max(1, min(cores, math.ceil(most)))


def _quota_now() -> float | None:
    """The quota as it was a few seconds ago at most: a container that serves may be given more, or less."""
    global _quota, _ask_quota_at
    if (now := time.monotonic()) >= _ask_quota_at:
        _ask_quota_at = now + QUOTA_AGAIN_S
        _quota = quota()
    return _quota


def unbind(task: int = 0) -> bool:
    """Let a thread, the calling one unless said otherwise, run wherever this process may, and nowhere else.

    False where the system refuses or has no such choice.
    """
    if not (mask := allowed()):
        return False
    try:
        os.sched_setaffinity(task, mask)
    except OSError:  # the control group allows other cores by now
        return False
    return True


def keep_within(process: int) -> None:
    """Unbind every thread of another process."""
    with contextlib.suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{process}/task"):
            unbind(int(task))


def _after_fork() -> None:
    """A server's worker may be given cores, and a control group, of its own as soon as it is forked."""
    global _ask_at, _ask_quota_at, _changed
    _ask_at, _ask_quota_at, _changed = 0.0, 0.0, None


_bound = threads_are_bound()
_allowed = allowed_now()
_changed: tuple[frozenset[int], float] | None = None
"""Another mask that the main thread was seen with, and since when; none since it last had the one that is believed."""
_ask_at = time.monotonic() + AGAIN_S
_quota = quota()
_ask_quota_at = time.monotonic() + QUOTA_AGAIN_S
os.register_at_fork(after_in_child=_after_fork)
