# pyright: reportPrivateUsage=false
# A tensor's version has no public name.
"""Models whose calls change their own buffers or attributes: calls show which those are, and they become arguments
(`frontends.lifted_state`).

A capture that ends because the model changes what is its own has the next calls looked at: buffers whose versions changed, and
attributes that hold other tensors or counts, are the model's state. From then on an engine serves the model with them in front of
its arguments. Its plans compute on what the model holds, and that is written back when all results are there, so calls follow each
other: where a second thread calls meanwhile, the model's own code answers from there on, as it would without us.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling, is_dynamo_compiling

from hotfuse.base.events import Action, Why
from hotfuse.base.living import Living
from hotfuse.base.structure import take_call
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.frontends.lifted_state import (
    Keeper,
    KeptValues,
    LiftedState,
    Owner,
    StatePlaces,
    attributes_of,
    can_be_kept,
    writable_state,
)
from hotfuse.machine import team_size
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.serve.effects import is_small, same_bits
from hotfuse.runtime.site import Site
from hotfuse.runtime.tally import NEVER

MAX_LOOKS = 8
"""Calls that are looked at for what they change, behind each capture that ended so."""
MAX_LIFTED = 3
"""Sets of buffers that are tried: a call may change some, and another one more."""

_GRADIENTS = "it changes its own buffers or attributes, and gradients are enabled: call it under torch.no_grad()"

Lift = Callable[[LiftedState], Engine]


class BufferBefore:
    """A buffer before a call."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self._version = tensor._version
        self._copy = tensor.clone() if is_small(tensor) else None

    def changed(self) -> bool:
        """Whether it was written since; torch's batch norm writes its statistics without counting that."""
        return self.tensor._version != self._version or (self._copy is not None and not same_bits(self.tensor, self._copy))


class StateServing:
    """Serves a model; `serve` is what answers calls now."""

    def __init__(self, target: Any, plain: Engine, lift: Lift) -> None:
        self._target = target
        self._plain = plain
        self._lift = lift
        self.engine = plain
        """What serves now."""
        self.serve: Callable[[tuple[Any, ...], dict[str, Any]], Any] = plain.serve
        self._model: LiftedState | None = None
        self._tried: list[StatePlaces] = []
        self._remembered = StatePlaces()
        """What calls of an earlier process were seen to change."""
        self._looks = 0
        self._owners: list[Owner] = []
        self._keepers: list[Keeper] = []
        self._generation = -1
        self._site: Site | None = None
        """Of the engine with state, where that has one and no other: it says how many calls the model's own code answers."""
        self._turn = threading.RLock()
        plain.limits.undecided = lambda: self.serve != (self._observed if plain.limits.told else plain.serve)
        plain.plans.site_came = self._rest_anew
        _ALL.add(self)

    def _rest_anew(self) -> None:
        """The plans have a new site, or something else serves. Calls have a rest before they come here only of a model whose calls
        change nothing, as others take turns, and only while all calls have one structure, or one's rest would hide another.

        A process that slept finds nothing in its caches: Python that decides this inside of `serve` took 15 to 25 us then."""
        self._plain.share_rest(None if self.serve == self._plain.serve else self._seen)

    def _seen(self, *args: Any, **kwargs: Any) -> Any:
        return self.serve(args, kwargs)

    def _serve_by(self, serve: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self.serve = serve
        self._rest_anew()

    def changes_itself(self) -> None:
        """A capture ended because the model writes what is its own: look at the next calls."""
        if not isinstance(self._target, nn.Module) or len(self._tried) >= MAX_LIFTED or self._plain.plans.closed:
            self._give_up("it changes more than its buffers hold, or in another way")
            return
        self._looks = 0
        self._serve_by(self._observed)

    def plain_changes_itself(self) -> None:
        """Like `changes_itself`, for a capture without state; one that began before the state was known says nothing new."""
        if self.serve != self._with_state:
            self.changes_itself()

    def remembers(self, state: StatePlaces) -> bool:
        """Calls of an earlier process changed this of the same model: the next call is served with it, and no capture without it
        is wanted. False where the model cannot be served so now."""
        if self._tried or self._plain.plans.closed or not state.can_be_lifted(self._target):
            return False
        self._remembered = state
        self.changes_itself()
        return True

    def after_fork(self) -> None:
        """In a forked child: a call under way is in the parent."""
        self._turn = threading.RLock()

    def close(self) -> None:
        """Later calls run the model's own code."""
        self._serve_by(self._plain.serve)
        self._plain.close()
        self.engine.close()

    def _observed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call with the model's own code, and see what it changes."""
        if is_compiling():
            return self._plain.serve(args, kwargs)
        if torch.is_grad_enabled():
            self._with_gradients()
            return self._plain.serve(args, kwargs)
        with self._turn:
            before = [BufferBefore(name, t) for name, t in writable_state(self._target).items()]
            held = attributes_of(self._target)
            result = self._plain.serve(args, kwargs)
            now = dict(self._target.named_buffers())
            written = frozenset(b.name for b in before if now.get(b.name) is b.tensor and b.changed())
            after = attributes_of(self._target)
            other = [n for n, v in held.items() if n in after and after[n] is not v]
            put = frozenset(n for n in other if can_be_kept(held[n]) and can_be_kept(after[n]))
            self._looks += 1
            known = self._tried[-1] if self._tried else StatePlaces()
            state = known.joined(self._remembered).joined(StatePlaces(written, put))
            if state != known and self.serve == self._observed:
                self._serve_with(state)
            elif self._looks >= MAX_LOOKS:
                self._give_up("nothing further of it was seen to change")
            return result

    def _with_gradients(self) -> None:
        """Calls with gradients enabled are the model's own: a backward pass would have to see the state as it was. Those without
        them may come later, so that is said, and nothing is given up."""
        if _GRADIENTS not in self._plain.limits.told:
            self._plain.limits.told.append(_GRADIENTS)
            self._plain.log.decide(Action.REFUSE, Why.STATEFUL, self._plain.model.name, because=_GRADIENTS)

    def _serve_with(self, state: StatePlaces) -> None:
        """Have an engine serve the model with these buffers and attributes as arguments."""
        self._tried.append(state)
        self._let_go()
        model = LiftedState(self._target, tuple(sorted(state.buffers)), tuple(sorted(state.attributes)))
        model.training = self._target.training
        self._model, self._generation = model, -1
        self.engine = self._lift(model)
        self.engine.around_plans(self._outside_s)
        names = ", ".join((*model.places, *model.attributes))[:200]
        self._plain.log.decide(Action.NOTICE, Why.STATEFUL, self._plain.model.name, state=names,
                               what="what a call changes is an argument and a result of the graph from here on")  # fmt: skip
        self._serve_by(self._with_state)

    def _with_state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call with the model's state in front of its arguments. Whether anybody else traces is asked behind the rest: to a
        process that slept that takes longer than all before it (decision 410), and the own code may be traced as it is."""
        if is_dynamo_compiling():
            return self._plain.serve(args, kwargs)
        turn = self._turn
        if not turn.acquire(blocking=False):
            with turn:  # what is under way writes its results first
                self._give_up("several threads call it at once, and each call begins with what the one before it left")
            return self._plain.serve(args, kwargs)
        try:
            engine = self.engine
            if self._generation != engine.plans.generation and not self._find():
                return self._plain.serve(args, kwargs)
            site = self._site
            rest = NEVER if site is None else site.rest
            if rest.left > 0 and not (background_priority.jobs and team_size.has_every_core()):
                rest.left -= 1
                engine.everyone.rest.passed += 1
                return self._target(*args, **kwargs)
            if is_compiling():
                return self._plain.serve(args, kwargs)
            state = [owner[name] for owner, name in self._owners]
            if not self._keepers:
                result = engine.serve((*state, *args), kwargs)
                self._site = engine.only_site()  # none once calls have several structures: one's rest would hide another
                return result
            return self._with_kept(engine, (*state, kept_in(self._keepers)), args, kwargs)
        except StateGone as e:
            self._give_up(f"it has no attribute {e} any more")
            return self._plain.serve(args, kwargs)
        finally:
            turn.release()

    def _with_kept(self, engine: Engine, state: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same where calls set attributes: what the object holds behind the call is put there."""
        result = engine.serve((*state, *args), kwargs)
        self._site = engine.only_site()
        for (owner, name), value in zip(self._keepers, vars(state[-1]).values(), strict=True):
            if owner.get(name) is not value:
                owner[name] = value
        return result

    def _outside_s(self) -> float:
        """What having the state among the arguments takes: calls that go straight to the model's own code have none of that, nor
        of looking for the attributes, which the own code does where the two are compared."""
        times, model = list[float](), self._model
        for _ in range(MAX_LOOKS + 1):
            begin = time.perf_counter()
            state = [owner[name] for owner, name in self._owners]
            if self._keepers:
                take_call((*state, kept_in(self._keepers)), {})
                if model is not None:
                    model.keepers()
            times.append(time.perf_counter() - begin)
        return median(times)

    def _find(self) -> bool:
        """Where the state is, in the model as it is now; False where it is no more."""
        if self._model is None:
            return False
        try:
            owners, keepers = self._model.owners(), self._model.keepers()
            self._owners, self._keepers, self._generation = owners, keepers, self.engine.plans.generation
        except (AttributeError, KeyError) as e:
            self._give_up(f"it has no buffer or attribute {e} any more")
            return False
        return True

    def _give_up(self, because: str) -> None:
        """The model's own code answers from here on."""
        if self.engine is not self._plain or self.serve != self._plain.serve:
            self._plain.log.decide(Action.KEEP, Why.STATEFUL, self._plain.model.name, because=because)
        self._serve_by(self._plain.serve)
        self._let_go()

    def _let_go(self) -> None:
        engine, self.engine, self._model, self._site = self.engine, self._plain, None, None
        if engine is not self._plain:
            engine.close()


class StateGone(Exception):
    """An attribute that calls set is there no more."""


def kept_in(keepers: list[Keeper]) -> KeptValues:
    """What the attributes hold now."""
    kept = KeptValues()
    for i, (owner, name) in enumerate(keepers):
        if name not in owner:
            raise StateGone(name)
        setattr(kept, f"v{i}", owner[name])
    return kept


_ALL: Living[StateServing] = Living()


def _after_fork() -> None:
    for serving in _ALL:
        serving.after_fork()


os.register_at_fork(after_in_child=_after_fork)
