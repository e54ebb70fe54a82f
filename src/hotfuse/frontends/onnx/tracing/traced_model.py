"""Trace an ONNX model into an fx graph of undecomposed ATen operators.

The tracer walks the interpreter's programs and calls the same operator functions on fake tensors under `make_fx`. What it
adds to the interpreter:

- numbers that shapes are computed with are carried beside their tensors (`shape_algebra`), so `ctx.ints` gives
  symbolic sizes and operators on plain constants are folded;
- an operator that needs the data, or an input whose type is unknown, stays whole as a `Leaf`, and so does
  everything that needs the type of its result;
- `If`, `Loop`, `Scan` become `ControlLeaf`s over graphs traced the same way (`trace_control`); a condition that is known, or
  that only asks about sizes, is decided here and becomes a guard.

All constants are placeholders behind the inputs, also in nested graphs, so every graph is closed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from hotfuse.base.errors import CaptureError
from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.captured import TensorSpec
from hotfuse.frontends.dynamo_stand_in import symbols_without_dynamo
from hotfuse.frontends.leaf import UNKNOWN
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.model_file import PortType
from hotfuse.frontends.onnx.tracing import control as trace_control
from hotfuse.frontends.onnx.tracing.level import Session, TracedLevel, drop_unused, order_placeholders
from hotfuse.frontends.onnx.tracing.node_walk import run
from hotfuse.frontends.onnx.values import Value
from hotfuse.frontends.size_source import size_source


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced model: `gm(*inputs, *[constants[k] for k in keys])` gives the outputs as a tuple."""

    gm: fx.GraphModule
    n_inputs: int
    keys: tuple[str, ...]
    """Constants in the order of the placeholders behind the inputs."""
    constants: Mapping[str, Value]
    """The model's weights that are used, by their key in `OnnxModule.weights`, and what tracing folded (`folded.N`)."""
    shape_env: ShapeEnv
    leaves: Mapping[str, str]
    """Operators that stayed whole -> why."""

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the graph on one call's inputs."""
        return self.gm(*inputs, *(self.constants[k] for k in self.keys))


def fresh_mode() -> FakeTensorMode:
    """A fake mode that allows result shapes to depend on data.

    It keeps no results of operators: a file is traced once, and with open sizes hardly any operator comes again as it was, while
    to keep a result takes as long as to make it.
    """
    env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def trace(module: OnnxModule, inputs: Sequence[TensorSpec | None], mode: FakeTensorMode | None = None) -> Traced:
    """Trace for calls that look like `inputs`; None stands for an input that is not a torch tensor.

    Weights may be fake tensors of the given mode.
    """
    mode = mode or fresh_mode()
    env = mode.shape_env
    assert env is not None
    session = Session(mode, trace_control.trace_step)
    session.key_of = {id(v): k for k, v in module.weights.items()}
    names = [p.name for p in module.inputs]
    level = TracedLevel(session)
    try:
        with warnings.catch_warnings(), torch.no_grad(), symbols_without_dynamo():
            warnings.simplefilter("ignore")
            fakes = fake_inputs(mode, env, inputs, [p.type for p in module.inputs])
            gm = level.trace(
                lambda: run(level, module.program, [level.input(n, f) for n, f in zip(names, fakes, strict=True)])
            )
    except CaptureError:
        raise
    except Exception as e:
        raise CaptureError(
            f"{module.model.source} cannot be traced",
            where=level.where,
            because=error_text(e),
            hint="it keeps running as it is",
        ) from e
    drop_unused(level)
    keys = tuple(level.consts)
    order_placeholders(gm, [*level.inputs, *level.consts.values()])
    return Traced(gm, len(inputs), keys, {k: session.constants[k] for k in keys}, env, session.leaves)


def fake_inputs(
    mode: FakeTensorMode, env: ShapeEnv, specs: Sequence[TensorSpec | None], types: Sequence[PortType]
) -> list[Any]:
    """Fake tensors. Dynamic dims that the model gives one name share one symbol.

    So do unnamed ones of equal size in different inputs (batches, mostly): the graph then only serves calls where they are
    equal, which is checked like any repeated symbol, and some torch operators would fix them to a number otherwise.
    """
    named: dict[str, Any] = {}
    unnamed: dict[int, Any] = {}
    out: list[Any] = []
    for i, (spec, port) in enumerate(zip(specs, types, strict=True)):
        if spec is None:
            out.append(UNKNOWN)
            continue
        declared = (
            port.shape if port.shape is not None and len(port.shape) == len(spec.shape) else (None,) * len(spec.shape)
        )
        shape: list[Any] = []
        mine: dict[int, Any] = {}
        for d, size in enumerate(spec.shape):
            if d not in spec.dynamic:
                shape.append(size)
                continue
            name = declared[d]
            name = name if isinstance(name, str) and name.isprintable() and any(c.isalnum() for c in name) else None
            dim = named.get(name) if name is not None else unnamed.get(size)
            if dim is None:
                source = size_source(f"input{i}_{d}")
                hint = size if size > 1 else 17 + 2 * len(out) + d  # 0 and 1 would be burnt in
                dim = env.create_symintnode(
                    env.create_symbol(hint, source, DimDynamic.DYNAMIC), hint=hint, source=source
                )
            if name is not None:
                named[name] = dim
            else:
                mine.setdefault(size, dim)
            shape.append(dim)
        unnamed = {**mine, **unnamed}
        with mode:
            out.append(torch.empty(shape, dtype=spec.dtype, device=spec.device))
    return out
