"""The constants of a plan: params as kernels read them, made once and shared by all kernels that want the same.

A param that lies as a kernel wants it is read where it is. Otherwise there is a copy: in another order of dims, or packed into
panels. Copies are counted, so that a plan can say what it holds besides the model's own weights. Plans of weights that nobody can
change share what they pack (`base.fixed_weights`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from hotfuse.base.errors import InternalError
from hotfuse.base.fixed_weights import MadeOf, made_of
from hotfuse.ir.types import DType, Layout
from hotfuse.lower.common.codec import argument_from_json, argument_to_json
from hotfuse.lower.common.lowered import PackArgument, StateArgument
from hotfuse.lower.common.pack import PackSpec, pack
from hotfuse.lower.run.description import Constant, Word
from hotfuse.lower.run.forks import Switch
from hotfuse.lower.run.kernel_state import KernelState
from hotfuse.tile.memory import NUMPY


class Constants:
    """Memory of constants by what they are; weights come by param key."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = weights
        self.bytes = 0
        """What copies take."""
        self.copied: set[str] = set()
        """Keys of params of which there is a copy, packed or in another order."""
        self.read: set[str] = set()
        """Keys of params that are read where they lie."""
        self.states: dict[int, KernelState] = {}
        """By their kernel's address."""
        self._made: dict[object, Any] = {}
        self._packed: dict[str, MadeOf[Any]] = {}

    def param(self, key: str, layout: Layout) -> torch.Tensor:
        """A param in a layout."""
        at = (key, layout)
        if at not in self._made:
            given = self.weights[key].detach()
            made = given if layout.strided else laid_out(given, layout)
            if made.data_ptr() != given.data_ptr():
                self.bytes += made.numel() * made.element_size()
                self.copied.add(key)
            else:
                self.read.add(key)
            self._made[at] = made
        return self._made[at]

    def pack(self, spec: PackSpec) -> Any:
        """Packed params; the spec's sources are keys."""
        at = json.dumps(argument_to_json(PackArgument("", spec)), sort_keys=True)
        if at not in self._packed:
            sources = {s.name: self.weights[s.name] for s in spec.sources}
            made = made_of([*sources.values()], at, lambda: pack(spec, {k: _array(w) for k, w in sources.items()}))
            self.bytes += made.value.nbytes
            self.copied |= set(sources)
            self._packed[at] = made
        return self._packed[at].value

    def state(self, code: int, words: tuple[int, ...]) -> KernelState:
        """The words of the kernel at this address that outlive its calls."""
        if code not in self.states:
            self.states[code] = KernelState(words)
        return self.states[code]

    def word(self, word: Word, kernels: Mapping[int, int]) -> tuple[int, Any]:
        """What a word of a run's table holds, and what has to stay alive for it; `kernels` are addresses of code."""
        match word.kind:
            case Constant.KERNEL:
                return kernels[word.kernel], None
            case Constant.PARAM:
                memory = self.param(word.key, word.layout)
                return memory.data_ptr(), memory
            case Constant.STRIDE:
                return int(self.weights[word.key].stride(word.dim)), None
            case Constant.PACK:
                argument = argument_from_json(json.loads(word.pack))
                if not isinstance(argument, PackArgument):
                    raise InternalError("a word of a table packs nothing")
                made = self.pack(argument.spec)
                return int(made.ctypes.data), made
            case Constant.STATE:
                argument = argument_from_json(json.loads(word.pack))
                if not isinstance(argument, StateArgument):
                    raise InternalError("a word of a table has no state")
                state = self.state(kernels[word.kernel], argument.words)
                return state.address, state
            case Constant.SWITCH:
                switch = Switch()
                return switch.address, switch


def _array(t: torch.Tensor) -> Any:
    """A weight's memory; bf16, which torch does not hand to NumPy, by its bits."""
    t = t.detach()
    return t.view(torch.int16).numpy().view(NUMPY[DType.BF16]) if t.dtype is torch.bfloat16 else t.numpy()


def laid_out(t: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor, copied if it does not lie in the wanted dimension order."""
    if layout.order is None:
        return t if t.is_contiguous() else t.contiguous()
    moved = t.permute(layout.order)
    if moved.is_contiguous():
        return t
    back = [layout.order.index(d) for d in range(len(layout.order))]
    return moved.contiguous().permute(back)
