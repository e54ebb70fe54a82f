"""What a plan's results do to the call: its result, the caller's objects, and tensors that are written in place.

A plan is a pure function. What the model's own code would have changed (a cache that grew, a buffer that was written) comes out of
it as further results, and is written back when all of them are there.

A cache that grew may share memory with what it was before (`backends.llvm.runs.growth`). In the model's own code the two have
memory of their own, so a program that still holds the older one may write to it. Behind the call its own references are all that
should be left of it: where there is another one, to the tensor or to its memory, the new one gets memory of its own at once.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from hotfuse.analysis.growth import grown_results
from hotfuse.base.changed_arguments import changes_nothing, contents, finish, take_after
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.raw_bytes import raw_bytes
from hotfuse.base.structure import Spec, Taken, take_call
from hotfuse.frontends.captured import Captured, DeadDraw, Warned
from hotfuse.runtime.samples import snapshot
from hotfuse.runtime.serve.kept_memory import kept_by_static_caches
from hotfuse.runtime.tierup.agreement import COPIED_BYTES

MAX_COMPARED = 1 << 16
"""Elements of a tensor that is compared by what it holds besides its version: running statistics have fewer."""


@dataclass(frozen=True, slots=True)
class Effects:
    """How results of a plan become what the call gives and changes."""

    spec: Spec
    """Of the result and of what the call changes in its objects."""
    written: tuple[int, ...] = ()
    """Tensors of the call that it writes to; what they hold then is behind the other results, in this order."""
    returned: tuple[tuple[int, int], ...] = ()
    """Results that are such a tensor itself: (result, tensor)."""
    draws: tuple[DeadDraw, ...] = ()
    """Random numbers that the model draws and nobody reads: behind the call the generator is where it would be."""
    warned: tuple[Callable[[], None], ...] = ()
    """Each gives a warning of the model's again; Python's filters decide whether it is shown, or raised."""
    logged: tuple[tuple[logging.Logger, int], ...] = ()
    """Where the model's code logs: as long as that is heard, it answers itself."""
    grown: tuple[tuple[int, int], ...] = ()
    """Results that may lie in the memory of one of the call's tensors, with more behind it: (result, tensor)."""

    owned: Callable[[], Collection[int]] = frozenset
    """Where memory of the model's own tensors begins."""

    @property
    def changes_arguments(self) -> bool:
        """Whether a call changes anything of what it was given."""
        return bool(self.written) or not changes_nothing(self.spec)

    def fits(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether a call is as captured: nobody listens to what it logs, and what is written shares no memory with others."""
        if self.logged and heard(self.logged):
            return False
        if not self.written:
            return True
        memory = [t.untyped_storage().data_ptr() if t.numel() else -1 - i for i, t in enumerate(leaves)]
        owned = self.owned()
        return all(memory.count(memory[i]) == 1 and memory[i] not in owned for i in self.written)

    def unwritten(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors as they are now, whatever the call writes into them: for who keeps them as an example of a call."""
        return [snapshot(t) if i in self.written else t for i, t in enumerate(leaves)] if self.written else leaves

    def finish(self, outs: Sequence[Any], leaves: Sequence[torch.Tensor], holders: Sequence[Any]) -> Any:
        """The call's result; what it changes is changed."""
        for warn in self.warned:
            warn()
        behind = len(outs) - len(self.written)
        results = list(outs[:behind])
        for k, i in self.returned:
            results[k] = leaves[i]
        result = finish(self.spec, results, holders)
        if self.grown and (held := [k for k, i in self.grown if held_elsewhere(results[k], leaves, i)]):
            for k in held:
                results[k] = results[k].clone()
            result = finish(self.spec, results, holders)
        for i, new in zip(self.written, outs[behind:], strict=True):
            leaves[i].copy_(new)
        for draw in self.draws:
            _DRAW[draw.op](draw.shape, dtype=draw.dtype)
        return result


def effects_of(spec: Spec, captured: Captured, owned: Callable[[], Collection[int]] = frozenset) -> Effects | None:
    """None where a call does nothing but compute, and gives nothing of what it was given; raises CaptureError where its code logs
    and is heard, or warns in a way that cannot be repeated.
    """
    done = captured
    logged = loggers(done.logged)
    if at := heard(logged):
        raise CaptureError(
            f"the model's code logs to {at[0].name!r} at level {logging.getLevelName(at[1])}", why=Why.SIDE_EFFECT,
            because="a captured graph would leave it out", hint="raise the logger's level where the model serves",
        )
    warned = tuple(map(_warning, done.warned))
    if changes_nothing(spec) and not (done.written or done.draws or warned or logged):
        return None
    return Effects(spec, done.written, done.returned, done.draws, warned, logged, grown_results(done.graph), owned)


def shares_memory(results: Sequence[Any], given: Sequence[torch.Tensor]) -> bool:
    """Whether a result lies in the memory of a tensor that the call was given, without being that tensor."""
    memory, known = {t.untyped_storage().data_ptr() for t in given if t.numel()}, set(map(id, given))
    tensors = [r for r in results if isinstance(r, torch.Tensor) and r.layout is torch.strided and r.numel() and id(r) not in known]
    return bool(memory) and any(r.untyped_storage().data_ptr() in memory for r in tensors)


def loggers(named: Iterable[tuple[str, int]]) -> tuple[tuple[logging.Logger, int], ...]:
    """Loggers by their names, each with a level."""
    return tuple((logging.getLogger(name), level) for name, level in named)


def heard(logged: Sequence[tuple[logging.Logger, int]]) -> tuple[logging.Logger, int] | None:
    """The first of some loggers that lets a level through."""
    return next(((log, level) for log, level in logged if log.isEnabledFor(level)), None)


def _warning(warned: Warned) -> Callable[[], None]:
    """Gives a warning at the place where the model's code gives it; raises CaptureError where its class is not found."""
    home, _, name = warned.category.partition(":")
    found: Any = sys.modules.get(home)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Warning)):
        raise CaptureError("the model's code gives a warning that cannot be repeated", because=f"there is no {warned.category}",
                           where=f"{warned.filename}:{warned.lineno}", why=Why.SIDE_EFFECT)  # fmt: skip
    category: type[Warning] = found
    names: dict[str, Any] = getattr(sys.modules.get(warned.module), "__dict__", {})
    registry: dict[Any, Any] = names.setdefault("__warningregistry__", {})
    return lambda: warnings.warn_explicit(warned.text, category, warned.filename, warned.lineno, warned.module, registry)


_OURS, _OURS_OF_MEMORY = 2, 3
"""References behind a call: the call's own list and the question itself; the two tensors and the question itself."""


def held_elsewhere(grown: torch.Tensor, leaves: Sequence[torch.Tensor], i: int) -> bool:
    """Whether a result lies in the memory of a tensor of the call that somebody else can still reach."""
    if grown.data_ptr() != leaves[i].data_ptr() or not leaves[i].numel():
        return False
    memory = grown.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    return sys.getrefcount(leaves[i]) > _OURS or _uses_of_memory(memory) > _OURS_OF_MEMORY + kept_by_static_caches(memory)


_uses_of_memory: Callable[[int], int] = torch._C._storage_Use_Count  # pyright: ignore
_DRAW = {"rand": torch.rand, "randn": torch.randn}


class Before:
    """What a call was given, as it was before the model's own code ran."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[torch.Tensor]) -> None:
        self._leaves = leaves
        self._holders = take_call(args, kwargs).holders
        self._held = [contents(h) for h in self._holders]
        self._versions = _versions(leaves)

    def after(self, result: Any) -> Taken:
        """The result and what the call changed in its objects; raises InputError where that cannot be taken apart."""
        return take_after(result, self._holders, self._held)

    def written_places(self) -> list[int]:
        """Which of its tensors the call wrote to, as far as torch shows that."""
        now = _versions(self._leaves)
        return [i for i, (old, new) in enumerate(zip(self._versions, now, strict=True)) if old is not None and old != new]

    def written(self, copies: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copies of those tensors that the call wrote in place; `copies` are what they held before. What small ones on the host
        hold decides, too: a batch norm writes its statistics without counting that."""
        now = _versions(self._leaves)
        return {
            i: t.detach().clone()
            for i, (t, old, new, copy) in enumerate(zip(self._leaves, self._versions, now, copies, strict=True))
            if (old is not None and old != new) or ((old is None or is_small(t)) and not same_bits(t, copy))
        }


def is_small(t: torch.Tensor) -> bool:
    """Whether comparing what a tensor holds costs a call next to nothing: on the host, and as ordinary memory."""
    return t.layout is torch.strided and not t.is_nested and t.is_cpu and not t.is_quantized and t.numel() <= MAX_COMPARED


def same_bits(now: torch.Tensor, was: torch.Tensor) -> bool:
    """On the host where that is little: kernels that compare would have to be loaded first, 20 ms in a first call."""
    if now.numel() * now.element_size() <= COPIED_BYTES:
        now, was = now.detach().cpu(), was.cpu()
    return torch.equal(_bits(now.detach()), _bits(was.detach()))


def _bits(t: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, in a row; what torch only notes of it (signs, conjugates) is in the numbers."""
    t = t.resolve_conj().resolve_neg()
    if t.dtype is torch.bool or not t.numel():  # NumPy gives empty arrays strides of zero, and torch views none of those
        return t.reshape(-1)
    return raw_bytes(t)


def _versions(leaves: Sequence[torch.Tensor]) -> list[int | None]:
    """What tells later whether tensors were written in place; None where nothing does."""
    return [None if t.is_inference() else t._version for t in leaves]  # pyright: ignore[reportPrivateUsage]
