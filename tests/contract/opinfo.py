"""PyTorch's OpInfo database as cases: functions of tensors alone, with everything else bound.

The same cases feed the op table's contract (what do the ops really do?) and the end-to-end oracle.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.seeds import seed

DTYPES = (torch.float32, torch.int64, torch.bool)

# Not ops of a model: they make or take what no graph holds, or exist for other devices or for autograd.
EXCLUDED = {
    "jiterator_": "compiles CUDA code",
    "to_sparse": "sparse tensors are outside the graph's types",
    "sparse.": "sparse tensors are outside the graph's types",
    "resize_": "changes its input's storage",
    "_softmax_backward_data": "a gradient",
    "max_pool2d_with_indices_backward": "a gradient",
    "native_dropout_backward": "a gradient",
    "broadcast_shapes": "takes and gives shapes, no tensor (a torch.Size comes back as a tuple: see test_edges)",
}


@dataclass(frozen=True)
class Case:
    """One sample input: `fn(*tensors)` calls the op with its other arguments bound."""

    op: str
    dtype: torch.dtype
    index: int
    fn: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]

    @property
    def id(self) -> str:
        return f"{self.op}-{str(self.dtype).removeprefix('torch.')}-{self.index}"


def op_names() -> list[str]:
    """Every OpInfo that is an op of a model."""
    return [name for o in op_db if not (name := _name(o)).startswith(tuple(EXCLUDED))]


def cases(op: str, per_dtype: int) -> Iterator[Case]:
    """The first samples of an op in each dtype it supports; fresh tensors at every call."""
    info = _BY_NAME[op]
    for dtype in DTYPES:
        if not info.supports_dtype(dtype, "cpu"):
            continue
        seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # All of them: a generator left halfway sets the grad mode when it is collected, in the middle of a trace.
            # The function itself: `info.sample_inputs` walks the stack in search of a unittest, very slowly.
            samples = list(info.sample_inputs_func(info, "cpu", dtype, False))
        spread = samples[:: max(1, len(samples) // per_dtype)][:per_dtype]  # neighbours are often alike
        for index, sample in enumerate(spread):
            yield _case(op, dtype, index, (sample.input, *sample.args), sample.kwargs)


def call_op(op: str, *args: Any, **kwargs: Any) -> Any:
    """An op by its name in the database; a function of this module, so that a worker process can find it."""
    return _BY_NAME[op].op(*args, **kwargs)


def _case(op: str, dtype: torch.dtype, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Case:
    leaves, spec = tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = tuple(leaves[i] for i in at)
    leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def fn(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, t in zip(at, tensors, strict=True):
            filled[i] = t
        a, k = tree_unflatten(filled, spec)
        return call_op(op, *a, **k)

    return Case(op, dtype, index, fn, tensors)


def _name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


_BY_NAME = {_name(o): o for o in op_db}
