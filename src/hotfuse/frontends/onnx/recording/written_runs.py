"""A recording whose sizes come again and again, as one Python function.

Slots become its variables, and what is read by number in every call becomes names:

    def run(args):
        v7, v8, = args
        v9 = f0(v7, c2)
        v10, v11, = f1(v9, v8)
        del v9
        return (v10, v11,)

For a speech model of 30 calls that is an eighth of its time, and as much as 36 runs save to write it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.values import Value

Form = int | None
"""How many results a call gives, as a tuple; None of one that gives its only result by itself."""
WrittenRun = Callable[[Sequence[Value]], tuple[Value, ...]]


@dataclass(frozen=True, slots=True)
class KnownBehind:
    """A call of one value, with what is known of it behind that: written as one call instead of two."""

    call: Callable[..., Any]
    known: tuple[Any, ...]

    def __call__(self, x: Any) -> Any:
        """What it stands for."""
        return self.call(x, *self.known)


@runtime_checkable
class ChoosesOnce(Protocol):
    """A call that finds out what it is best made by."""

    def choice(self) -> Callable[..., Any] | None:
        """The function that it calls from now on; None while that is open."""
        ...


def written(
    template: Sequence[Value], in_slots: Sequence[int], calls: Sequence[tuple[Any, ...]], out_slots: Sequence[int],
    forms: Sequence[Form],
) -> WrittenRun:  # fmt: skip
    """The function of a recording whose calls gave results of these forms."""
    bound: dict[str, Any] = {}
    variables = set(in_slots)

    def read(slot: int) -> str:
        if slot in variables:
            return f"v{slot}"
        if template[slot] is None:
            return "None"
        bound[f"c{slot}"] = template[slot]
        return f"c{slot}"

    lines = [f"{_names(in_slots)} = args"] if in_slots else []
    for k, ((made_by, ins, outs, frees, _), form) in enumerate(zip(calls, forms, strict=True)):
        call: Any = made_by
        args = [read(slot) for slot in ins]
        if isinstance(call, KnownBehind):
            names = [f"k{k}_{place}" for place in range(len(call.known))]
            bound.update(zip(names, call.known, strict=True))
            args, call = [*args, *names], call.call
        elif isinstance(call, ChoosesOnce) and (fixed := call.choice()) is not None:
            call = fixed
        bound[f"f{k}"] = call
        text = f"f{k}({', '.join(args)})"
        if form is None:
            lines.append(f"v{outs[0]} = {text}")
        elif not form:
            lines.append(text)
        else:
            lines.append(f"{_names(outs[:form])} = {text}" + (f"[:{len(outs)}]" if form > len(outs) else ""))
        variables.update(outs if form is None else outs[:form])
        if gone := [slot for slot in frees if slot in variables]:
            lines.append(f"del {', '.join(f'v{slot}' for slot in gone)}")
            variables.difference_update(gone)
    lines.append(f"return ({''.join(f'{read(slot)}, ' for slot in out_slots)})")
    body = "\n".join(f"    {line}" for line in lines)
    exec(compile(f"def run(args):\n{body}\n", "<hotfuse recording>", "exec"), bound)
    return bound["run"]


def _names(slots: Sequence[int]) -> str:
    return "".join(f"v{slot}, " for slot in slots)
