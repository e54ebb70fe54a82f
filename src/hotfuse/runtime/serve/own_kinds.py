"""Which calls of the model's own code one recording is for.

A recording repeats kernels with the sizes they were launched with. So calls are told apart by all that decides on kernels:
structure, sizes, strides and types, what a model's code may ask of its arguments besides (class, gradients, which of them are one
object), what is around the call, and which kernels are allowed. Counts that objects hold
(`base.structure`) are numbers that kernels were launched with; they are part of the sizes.

A call that writes its own arguments (a key/value cache) is recorded where those lie: its kind has their addresses. Nothing of
them is held. The caller brings the memory that a replay writes; that it is the same memory is all a replay asks for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hotfuse.backends.device_protocol import Replay
from hotfuse.base.errors import InputError
from hotfuse.base.known_structure import KnownStructures
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import Taken, take_call
from hotfuse.runtime.serve.own_effects import allowed_kernels, around_call, transformed
from hotfuse.runtime.tierup.audit import Audit
from hotfuse.runtime.tierup.contest import LiveContest
from hotfuse.runtime.tierup.race import Trial

MAX_KINDS = 256
"""Kinds of calls that are remembered; the one not seen for the longest is forgotten."""
MAX_PLACES = 16
"""Addresses that written arguments of otherwise equal calls have had without one of them being replayed, before it is given up."""
_TENSORS = (torch.Tensor, torch.nn.Parameter)
Rebuild = Callable[[tuple[Any, ...], Sequence[Any]], Any]
"""What the model returns, of a recording's results and the lists, dicts and objects that the call was given."""


def _first(outs: tuple[Any, ...], _holders: Sequence[Any]) -> Any:
    return outs


@dataclass(slots=True, eq=False)
class OwnKind:
    """Calls that one recording can answer, and what became of it."""

    text: str
    """The sizes, for readers."""
    structure: Any = None
    met: int = 0
    put_off: int = 0
    """Calls that could have been recorded, had no job been at work."""
    recording: Replay | None = None
    rebuild: Rebuild = _first
    proofs: int = 0
    contest: LiveContest | None = None
    audit: Audit | None = None
    trial: Trial | None = None
    refused: str = ""
    notices: bool = False
    """Whether the model's code may ask whether it is recorded: it could not be without."""
    written: tuple[int, ...] = ()
    """The tensors that such a call writes, once that is known."""
    of: OwnKind | None = None
    """Of a kind by addresses: the one of all addresses, which knows what is written and has the verdict of the first race."""
    places: int = 0
    """How many such kinds there were since one was replayed."""
    calls: int = 0
    next_look: int = 0
    looked: int = 0
    """The call that was timed last."""
    used: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For `explain()`."""
        state = "refused" if self.refused else "raced" if self.trial is None else "replayed"
        took = (
            None
            if self.trial is None
            else {"us_before": round(self.trial.old_us, 1), "us_after": round(self.trial.new_us, 1)}
        )
        audited = self.audit.state() if self.audit is not None else None
        return {"call": self.text, "state": state, "because": self.refused, "calls": self.calls, "race": took,
                "audit": None if audited is None else audited.to_dict()}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class OwnCall:
    """A call of a kind."""

    kind: OwnKind
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Sequence[torch.Tensor]
    """Those on the device."""
    holders: Sequence[Any] = ()

    def taken(self) -> Taken:
        """The call taken apart: counts are among its leaves."""
        return take_call(self.args, self.kwargs)

    def written(self) -> list[torch.Tensor]:
        """What it writes."""
        return [self.tensors[i] for i in self.kind.written]


def is_count(t: torch.Tensor) -> bool:
    """Whether a tensor carries nothing but a count, or nothing at all."""
    return t.dtype is torch.bool and t.dim() == 2 and not t.shape[1] and t.device.type == "cpu"


class OwnKinds:
    """The kinds of calls that one model had."""

    def __init__(self, device_kind: str, lock: threading.Lock) -> None:
        """`device_kind` is torch's name of the devices whose calls are recorded."""
        self._device_kind, self._lock = device_kind, lock
        self._known = KnownStructures()
        self._never: set[Any] = set()
        """Structures of calls that are never recorded, whatever their sizes are."""
        self._seen: set[Any] = set()
        self._kinds: OrderedDict[Any, OwnKind] = OrderedDict()

    def __iter__(self) -> Iterator[OwnKind]:
        """Those of now, without a lock."""
        return iter(list(self._kinds.values()))

    def clear(self) -> None:
        """Forget all of them."""
        self._kinds.clear()
        self._never.clear()
        self._seen.clear()

    def first_of(self, call: OwnCall) -> bool:
        """Whether nobody has looked so far at what calls of this structure do to the lists, dicts and objects they are given."""
        if not call.holders or call.kind.structure in self._seen:
            return False
        if len(self._seen) < MAX_KINDS:
            self._seen.add(call.kind.structure)
        return True

    def never(self, kind: OwnKind) -> None:
        """Calls of this structure are not looked at again."""
        if len(self._never) < MAX_KINDS:
            self._never.add(kind.structure)

    def meet(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OwnCall | None:
        """A call as one of its kind; None where such calls are never recorded."""
        tensors: Sequence[Any] = (*args, *kwargs.values())
        structure: Any = (len(args), *kwargs)
        holders: Sequence[Any] = ()
        counts: Sequence[Any] = ()
        if not all(type(t) in _TENSORS for t in tensors):
            try:
                taken, known = self._known.take(args, kwargs)
                structure, holders, leaves = taken.spec if known is None else known.number, taken.holders, taken.leaves
                if structure in self._never:
                    return None
            except (InputError, TypeError):
                return None
            if known is not None:
                counts, tensors = [leaves[i].shape[0] for i in known.counts], [leaves[i] for i in known.tensors]
            else:
                counts = [t.shape[0] for t in leaves if is_count(t)]
                tensors = [t for t in leaves if not is_count(t)] if counts else leaves
        first = tensors[0].device if tensors and isinstance(tensors[0], torch.Tensor) else None
        if (
            first is None
            or first.type != self._device_kind
            or not all(type(t) in _TENSORS and t.device == first for t in tensors)
        ):
            return None
        if any(t.layout is not torch.strided or t.is_neg() or t.is_conj() or t.__dict__ for t in tensors):
            return None  # the model's code may ask a tensor for attributes of its own
        if (around := around_call()) is None or transformed():
            return None
        asked = [(t.shape, t.stride(), t.dtype, type(t), t.requires_grad) for t in tensors]
        key = (structure, tuple(counts), around, first, allowed_kernels(), _same_objects(tensors), *asked)
        kind = self._kinds.get(key) or self._new(key, structure, tensors)
        if kind.written and not kind.refused:
            where = tuple([tensors[i].data_ptr() for i in kind.written])
            if _overlap(tensors, kind.written):
                return None
            kind = self._kinds.get((key, where)) or self._elsewhere(kind, (key, where))
        return OwnCall(kind, args, kwargs, tensors, holders)

    def _new(self, key: Any, structure: Any, tensors: Sequence[torch.Tensor]) -> OwnKind:
        text = ", ".join(f"{str(t.dtype).removeprefix('torch.')}[{', '.join(map(str, t.shape))}]" for t in tensors[:8])
        text += f" and {len(tensors) - 8} more" if len(tensors) > 8 else ""
        return self._remember(key, OwnKind(text, structure))

    def _elsewhere(self, kind: OwnKind, key: Any) -> OwnKind:
        """The same calls with written arguments at other addresses. What a race of theirs showed holds here as well."""
        kind.places += 1
        made = OwnKind(kind.text, kind.structure, written=kind.written, of=kind, trial=kind.trial, notices=kind.notices)
        return self._remember(key, made)

    def _remember(self, key: Any, kind: OwnKind) -> OwnKind:
        with self._lock:
            kind = self._kinds.setdefault(key, kind)
            for old, other in list(self._kinds.items())[: max(0, len(self._kinds) - MAX_KINDS)]:
                if other.recording is None:
                    del self._kinds[old]
        return kind


def _same_objects(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """By argument the first one that is the same object, where any two are: the model's code may compare them."""
    places: dict[int, int] = {}
    first = tuple([places.setdefault(id(t), i) for i, t in enumerate(tensors)])
    return first if len(places) < len(tensors) else ()


def _overlap(tensors: Sequence[torch.Tensor], written: Sequence[int]) -> bool:
    """Whether what a call writes may be seen through another of its tensors."""
    memory = [t.untyped_storage().data_ptr() if t.numel() else -1 - i for i, t in enumerate(tensors)]
    theirs = {memory[i] for i in written}
    return sum(m in theirs for m in memory) > len(theirs)
