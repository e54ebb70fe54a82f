"""Plans are exchanged under calls, and nobody notices but by the clock."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import torch
from torch import nn

from hotfuse.runtime.background import Background
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.epochs import Epochs
from hotfuse.runtime.plans import Plans
from hotfuse.runtime.serve.dispatch import InlineCache
from hotfuse.runtime.tally import Everyone
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange
from tests.mechanisms.table import Row, World, replaced
from tests.runtime.test_dispatch import special
from tests.runtime.test_epochs import Thing, manual, settle
from tests.runtime.test_tiers import Compiler, race_says, served


def held_for_a_call(_world: World) -> float:
    """Whether code that a call is in outlives its retirement, and goes afterwards."""
    epochs, now = manual()
    slot, freed = epochs.slot(), list[str]()
    slot.epoch = epochs.now
    epochs.retire(Thing(), lambda: freed.append("it"))
    settle(epochs, now)
    during = len(freed)
    slot.epoch = 0
    settle(epochs, now)
    return len(freed) - during


def freed_elsewhere(_world: World) -> float:
    """Things freed on a thread that serves nobody."""
    epochs, threads, done = Epochs(), list[int](), threading.Event()

    def free() -> None:
        threads.append(threading.get_ident())
        done.set()

    epochs.retire(Thing(), free)
    assert done.wait(30)
    return sum(t != threading.get_ident() for t in threads)


def at_once(_self: object, _thing: object, free: Any = None) -> None:
    if free is not None:
        free()


def served_linear(world: World, twist: Any = lambda out: out) -> tuple[nn.Linear, Engine]:
    """A layer whose plan of tier 1 holds copies of its weights."""
    race_says(world.patch, True)
    model = nn.Linear(4, 4).eval()
    engine = served(model, Compiler(twist), world.settings())
    for _ in range(8):
        engine(torch.randn(3, 4))
    return model, engine


def right_after_a_change(world: World) -> float:
    model, engine = served_linear(world)
    model.weight.mul_(2)
    x = torch.randn(3, 4)
    return bool(torch.allclose(engine(x), model(x)))


def right_beside(world: World) -> float:
    """Whether a call that begins while another takes the stale plan away sees the change too."""
    model, engine = served_linear(world)
    x, answers = torch.randn(3, 4), list[torch.Tensor]()
    demote = engine.plans.demote

    def work() -> None:
        with torch.no_grad():
            answers.append(engine(x))

    beside = threading.Thread(target=work)

    def slowly(*args: Any) -> None:
        if beside.ident is None:
            beside.start()
            beside.join(0.3 if world.turned is None else 60.0)  # it waits for us where all is well
        demote(*args)

    world.patch.setattr(engine.plans, "demote", slowly)
    model.weight.mul_(2)
    engine(x)
    beside.join(120)
    return bool(torch.allclose(answers[0], model(x)))


def accepted_first(self: Any, _change: object, watch: Any) -> None:
    with self.lock:
        watch.accept(watch.observe())
        self.demote_all()


def right_after_a_fault(world: World) -> float:
    """A kernel that fails is answered for by the model's own code."""
    broken: list[bool] = []

    def twist(out: torch.Tensor) -> torch.Tensor:
        if broken:
            raise RuntimeError("a kernel failed")
        return out

    model, engine = served_linear(world, twist)
    broken.append(True)
    x = torch.randn(3, 4)
    try:
        return bool(torch.allclose(engine(x), model(x)))
    except RuntimeError:
        return 0


def raised(_self: object, failed: Any, *_a: object) -> None:
    raise failed[3]


def native(_world: World) -> float:
    site: InlineCache[str] = InlineCache(1, 3, lambda job: job())
    site.add(special(3))
    return site.table.native


def counted(_world: World) -> float:
    """Calls of threads that are gone."""
    everyone = Everyone()

    def work() -> None:
        everyone.join().tier0_calls += 5

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    return everyone.total()["tier0_calls"] == 15


def forked_child(world: World) -> float:
    """Whether a child knows that what was pending is its parent's."""
    _, engine = served_linear(world)
    background: Background = engine._background  # pyright: ignore[reportPrivateUsage]
    background.begin()
    if (pid := os.fork()) == 0:
        os._exit(0 if engine.wait(0.2) else 1)
    background.finished()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


row = functools.partial(Row, "hot swap")
ROWS: tuple[Row, ...] = (
    row("code that a call is in is not freed", held_for_a_call, replaced(Epochs, "retire", at_once)),
    row("code is freed on a thread that serves nobody", freed_elsewhere, replaced(Epochs, "retire", at_once)),
    row(
        "changed weights are noticed by the next call", right_after_a_change,
        replaced(ModelGuard, "check", lambda _self: WeightChange.NONE),
    ),
    row("changed weights are noticed by calls beside", right_beside, replaced(Plans, "changed", accepted_first)),
    row("a plan that fails is answered for", right_after_a_fault, replaced(Engine, "_answered_instead", raised)),
    row("dispatch is native code", native, replaced(InlineCache, "_harden", lambda _self: None)),
    row("calls of threads that ended count", counted, replaced(Everyone, "total", lambda self: {"tier0_calls": sum(
        c.tier0_calls for t, c in self._now if t() is not None and t().is_alive())})),
    row("a forked child begins anew", forked_child, replaced(Engine, "after_fork", lambda _self: None)),
)  # fmt: skip
