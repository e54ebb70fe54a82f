"""What a soak needs: somebody who does harm beside the calls, and somebody who watches what the process holds."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from hotfuse.compile.workers.process import Worker
from hotfuse.compile.workers.service import service
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.site import Entry

SWAP_EVERY_S = 0.002
LOOK_EVERY_S = 0.25
WINDOWS = 4
"""Equal parts of a run; the first is warming up."""


class Model(nn.Module):
    """Two inputs of varying sizes; a norm, a softmax and products, so that several kinds of kernels take part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(nn.functional.gelu(self.first(x)))
        return torch.softmax(self.second(h), -1), y * 2 + 1


def alive() -> list[Plan]:
    """The plans there are, whoever holds them, once all that was retired is freed."""
    epochs.quiesce()
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is Plan and _ours(thing)]


def _ours(plan: Plan) -> bool:
    """Whether it is of a `Model`: what other tests left running in this process may make plans of its own meanwhile."""
    return any(p.key.endswith("first.weight") for p in plan.partitioning.graph.params)


def in_use(engine: Any) -> set[int]:
    """The plans that calls may be routed to, and those they rest on."""
    return {id(p) for site in engine.sites.values() for e in site.entries for p in (e.plan, e.baseline, *e.versions.values())}


def held(engine: Any) -> list[Plan]:
    """The plans that somebody holds though no call can reach them."""
    plans, reached = alive(), in_use(engine)
    return [p for p in plans if id(p) not in reached]


def holders(plan: Plan, deep: int = 9, most: int = 4) -> str:
    """Who holds a plan, and who holds those: for the message of a test that found one. Lists made on the way are left out."""
    lists = {id(thing) for thing in gc.get_objects() if type(thing) is list}
    seen, lines = {id(plan)}, list[str]()
    level: list[object] = [plan]
    for depth in range(1, deep + 1):
        above: list[object] = []
        for thing in level:
            for r in gc.get_referrers(thing):
                own = (isinstance(r, FrameType) and r.f_code.co_filename == __file__) or type(r).__name__ == "list_iterator"
                if id(r) not in seen and not own and (type(r) is not list or id(r) in lists) and len(above) < most:
                    seen.add(id(r))
                    above.append(r)
                    lines.append("  " * depth + _said(r))
        level = above
    return "\n".join(lines)


def _said(thing: object) -> str:
    """Without what it holds, which may be a whole model."""
    if isinstance(thing, FrameType):
        return f"frame {thing.f_code.co_qualname} at {thing.f_code.co_filename}:{thing.f_lineno}"
    if isinstance(thing, BaseException):
        return f"{type(thing).__name__}: {str(thing)[:120]}"
    if isinstance(thing, dict):
        keys = [str(k)[:40] for k in list(cast(dict[object, object], thing))[:8]]
        return f"dict of {len(keys)} or more: {', '.join(keys)}"
    return type(thing).__name__


def kill(worker: Worker) -> bool:
    """As the system would when memory is short; whether there was anybody."""
    if worker.pid <= 1:  # it has not said its number yet
        return False
    try:
        os.kill(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class Chaos:
    """What goes on beside the calls: workers die, plans are exchanged far too often and forgotten now and then."""

    def __init__(self, engine: Any, seed: int, kill_every_s: float, forget: float) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._kill_every_s, self._forget = kill_every_s, forget
        self.spare = False
        """Kill more and more seldom: where machines are slow, compilations take longer than the time between two deaths."""
        self.due = False
        """Forget the next plan there is: chance has left all of them alone so far."""
        self._plans: dict[Entry, list[Plan]] = {}
        """What was once proven for an entry that is still there."""
        self.killed = self.swaps = self.forgotten = 0
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=work, name=f"soak{work.__name__}") for work in (self._kill, self._swap)]

    def _kill(self) -> None:
        while not self.stop.wait(self._kill_every_s * self._random.uniform(0.3, 1.7)):
            if running := service().pool.workers:
                self.killed += kill(self._random.choice(running))
            if self.spare:
                self._kill_every_s *= 2

    def _swap(self) -> None:
        """Exchange each entry's plan for another that was once proven for it: what a policy would do, only far too often."""
        while not self.stop.wait(SWAP_EVERY_S):
            present = [(site, e) for site in list(self._engine.sites.values()) for e in site.entries]
            self._plans = {e: self._plans.get(e, [e.baseline]) for _, e in present}
            for site, entry in present:
                known = self._plans[entry]
                if all(entry.plan is not p for p in known):
                    known[1:] = [entry.plan]
                before, entry.plan = entry.plan, self._random.choice(known)
                self.swaps += entry.plan is not before
                due = self.due and len(known) > 1
                if due:
                    entry.plan, self.due = known[1], False
                if due or self._random.random() < self._forget:
                    self._engine.plans.demote(site, entry)  # and it has to be compiled again
                    self._plans[entry] = [entry.baseline]
                    self.forgotten += 1

    def end(self) -> None:
        """No more harm; plans that only this held are let go of."""
        self.stop.set()
        for t in self.threads:
            t.join(30)
        self._plans.clear()
        self._engine.plans.let_go()  # whoever exchanges plans says so afterwards


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]  # fmt: skip


def allocated() -> int:
    """Bytes that were asked of the C library and not given back: what is held, without what lies idle between the pieces."""
    asked = ctypes.CDLL(None).mallinfo2
    asked.restype = _Mallinfo
    found = asked()
    return int(found.uordblks + found.hblkhd)


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@dataclass(slots=True)
class Scales:
    """What the process holds, over its calls."""

    calls: list[int] = field(default_factory=list[int])
    bytes: list[int] = field(default_factory=list[int])
    asked: list[int] = field(default_factory=list[int])
    """Of the C library."""

    def look(self, calls: int) -> None:
        self.calls.append(calls)
        self.bytes.append(resident())
        self.asked.append(allocated())

    def windows(self, of: Sequence[int]) -> list[float]:
        """The median of each quarter of the calls."""
        quarter = self.calls[-1] / WINDOWS + 1
        return [median(b for c, b in zip(self.calls, of, strict=True) if n <= c / quarter < n + 1) for n in range(WINDOWS)]

    def growth(self) -> tuple[float, float]:
        """Behind the first quarter, relative to what was held then: the last quarter's, and that of a line through all looks.

        The line's slope is the median of the slopes between looks half of the time apart, so a few odd looks do not bend it.
        """
        first = self.calls[-1] / WINDOWS
        late = [(c, b) for c, b in zip(self.calls, self.bytes, strict=True) if c >= first]
        half = len(late) // 2
        pairs = zip(late[:half], late[len(late) - half :], strict=True)
        slope = median((b2 - b1) / (c2 - c1) for (c1, b1), (c2, b2) in pairs if c2 > c1)
        base = self.windows(self.bytes)
        return base[-1] / base[1] - 1, slope * (late[-1][0] - late[0][0]) / base[1]


def settled(engine: Any, seconds: float = 30.0) -> list[Plan]:
    """Plans that nobody reaches, given some time: a thread that was about to let go of one may wait for the interpreter."""
    until = time.monotonic() + seconds
    while (left := held(engine)) and time.monotonic() < until:
        time.sleep(0.5)
    return left
