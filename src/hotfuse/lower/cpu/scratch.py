"""Where a kernel's own memory lies: small buffers on the stack, the rest in an arena that the caller passes.

The arena holds what threads share, then one slice for the kernel itself and one for every thread of its parallel loops; sizes
are expressions over the kernel's sizes, evaluated by the caller and by the code alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, evaluate, expr
from hotfuse.ir.types import size_of
from hotfuse.tile.program import OWN, Buffer, BufferKind, Kernel

STACK_BYTES = 32 << 10
"""What all buffers on the stack may take together: threads of a pool have small stacks."""
LINE = 64


@dataclass(frozen=True, slots=True)
class Scratch:
    """The plan of a kernel's own memory."""

    stack: Mapping[str, int]
    """Bytes of the buffers on the stack; what threads share is on that of the one that forks."""
    arena: Mapping[str, Dim]
    """Offsets of the others in a slice of the arena."""
    slice: Dim
    """Bytes of one slice."""
    common: Mapping[str, Dim]
    """Offsets of what threads share and is not on the stack."""
    shared: Dim
    """Bytes of all that; slices begin behind it."""

    @property
    def needs_arena(self) -> bool:
        """Whether a call must provide one."""
        return bool(self.arena or self.common)

    def arena_bytes(self, sizes: Mapping[str, int], threads: int) -> int:
        """What the caller must provide, aligned to a cache line."""
        return evaluate(self.shared, sizes) + evaluate(self.slice, sizes) * (threads + 1)


def bytes_of(buffer: Buffer) -> Dim:
    """The reach of a buffer, rounded up to whole cache lines."""
    last = (expr("*", expr("+", n, -1), s) for n, s in zip(buffer.shape, buffer.stride, strict=True))
    reach = expr("*", expr("max", 1, expr("+", 1, *last)), size_of(buffer.dtype))
    return expr("*", expr("ceildiv", reach, LINE), LINE)


def plan(kernel: Kernel) -> Scratch:
    """Decide for every scratch buffer, in order, while the stack's share lasts."""
    stack: dict[str, int] = {}
    arena: dict[str, Dim] = {}
    common: dict[str, Dim] = {}
    used: Dim = 0
    shared: Dim = 0
    for buffer in kernel.buffers:
        if buffer.kind not in OWN:
            continue
        need = bytes_of(buffer)
        if isinstance(need, int) and sum(stack.values()) + need <= STACK_BYTES:
            stack[buffer.name] = need
        elif buffer.kind is BufferKind.SHARED:
            common[buffer.name] = shared
            shared = expr("+", shared, need)
        else:
            arena[buffer.name] = used
            used = expr("+", used, need)
    return Scratch(stack, arena, used, common, shared)
