"""Calls of a program as they were recorded, by the sizes and types of its arguments (`recording.size_folding` records them)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from typing import Any

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.model_file import OnnxNode
from hotfuse.frontends.onnx.recording.written_runs import Form, WrittenRun, written
from hotfuse.frontends.onnx.values import Value

MAX_KINDS = 16
"""Kinds of sizes that one program records calls of."""
MAX_SEEN = 256
"""Kinds of sizes that are remembered to have come once."""
WRITTEN_AT, MAX_WRITTEN = 32, 256
"""The run that makes a function of a recording, and calls of those it is done for: 6 us a call, of which each run saves 0.3."""

Call = tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], tuple[int, ...], OnnxNode]
"""What to call, the slots it reads, those it writes, those nobody reads afterwards, and for whom."""
Kind = tuple[tuple[torch.Size, torch.dtype] | None, ...]
"""Sizes and type of each argument that is no constant; None of one that is absent."""


@dataclass(slots=True, eq=False)
class ProgramRecording:
    """The calls of a program for arguments of one kind. Threads that run it at once may write its function twice."""

    template: list[Value]
    """Slots before a run: constants, and what follows from them and from sizes."""
    in_slots: tuple[int, ...]
    calls: tuple[Call, ...]
    out_slots: tuple[int, ...]
    bytes: int = 0
    """Memory of what follows from sizes."""
    runs: int = 0
    """Runs so far, up to the one that wrote the function."""
    function: WrittenRun | None = field(default=None, init=False)
    """What runs it once it has come often."""

    def __call__(self, args: Sequence[Value]) -> tuple[Value, ...]:
        """The same as the program's own run."""
        if (function := self.function) is not None:
            return function(args)
        env = self.template.copy()
        for slot, value in zip(self.in_slots, args, strict=True):
            env[slot] = value
        forms: list[Form] = []
        for call, ins, outs, frees, _ in self.calls:
            result = call(*[env[i] for i in ins])
            if isinstance(result, tuple):
                forms.append(len(result))
                for slot, value in zip(outs, result):  # noqa: B905  an operator may return outputs nobody declared
                    env[slot] = value
            else:
                forms.append(None)
                env[outs[0]] = result
            for slot in frees:
                env[slot] = None
        self.runs += 1
        if self.runs == WRITTEN_AT and len(self.calls) <= MAX_WRITTEN:
            self.function = written(self.template, self.in_slots, self.calls, self.out_slots, forms)
        return tuple([env[i] for i in self.out_slots])


class ProgramRecordings:
    """The recorded runs of one program, by the kinds of its calls."""

    __slots__ = ("_seen", "_varying", "refused", "runs")

    def __init__(self, in_slots: Sequence[int], constant: Collection[int]) -> None:
        self.runs: dict[Kind, ProgramRecording] = {}
        self.refused: dict[Kind, str] = {}
        """Why calls of a kind are not recorded, or no longer."""
        self._seen: set[Kind] = set()
        self._varying = tuple(k for k, slot in enumerate(in_slots) if slot not in constant)

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a program records its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def kind(self, args: Sequence[Value]) -> Kind | None:
        """The kind of a call; None where an argument is no plain tensor."""
        found: list[tuple[torch.Size, torch.dtype] | None] = []
        for k in self._varying:
            x = args[k]
            if type(x) is torch.Tensor:
                found.append((x.shape, x.dtype))
            elif x is None:
                found.append(None)
            else:
                return None
        return tuple(found)

    def again(self, kind: Kind) -> bool:
        """Whether a call is to be recorded: one of its kind has come before, and there is room."""
        if kind in self._seen:
            return len(self.runs) + len(self.refused) < MAX_KINDS and kind not in self.refused
        if len(self._seen) < MAX_SEEN:
            self._seen.add(kind)
        return False

    def refuse(self, kind: Kind, error: Exception) -> None:
        """Calls of a kind run as the program stands."""
        self.runs.pop(kind, None)
        self.refused[kind] = f"{type(error).__name__}: {error}".splitlines()[0][:200]

    @property
    def bytes(self) -> int:
        """Memory that recordings hold."""
        return sum(r.bytes for r in list(self.runs.values()))

    @property
    def steps(self) -> int:
        """Calls of the longest recording; 0 where there is none."""
        return max((len(r.calls) for r in list(self.runs.values())), default=0)
