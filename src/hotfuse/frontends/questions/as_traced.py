"""Whether arguments answer what the model's code asks of them as traced ones did (`asked_tensors`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hotfuse.frontends.captured import Asked

ATTRIBUTE = "attribute "
"""Before the name of an attribute that is asked for."""
IDENTITY, OWN = "identity", "own"
"""Which of the arguments are one object, or one of the model's; the latter alone."""
DATA = "data"
"""What a tensor holds that is no argument, asked by Python: nothing of a call answers that (`ModelGuard.rests_on`)."""
Answers = Callable[[Tensor], bool]


AsTraced = Callable[[Sequence[Tensor]], bool]


def as_traced(asked: Sequence[Asked], own: Sequence[Tensor] = ()) -> AsTraced | None:
    """Whether the arguments of a call answer all questions as those did that were traced; None where nothing is asked. What was
    traced was none of the model's `own` tensors."""
    checks = tuple(_check(a, own) for a in asked if a.what != DATA)
    if len(checks) < 2:
        return checks[0] if checks else None

    def answered(leaves: Sequence[Tensor]) -> bool:
        return all(each(leaves) for each in checks)

    return answered


def _check(asked: Asked, own: Sequence[Tensor]) -> AsTraced:
    if asked.what in (IDENTITY, OWN):
        return _distinct(own, among_each_other=asked.what == IDENTITY)
    answers, at = _answers(asked.what), asked.at
    if at < 0:
        return lambda leaves: all(map(answers, leaves))
    return lambda leaves: answers(leaves[at])


def _distinct(own: Sequence[Tensor], *, among_each_other: bool) -> AsTraced:
    """Whether arguments are objects of their own."""
    held = {id(t): t for t in own}  # with the tensors, whose ids would be used again
    apart = held.keys().isdisjoint

    def distinct(leaves: Sequence[Tensor]) -> bool:
        found = set(map(id, leaves))
        return (len(found) == len(leaves) or not among_each_other) and apart(found)

    return distinct


def _answers(what: str) -> Answers:
    if what == "gradients":
        return lambda t: not t.requires_grad and t.grad is None
    if what == "class":
        return lambda t: type(t) is Tensor
    name = what.removeprefix(ATTRIBUTE)
    return lambda t: name not in t.__dict__
