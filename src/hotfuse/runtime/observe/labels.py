"""What a user calls the inputs of a captured graph: graphs number them, the model's own code names its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hotfuse.base.structure import Spec
from hotfuse.ir.graph import Value

_LEAVES = frozenset({"tensor", "number", "count"})
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def input_labels(code: Callable[..., Any], spec: Spec, inputs: Sequence[Value]) -> dict[str, str]:
    """The parameter that each input of a graph came as, by the input's name; nothing of those that are called so already, and of
    code that does not say."""
    found = list(_leaves(_parameters(code), spec))
    if len(found) != len(inputs):
        return {}
    return {v.name: label for v, label in zip(inputs, found, strict=True) if label and label != v.name}


def _parameters(code: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(getattr(code, "forward", code)).parameters.values()
    except (TypeError, ValueError):  # native code
        return []
    return [p.name for p in parameters if p.kind in _NAMED]


def _leaves(parameters: Sequence[str], spec: Spec) -> Iterator[str]:
    """Labels of a call's leaves, in their order; of a leaf that no parameter names it is empty."""
    positional, named = spec.children
    told = [*((parameters[i] if i < len(parameters) else "", s) for i, s in enumerate(positional.children)),
            *zip(named.detail or (), named.children, strict=True)]  # fmt: skip
    for name, child in told:
        if child.kind in _LEAVES:
            yield name
        else:
            yield from (f"{name}[{i}]" if name else "" for i in range(_count(child)))


def _count(spec: Spec) -> int:
    return 1 if spec.kind in _LEAVES else sum(map(_count, spec.children))
