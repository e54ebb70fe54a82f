# pyright: reportPrivateUsage=false
# Torch has no public name for what is asked of a backward pass while it runs.
"""Gradients of served calls: results carry a `grad_fn` whose backward pass runs the model's own code again.

A plan keeps nothing for a backward pass. So a call with gradients enabled runs in its plan as any other, and its results become
those of one autograd node that holds the call's inputs. Only when somebody calls `backward` does the model's own code run on them,
with autograd as in eager, and its gradients are the node's. A program that never does pays for one node a call.

    results -> _Served (one a call) -> inputs
                                    -> _Parameters (one for all calls) -> every parameter

Parameters hang behind a node of their own, because joining two hundred of them to every call would take longer than many a call.
Their gradients do not travel along the edge between the two: they wait in `Wanted.waiting` under the number of the backward pass,
and those of several calls are added up there, as the engine adds up what comes along edges.

Which results require gradients is seen in the model's own results, once for each pattern of what requires them among inputs and
parameters (`GradientLink`). Three kinds of calls cannot be served like eager. They stay in the model's own code, and `explain()`
says so. First, results that share memory with inputs, weights or one another (one tensor in several places is served). Second,
programs that do call `backward`: the model would run twice, and a loss of results that are rounded otherwise differs from eager's
(decision 41). Third, calls under hooks on saved tensors: `torch.utils.checkpoint` compares what a call saves with what its
repetition saves, and one of the two may run in a plan.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hotfuse.base.errors import CallFault, InternalError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import TENSOR, Spec, flatten, unflatten
from hotfuse.frontends.questions.as_traced import same_objects
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange

MIN_REST, MAX_REST = 16, 512
"""Calls that the model's own code serves after a backward pass, unless another one follows meanwhile. Twice as many where the last
rest ended too early, half as many where backward passes have become rare."""
RARE_CALLS_PER_REST = 8
"""Backward passes are rare where plans have served so many times as many calls since the last rest as that was long."""
MAX_WAITING = 16
"""Backward passes whose gradients of parameters are kept at once: those that were broken off leave theirs behind."""
MAX_PATTERNS = 16
"""Patterns of requiring gradients that one entry remembers."""

HOOKED = "saved tensors have hooks (checkpointing, save_on_cpu), which see what the model's own code saves"
_hooks_on_saved_tensors: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]

Pattern = tuple[bool, ...]
Gradient = torch.Tensor | None
requires = operator.attrgetter("requires_grad")


@dataclass(slots=True, eq=False)
class Wanted:
    """The parameters that require gradients now, and the node that stands for all of them."""

    watch: ModelGuard | None
    flags: list[bool]
    """Of every watched tensor that can require gradients."""
    same: Callable[[], bool]
    """Whether they are still those; a native sweep once calls are many (`harden`)."""
    parameters: tuple[torch.Tensor, ...]
    token: torch.Tensor | None
    """A number that depends on all of them; None where there are none."""
    waiting: dict[int, list[Gradient]]
    """Gradients of the parameters, by backward pass."""
    hooks: tuple[RemovableHandle, ...] = ()
    """Tell of every backward pass that reaches the parameters, wherever it began."""
    given: bool = False

    def harden(self) -> None:
        """Have native code compare the flags; for the background: the first time of a process compiles."""
        from hotfuse.native.requires import native_same

        if self.watch is not None and not isinstance(found := native_same(self.watch.differentiable, self.flags), str):
            self.same = found


    def forget(self) -> None:
        """Nobody is told of backward passes any more."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = ()


def wanted(watch: ModelGuard | None, told: Callable[[], None] | None = None) -> Wanted:
    """What requires gradients now; `told` hears of backward passes that reach any of it."""
    tensors = watch.differentiable if watch is not None else ()
    flags = list(map(requires, tensors))
    parameters = tuple({id(t): t for t, flag in zip(tensors, flags, strict=True) if flag}.values())
    waiting: dict[int, list[Gradient]] = {}
    with torch.inference_mode(False), torch.enable_grad():
        token = _Parameters.apply(waiting, *parameters) if parameters else None
    hooks = () if token is None or told is None else _listening(token, told)
    return Wanted(watch, flags, lambda: list(map(requires, tensors)) == flags, parameters, token, waiting, hooks)


def _listening(token: torch.Tensor, told: Callable[[], None]) -> tuple[RemovableHandle, ...]:
    """Hear of gradients as they arrive at the first and at the last parameter.

    They arrive at nodes of autograd's, which live as long as the token and are the same for all who compute with the parameters.
    The parameters themselves carry no hook that somebody could find, copy or save.
    """
    arrivals = [node for node, _ in token.grad_fn.next_functions if node is not None] if token.grad_fn is not None else []
    first_and_last = {id(node): node for node in (*arrivals[:1], *arrivals[-1:])}.values()
    return tuple(node.register_hook(lambda *_: told()) for node in first_and_last)


def opens_graph(results: Sequence[Any], leaves: Sequence[torch.Tensor]) -> bool:
    """Whether results carry a graph that begins inside of the model, or begin one: it asks for gradients where they are off."""
    return any(
        isinstance(r, torch.Tensor) and r.requires_grad and not isinstance(r, nn.Parameter) and all(r is not t for t in leaves)
        for r in results
    )


@dataclass(slots=True)
class GradientCounts:
    """What happened to calls that want gradients; any thread counts, and a lost count does no harm."""

    served: int = 0
    """Calls whose results carry a graph."""
    backwards: int = 0
    """Backward passes through those."""
    resting: int = 0
    """Calls for which the model's own code is still to serve."""
    rest: int = MIN_REST
    """How many those are after a backward pass."""
    rested: int = 0
    """Calls with a graph when plans last began to serve."""
    followed: bool = False
    """A backward pass was seen that nobody has acted on."""
    own: int = 0
    """Calls that it has served because backward passes follow."""
    hooked: int = 0
    """Calls that it has served because saved tensors have hooks."""

    def seen(self) -> None:
        """A backward pass reached the model's parameters, or came through a served call."""
        self.followed = True


@dataclass(frozen=True, slots=True, eq=False)
class GradientLink:
    """How results of calls with one pattern of requiring gradients are joined to the graph."""

    wanted: Wanted
    places: tuple[int, ...]
    """The results that require gradients, each once."""
    own: Callable[..., Any]
    """The model's own code."""
    spec: Spec
    """Of the call's arguments."""
    counts: GradientCounts
    alone: bool = False
    """The model has one result."""
    kept: str = ""
    """Why the model's own code serves such calls; empty where plans may."""
    repeats: tuple[tuple[int, int], ...] = ()
    """Results that are the tensor of a place: where, and which (`hidden_states[-1]` is `last_hidden_state`)."""


def _nobody(*_args: Any, **_kwargs: Any) -> Any:
    raise InternalError("a call without a graph has no backward pass")


PLAIN = GradientLink(wanted(None), (), _nobody, TENSOR, GradientCounts())
"""Of calls in which nothing requires gradients."""


class Gradients:
    """What one engine knows about gradients of its calls."""

    def __init__(self, own: Callable[..., Any], name: str, log: EventLog) -> None:
        self._own = own
        self._name = name
        self._log = log
        self._now = wanted(None)
        self.counts = GradientCounts()

    def wanted(self, watch: ModelGuard | None) -> Wanted:
        """What requires gradients now; made anew where that has changed."""
        now = self._now
        if now.watch is not watch or not now.same():
            now.forget()
            self._now = now = wanted(watch, self.counts.seen)
        return now

    def close(self) -> None:
        """Backward passes are nobody's business any more."""
        self._now.forget()
        self._now = wanted(None)

    def hardening_jobs(self) -> list[Callable[[], None]]:
        """A job that makes the comparison native, for a model that turned out to be hot; given out once."""
        now, given, self._now.given = self._now, self._now.given, True
        return [] if given or not now.flags else [now.harden]

    def link(
        self, links: Mapping[Pattern, GradientLink], watch: ModelGuard | None, leaves: Sequence[torch.Tensor]
    ) -> GradientLink | None:
        """How a call's results are joined to the graph; None where no call of its pattern was seen yet."""
        now, pattern = self.wanted(watch), tuple(map(requires, leaves))
        if not now.parameters and True not in pattern:
            return PLAIN
        link = links.get(pattern)
        return link if link is not None and link.wanted is now else None

    def seen(self, spec: Spec, outputs: Sequence[Any], leaves: Sequence[torch.Tensor], now: Wanted) -> GradientLink:
        """The model's own results of a call show how those of such calls are joined to the graph."""
        requiring = [i for i, o in enumerate(outputs) if isinstance(o, torch.Tensor) and o.requires_grad]
        first: dict[int, int] = {}
        repeats = tuple((i, at) for i in requiring if (at := first.setdefault(id(outputs[i]), i)) != i)
        places = tuple(first.values())
        kept = _sharing(outputs, places, leaves, now) if places else ""
        return GradientLink(now, places, self._own, spec, self.counts, len(outputs) == 1, kept, repeats)

    def learn(self, links: dict[Pattern, GradientLink], pattern: Pattern, link: GradientLink) -> None:
        """Results of such calls are joined like this from now on."""
        if link.kept and ((before := links.get(pattern)) is None or before.kept != link.kept):
            self._log.decide(Action.KEEP, Why.GRAD_NEEDED, self._name, because=link.kept)
        links[pattern] = link
        for oldest in list(links)[:-MAX_PATTERNS]:
            links.pop(oldest, None)

    def own_turn(self) -> bool:
        """Whether the model's own code is to serve a call that wants gradients, because the program calls `backward` or looks at
        what is saved for it."""
        counts = self.counts
        if _hooks_on_saved_tensors(False) is not None:  # noqa: FBT003  (torch's own, which takes no names)
            if not counts.hooked:
                self._log.decide(Action.KEEP, Why.GRAD_NEEDED, self._name, because=HOOKED)
            counts.hooked += 1
            return True
        if not counts.followed and counts.resting <= 0:
            return False
        if counts.followed:
            counts.followed = False
            if counts.resting <= 0:
                rare = counts.served - counts.rested > RARE_CALLS_PER_REST * counts.rest
                counts.rest = max(MIN_REST, counts.rest // 2) if rare else min(MAX_REST, 2 * counts.rest)
                self._log.decide(Action.KEEP, Why.DIFFERENTIATED, self._name, calls=counts.served, backwards=counts.backwards,
                                 for_calls=counts.rest)  # fmt: skip
            counts.resting = counts.rest
        counts.resting -= 1
        counts.rested = counts.served
        counts.own += 1
        return True

    def training(self) -> str:
        """That the program trains the model; empty where no backward pass followed a call."""
        return f"backward passes follow calls with gradients enabled ({self.counts.own} calls so far)" if self.counts.own else ""

    def explain(self, links: Iterable[Mapping[Pattern, GradientLink]] = ()) -> dict[str, Any]:
        """For `explain()` and `stats()`."""
        counts = self.counts
        told = {link.kept for each in links for link in list(each.values()) if link.kept}
        kept = sorted(told | {HOOKED} if counts.hooked else told)
        return {"served": counts.served, "backwards": counts.backwards, "own": counts.own, "kept": kept}


def _sharing(outputs: Sequence[Any], places: Sequence[int], inputs: Sequence[torch.Tensor], now: Wanted) -> str:
    """What a result with a gradient shares memory with: an in-place op on one would have to show in the graph of the other. Or that
    it is a leaf of the graph, which keeps its gradient."""
    owners = {_memory(t): "a weight" for t in (now.watch.tensors if now.watch is not None else ())}
    owners |= {_memory(t): "an input" for t in inputs}
    results: dict[int, int] = {}
    for i, out in enumerate(outputs):
        if not isinstance(out, torch.Tensor) or not out.numel():
            continue
        memory = _memory(out)
        if i in places and (owner := owners.get(memory)) is not None:
            return f"result {i} shares memory with {owner}"
        if i in places and out.grad_fn is None:
            return f"result {i} begins a graph of its own"
        other = results.setdefault(memory, i)
        if out is not outputs[other] and (i in places or other in places):
            return f"results {other} and {i} share memory"
    return ""


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


def joined(link: GradientLink, run: Callable[..., Sequence[Any]], leaves: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Run a call and join its results to the graph: those alone that the model's own code joins to it."""
    if not link.places:
        with torch.no_grad():  # kernels of tier 0 read the parameters themselves
            return tuple(run(*leaves))
    link.counts.served += 1
    outs: list[Any] = []
    try:
        made = _apply(link, run, outs, link.wanted.token, *leaves)
        if link.alone:
            return (made,)
    except RuntimeError as e:
        if any(t.is_inference() for t in leaves):
            raise CallFault("an input of inference mode cannot be kept for a backward pass") from e
        raise
    for place, out in zip(link.places, made if len(link.places) > 1 else (made,), strict=True):
        outs[place] = out
    for repeat, place in link.repeats:
        outs[repeat] = outs[place]
    return tuple(outs)


class _Parameters(torch.autograd.Function):
    """Stands between calls and all parameters."""

    @staticmethod
    def forward(ctx: Any, waiting: dict[int, list[Gradient]], *_parameters: torch.Tensor) -> torch.Tensor:
        ctx.waiting = waiting
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        found = ctx.waiting.pop(torch._C._current_graph_task_id(), None)
        return (None, *(found or (None,) * (len(ctx.needs_input_grad) - 1)))


class _Served(torch.autograd.Function):
    """One served call."""

    @staticmethod
    def forward(
        ctx: Any, link: GradientLink, run: Callable[..., Sequence[Any]], outs: list[Any], _token: torch.Tensor | None,
        *leaves: torch.Tensor,
    ) -> Any:
        watch = link.wanted.watch
        ctx.link, ctx.accepted = link, watch.accepted if watch is not None else 0
        ctx.save_for_backward(*leaves)
        ctx.set_materialize_grads(False)
        if link.alone:
            return _fresh(run(*leaves)[0], leaves)
        outs += run(*leaves)
        fresh: list[Any] = [_fresh(outs[i], leaves) for i in link.places]
        return tuple(fresh) if len(fresh) > 1 else fresh[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Gradient) -> tuple[Any, ...]:
        leaves: Sequence[torch.Tensor] = ctx.saved_tensors
        link: GradientLink = ctx.link
        _, _, _, parameters, *inputs = ctx.needs_input_grad
        link.counts.backwards += 1
        link.counts.seen()
        _unchanged(link.wanted.watch, ctx.accepted)
        found, weights = _differentiated(link, leaves, inputs, link.wanted.parameters if parameters else (), gradients)
        if not parameters:
            return None, None, None, None, *found
        waiting, number = link.wanted.waiting, torch._C._current_graph_task_id()
        before = waiting.get(number)
        waiting[number] = weights if before is None else [_sum(a, b) for a, b in zip(before, weights, strict=True)]
        for oldest in sorted(waiting)[:-MAX_WAITING]:
            waiting.pop(oldest, None)
        return None, None, None, torch.zeros(()), *found


_apply: Callable[..., Any] = super(torch.autograd.Function, _Served).apply  # type: ignore[misc]
"""Without the questions of `Function.apply` about function transforms, under which nothing is served."""


def _fresh(out: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result as a tensor that may get a `grad_fn`: not one that somebody else holds, nor one that torch takes for a view."""
    if out.requires_grad or out._is_view():
        return out.detach()
    for t in leaves:
        if out is t:
            return out.detach()
    return out


def _sum(a: Gradient, b: Gradient) -> Gradient:
    return b if a is None else a if b is None else a + b


def _unchanged(watch: ModelGuard | None, accepted: int) -> None:
    """Raise where the model is another one than the call ran in; of weights in torch's own words."""
    if watch is None:
        return
    change = watch.check() if watch.accepted == accepted else WeightChange.VALUES
    if change is WeightChange.VALUES:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            "a parameter or buffer of the served model was written between the call and backward()"
        )
    if change is WeightChange.MODEL:
        raise RuntimeError(
            "the served model was changed between the call and backward(), which runs its code again: "
            "an attribute, a part, a hook or its mode (train, eval) is another one; call backward() first"
        )


def _differentiated(
    link: GradientLink, leaves: Sequence[torch.Tensor], needs: Sequence[bool], parameters: Sequence[torch.Tensor],
    gradients: Sequence[Gradient],
) -> tuple[list[Gradient], list[Gradient]]:
    """The gradients of inputs and of parameters: the model's own code runs again.

    Where the backward pass itself is to be differentiated, they depend on the inputs through gates, which are closed here: what an
    input was made of may be a parameter too, and its gradient must not be counted twice.
    """
    create = torch.is_grad_enabled()
    closed = [True]
    same = same_objects(leaves) or range(len(leaves))
    needs = [need and first == i for i, (need, first) in enumerate(zip(needs, same, strict=True))]
    with torch.enable_grad():
        again = [_again(t, create=create, closed=closed) if need else t.detach() for t, need in zip(leaves, needs, strict=True)]
        again = [again[first] for first in same]  # what was one object is one, which gets the gradient
        args, kwargs = unflatten(link.spec, again)
        drawn = torch.get_rng_state()
        results = flatten(link.own(*args, **kwargs), numbers=True)[0]
        torch.set_rng_state(drawn)  # in eager a backward pass does not move the generator
    ends = [(results[i], g) for i, g in zip(link.places, gradients, strict=True) if g is not None and results[i].requires_grad]
    sources = [t for t, need in zip(again, needs, strict=True) if need]
    if not ends or not (sources or parameters):
        return [None] * len(leaves), [None] * len(parameters)
    with _without_hooks(parameters):
        made = torch.autograd.grad(
            [o for o, _ in ends], [*sources, *parameters], [g for _, g in ends], create_graph=create, allow_unused=True
        )
    closed[0] = False
    of_inputs = iter(made[: len(sources)])
    return [next(of_inputs) if need else None for need in needs], list(made[len(sources) :])


def _again(t: torch.Tensor, *, create: bool, closed: list[bool]) -> torch.Tensor:
    return _Gate.apply(t, closed) if create else t.detach().requires_grad_()  # type: ignore[no-any-return]


class _Gate(torch.autograd.Function):
    """The same numbers, and a graph behind them that leads on only while it is open."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, closed: list[bool]) -> torch.Tensor:
        ctx.closed = closed
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return None if ctx.closed[0] else gradients[0], None


_hooks = threading.RLock()


@contextmanager
def _without_hooks(parameters: Sequence[torch.Tensor]) -> Generator[None]:
    """Hooks of parameters run when their gradients arrive, of all calls together, and not for those of one call before that."""
    hooked = [(t, hooks) for t in parameters if (hooks := t._backward_hooks)]
    if not hooked:
        yield
        return
    with _hooks:
        try:
            for t, _ in hooked:
                t._backward_hooks = None
            yield
        finally:
            for t, hooks in hooked:
                t._backward_hooks = hooks
