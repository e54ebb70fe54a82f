"""A kernel bound to memory: glue runs once and tells the addresses, and from then on a call is the kernel's code alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.backends.llvm.runs.kernel_call import glue
from hotfuse.backends.protocol import BoundKernel
from hotfuse.base.errors import InternalError
from hotfuse.ir.graph import Graph
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.run.constants import Constants


class _CallRecorder:
    """Stands in for a kernel to learn what it would be called with."""

    def __init__(self, kernel: NativeKernel, threads: int) -> None:
        self.kernel, self.has_scratch, self.address, self._own = kernel.kernel, kernel.has_scratch, kernel.address, kernel
        self._threads = threads
        self.args: tuple[int, ...] = ()
        self.scratch: Any = None

    def enter(self, *args: int) -> None:
        """Note the call."""
        self.args = args

    def arena(self, sizes: Mapping[str, int], threads: int) -> Any:
        """Memory that outlives the call: for the threads that it will be timed on, which are more than a worker has itself."""
        self.scratch = self._own.arena(sizes, max(threads, self._threads))
        return self.scratch


def bound(
    graph: Graph, lowered: Lowered, kernel: NativeKernel, weights: Mapping[str, torch.Tensor], inputs: Sequence[Any],
    threads: int, results: Sequence[Any] = (),
) -> BoundKernel:  # fmt: skip
    """A kernel on these inputs; it writes where others of the same kind did, so that where tensors lie tells nobody apart."""
    asked: Any = _CallRecorder(kernel, threads)
    run = glue(graph, lowered, asked, Constants(weights))
    own = list(run(*inputs))
    if not asked.args:
        raise InternalError("a kernel's glue did not call it")
    args = (*_redirected(asked.args, own, results)[:-1], threads)
    enter = kernel.enter
    return BoundKernel(lambda: enter(*args), own, (kernel, run, results, inputs, weights, asked))


def _redirected(args: tuple[int, ...], own: Sequence[Any], others: Sequence[Any]) -> tuple[int, ...]:
    """Arguments with the addresses of other results, where those are of the same kind."""
    pairs = [
        (a, b) for a, b in zip(own, others, strict=False) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    ]
    if not pairs or any(a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype for a, b in pairs):
        return args
    instead = {a.data_ptr(): b.data_ptr() for a, b in pairs if a.nbytes}
    return tuple(instead.get(n, n) for n in args)
