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


def same_objects(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the first one that is the same object; nothing where each is another one."""
    ids = list(map(id, tensors))
    return tuple(map(ids.index, ids)) if len(set(ids)) < len(ids) else ()


def pattern(same: Sequence[int]) -> str:
    """The question which of the arguments are one object, with the answer that was traced."""
    return f"{IDENTITY} {','.join(map(str, same))}" if same else IDENTITY


def asks_identity(asked: Sequence[Asked]) -> bool:
    """Whether that is asked."""
    return any(a.what.startswith(IDENTITY) for a in asked)


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
    if asked.what == OWN:
        return _apart(own)
    if asked.what.startswith(IDENTITY):
        _, _, same = asked.what.partition(" ")
        return _identical(own, tuple(map(int, same.split(","))) if same else ())
    answers, at = _answers(asked.what), asked.at
    if at < 0:
        return lambda leaves: all(map(answers, leaves))
    return lambda leaves: answers(leaves[at])


def _apart(own: Sequence[Tensor]) -> AsTraced:
    """Whether no argument is one of the model's tensors."""
    held = {id(t): t for t in own}  # with the tensors, whose ids would be used again
    apart = held.keys().isdisjoint
    return lambda leaves: apart(map(id, leaves))


def _identical(own: Sequence[Tensor], same: tuple[int, ...]) -> AsTraced:
    """Whether that holds, and the same arguments as in the trace are one object."""
    apart = _apart(own)
    if not same:
        return lambda leaves: len(set(map(id, leaves))) == len(leaves) and apart(leaves)
    return lambda leaves: same_objects(leaves) == same and apart(leaves)


def _answers(what: str) -> Answers:
    if what == "gradients":
        return lambda t: not t.requires_grad and t.grad is None
    if what == "class":
        return lambda t: type(t) is Tensor
    name = what.removeprefix(ATTRIBUTE)
    return lambda t: name not in t.__dict__
