"""Whether arguments answer what the model's code asks of them as traced ones did (`asked_tensors`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hotfuse.frontends.captured import Asked

ATTRIBUTE = "attribute "
"""Before the name of an attribute that is asked for."""
Answers = Callable[[Tensor], bool]


AsTraced = Callable[[Sequence[Tensor]], bool]


def as_traced(asked: Sequence[Asked]) -> AsTraced | None:
    """Whether the arguments of a call answer all questions as those did that were traced; None where nothing is asked."""
    checks = tuple(map(_check, asked))
    if len(checks) < 2:
        return checks[0] if checks else None

    def answered(leaves: Sequence[Tensor]) -> bool:
        return all(each(leaves) for each in checks)

    return answered


def _check(asked: Asked) -> AsTraced:
    if asked.what == "identity":
        return lambda leaves: len(set(map(id, leaves))) == len(leaves)
    answers, at = _answers(asked.what), asked.at
    if at < 0:
        return lambda leaves: all(map(answers, leaves))
    return lambda leaves: answers(leaves[at])


def _answers(what: str) -> Answers:
    if what == "gradients":
        return lambda t: not t.requires_grad and t.grad is None
    if what == "class":
        return lambda t: type(t) is Tensor
    name = what.removeprefix(ATTRIBUTE)
    return lambda t: name not in t.__dict__
