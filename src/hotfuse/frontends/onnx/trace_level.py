# pyright: reportPrivateUsage=false
# torch keeps unbacked sizes and the list of a graph's nodes private.
"""One graph being traced: its values, what is known of them, and the walk over a program's nodes.

Everything is a value of the graph under construction: fake tensors that make_fx tracks, `Opaque` values of unknown type,
and lists of them. Small tensors whose numbers are known carry those in a side table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size
from torch.overrides import TorchFunctionMode

from hotfuse.frontends.leaf import UNKNOWN, Leaf
from hotfuse.frontends.onnx import leaves, shape_algebra
from hotfuse.frontends.onnx.interp import Program, Step
from hotfuse.frontends.onnx.model import PortType
from hotfuse.frontends.onnx.registry import DataDependent
from hotfuse.frontends.onnx.settle import RANDOM
from hotfuse.frontends.onnx.shape_algebra import LIMIT, Numbers
from hotfuse.frontends.onnx.values import Value, is_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A value of unknown type; `const` is set when it is a constant torch has no type for."""

    proxy: fx.Proxy
    const: Any = None


ControlFn = Callable[["Level", Step, list[Value]], Sequence[Value]]
"""Traces a control operator; it needs levels of its own, so it is given from outside."""


@dataclass(slots=True)
class Session:
    """What all graphs of one trace share."""

    mode: FakeTensorMode
    control: ControlFn
    constants: dict[str, Value] = field(default_factory=dict[str, Value])
    key_of: dict[int, str] = field(default_factory=dict[int, str])
    leaves: dict[str, str] = field(default_factory=dict[str, str])
    counts: Counter[str] = field(default_factory=Counter[str])

    def key(self, value: Value) -> str:
        """The key of a constant; one that is not the model's own gets a new one."""
        found = self.key_of.get(id(value))
        if found is None:
            found = self.key_of[id(value)] = f"folded.{len(self.key_of)}"
        self.constants[found] = value
        return found

    def forget_pending(self) -> None:
        """Drop sizes that a function made before it failed; torch would wait for them in the next result."""
        assert self.mode.shape_env is not None
        self.mode.shape_env.pending_fresh_unbacked_symbols.clear()

    def fresh(self) -> Any:
        """A size that only a run can tell."""
        assert self.mode.shape_env is not None
        with self.mode.shape_env.ignore_fresh_unbacked_symbols():  # torch waits for no result to bind it
            size = self.mode.shape_env.create_unbacked_symint()
            _constrain_range_for_size(size)
        return size


def drop_unused(level: Level) -> None:
    """Remove the constants that nothing reads after all (their numbers were enough)."""
    for key, node in list(level.consts.items()):
        if not node.users:
            del level.consts[key]
            node.graph.erase_node(node)


def order_placeholders(gm: fx.GraphModule, order: Sequence[fx.Node | Mapping[str, Any]]) -> None:
    """Put the placeholders in front, in this order; where only a node's meta is given, a new unused one comes."""
    graph = gm.graph
    anchor: fx.Node = graph._root
    for want in order:
        if isinstance(want, fx.Node):
            node = want
        else:
            with graph.inserting_before(next(iter(graph.nodes))):
                node = graph.placeholder("unused")
            node.meta.update(want)
        node.target = node.name  # the parameter's name, so it must be unique
        anchor.append(node)
        anchor = node
    gm.recompile()


class TraceCtx:
    """The context an operator's function sees while tracing."""

    def __init__(self, level: Level, opset: int, n_outputs: int) -> None:
        self.level, self.opset, self.n_outputs = level, opset, n_outputs

    def ints(self, t: Any) -> list[Any]:
        """The numbers in a tensor, flat, as far as they are known."""
        if isinstance(t, np.ndarray):
            return t.reshape(-1).tolist()
        known = self.level.numbers(t)
        if known is None:
            raise DataDependent("the numbers are in the data")
        return list(known.flat)

    def tensor(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A 1-d tensor of numbers that may be symbolic, or a 0-d one of a number."""
        several = isinstance(numbers, Sequence)
        known = shape_algebra.array(numbers) if several else shape_algebra.array([numbers], ())
        return self.level.materialize(known, dtype)

    def known(self, t: Any) -> bool:
        """Whether `ints` would succeed."""
        return isinstance(t, np.ndarray) or self.level.numbers(t) is not None


class Level:
    """One graph being traced: the model's, or one inside a control operator."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tracer: Any = None
        self.inputs: list[fx.Node] = []
        self.consts: dict[str, fx.Node] = {}
        self.where = ""
        self._known: dict[int, tuple[torch.Tensor, Numbers]] = {}
        self._const_values: dict[str, Any] = {}

    # --- the graph -------------------------------------------------------------------------------

    def trace(self, body: Callable[[], Sequence[Value]]) -> fx.GraphModule:
        """Run `body` under make_fx; its results become the outputs, in a tuple."""

        def flat() -> tuple[Any, ...]:
            self.tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
            return tuple(self.as_output(v) for v in body())

        with self.session.mode:
            return make_fx(flat, tracing_mode="real", pre_dispatch=True)()

    def input(self, name: str, val: Any) -> Any:
        """A new input: a fake tensor, a host number, or UNKNOWN."""
        proxy = self._placeholder(name, val)
        self.inputs.append(proxy.node)
        return Opaque(proxy) if val is UNKNOWN else val

    def const(self, value: Value) -> Any:
        """A constant as a value of this graph; it becomes a placeholder behind the inputs."""
        if value is None:
            return None
        key = self.session.key(value)
        if key not in self._const_values:
            if isinstance(value, torch.Tensor):
                fake = isinstance(value, FakeTensor)
                val: Any = value if fake else self._described(value)
                self.consts[key] = self._placeholder(key, val).node
                if not fake and value.numel() <= LIMIT and value.dtype not in _NO_LIST:
                    with plainly():
                        self.know(val, shape_algebra.array(value.reshape(-1).tolist(), tuple(value.shape)))
            else:
                proxy = self._placeholder(key, UNKNOWN)
                self.consts[key] = proxy.node
                val = Opaque(proxy, value)
            self._const_values[key] = val
        return self._const_values[key]

    def _described(self, value: torch.Tensor) -> torch.Tensor:
        """A fake tensor that looks like a constant. Torch's own way asks a hundred questions, each of which the trace would see."""
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def _placeholder(self, name: str, val: Any) -> fx.Proxy:
        target = "".join(c if c.isalnum() else "_" for c in name)
        proxy = self.tracer.create_proxy("placeholder", f"v_{target}", (), {})
        if val is UNKNOWN:
            proxy.node.meta["val"] = UNKNOWN
        else:
            track_tensor_tree(val, proxy, constant=None, tracer=self.tracer)
        return proxy

    def proxy(self, v: Any) -> Any:
        """A value as an argument of a node."""
        if isinstance(v, Opaque):
            return v.proxy
        if isinstance(v, (list, tuple)):
            return [self.proxy(x) for x in v]
        if isinstance(v, (torch.Tensor, *shape_algebra.SYMBOLIC)):
            return self.tracer.unwrap_proxy(v)
        return v

    def as_output(self, v: Any) -> Any:
        """A value as make_fx takes results."""
        return v.proxy if isinstance(v, Opaque) else [self.as_output(x) for x in v] if isinstance(v, list) else v

    def emit(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        vals: Sequence[Any],
        *,
        tupled: bool,
    ) -> list[Any]:
        """Add a node whose results look like `vals`; gives them as values of this graph."""
        node_args = tuple(self.proxy(a) if not isinstance(a, tuple) else tuple(self.proxy(x) for x in a) for a in args)
        proxy = self.tracer.create_proxy(
            "call_function", target, node_args, {k: self.proxy(v) for k, v in kwargs.items()}
        )
        if not tupled:
            return [self._named(vals[0], proxy)]
        if all(v is not UNKNOWN for v in vals):
            return list(track_tensor_tree(tuple(vals), proxy, constant=None, tracer=self.tracer))
        out = [self._named(v, proxy[i]) for i, v in enumerate(vals)]
        proxy.node.meta["val"] = tuple(vals)
        return out

    def _named(self, val: Any, proxy: fx.Proxy) -> Any:
        if val is UNKNOWN:
            proxy.node.meta["val"] = UNKNOWN
            return Opaque(proxy)
        return track_tensor_tree(val, proxy, constant=None, tracer=self.tracer)

    # --- known numbers ---------------------------------------------------------------------------

    def numbers(self, t: Any) -> Numbers | None:
        """The numbers a tensor is known to hold."""
        found = self._known.get(id(t))
        return found[1] if found is not None else None

    def know(self, t: torch.Tensor, numbers: Numbers) -> torch.Tensor:
        """Remember what a tensor holds."""
        self._known[id(t)] = (t, numbers)
        return t

    def materialize(self, numbers: Numbers, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that holds the numbers; what turns out unused is removed with the dead code."""
        if shape_algebra.is_static(numbers):
            with plainly():
                real = torch.tensor(numbers.tolist(), dtype=dtype).reshape(numbers.shape)
            return self.const(real)
        scalars = [torch.scalar_tensor(_number(n), dtype=dtype) for n in numbers.flat]
        return self.know(torch.stack(scalars).reshape(numbers.shape), numbers)

    # --- the walk --------------------------------------------------------------------------------

    def run(self, program: Program, args: Sequence[Value]) -> list[Value]:
        """Trace a program on values of this graph."""
        env: list[Value] = list(program.template)
        for slot in program.consts:
            env[slot] = _Const(env[slot])
        for slot, value in zip(program.in_slots, args, strict=True):
            env[slot] = value

        def read(slot: int) -> Value:
            if isinstance(env[slot], _Const):
                env[slot] = self.const(env[slot].value)
            return env[slot]

        for step in program.steps:
            self.where = f"graph {program.name!r}, node {step.node.title!r} ({step.node.op})"
            last = self.tracer.graph._root._prev
            results = self.step(step, [read(i) for i in step.ins])
            node = last.next
            while node.op != "root":
                node.meta.setdefault("hotfuse_name", step.node.title)
                node = node.next
            for slot, value in zip(step.outs, results, strict=False):
                env[slot] = value
        return [read(i) for i in program.out_slots]

    def step(self, step: Step, args: list[Value]) -> Sequence[Value]:
        """Trace one node: folded, as sizes, as ATen operators, or whole."""
        match step.kind:
            case "control":
                return self.session.control(self, step, args)
            case "function":
                return self.run(step.programs[0], args)
            case _:
                pass
        if (folded := self.fold(step, args)) is not None:
            return folded
        if (sizes := self._sizes(step, args)) is not None:
            return sizes
        if step.kind == "fallback":
            return self._expanded(step, args)
        if any(_is_opaque(a) for a in args) and not _handles_lists(step, args):
            return self.leaf(step, args, "an input's type is unknown")
        assert step.fn is not None
        try:
            attrs = {k: self._attr(v) for k, v in step.attrs.items()}
            with _WholeRecurrent(self) if step.node.op in _RECURRENT else nullcontext():
                out = step.fn(TraceCtx(self, step.opset, len(step.node.outputs)), *args, **attrs)
        except Exception as e:  # whatever keeps a function from tracing, the operator itself can still run whole
            self.session.forget_pending()
            first = next((line for line in str(e).splitlines() if line.strip()), "")
            return self.leaf(step, args, f"{type(e).__name__}: {first[:200]}")
        results = list(out) if isinstance(out, tuple) else [out]
        if any(not self._mine(r) for r in results):
            return self.leaf(step, args, "its result does not follow from its inputs' types")
        return results

    def _mine(self, v: Any) -> bool:
        """Whether a result can be named in this graph."""
        if isinstance(v, list):
            return all(self._mine(x) for x in v)
        if isinstance(v, torch.Tensor):
            return isinstance(self.proxy(v), fx.Proxy)
        return v is None or isinstance(v, Opaque)

    def _attr(self, v: Any) -> Any:
        return self.const(v) if is_tensor(v) else v

    def fold(self, step: Step, args: list[Value]) -> list[Value] | None:
        """Run a node on constants at once; None unless every input is a small one."""
        if not args or step.node.op in RANDOM or step.kind == "fallback":
            return None
        real: list[Any] = []
        for a in args:
            if isinstance(a, Opaque) and a.const is not None and a.const.size <= LIMIT:
                real.append(a.const)
            elif a is None:
                real.append(None)
            elif isinstance(a, torch.Tensor) and (n := self.numbers(a)) is not None and shape_algebra.is_static(n):
                with plainly():
                    real.append(torch.tensor(n.tolist(), dtype=a.dtype).reshape(n.shape))
            else:
                return None
        try:
            with plainly():
                out = step.call(*real)
        except Exception:
            return None  # the same error, with its place, comes from running the node whole
        results = list(out) if isinstance(out, tuple) else [out]
        if not all(r is None or (is_tensor(r) and _count(r) <= LIMIT) for r in results):
            return None
        return [self.const(r) for r in results]

    def _sizes(self, step: Step, args: list[Value]) -> list[Value] | None:
        """A node of shape arithmetic."""
        if step.node.domain or step.node.op not in shape_algebra.ROWS or not args:
            return None
        operands = [None if a is None else self.numbers(a) for a in args]
        if any(o is None and a is not None for o, a in zip(operands, args, strict=True)):
            return None
        dtypes = [a.dtype for a in args if a is not None]
        dtype = dtypes[1] if step.node.op == "Where" else dtypes[0]
        found = shape_algebra.evaluate(step.node.op, operands, dict(step.attrs), dtype)
        return None if found is None else [self.materialize(n, d) for n, d in found]

    def _expanded(self, step: Step, args: list[Value]) -> Sequence[Value]:
        definition = step.definition
        assert definition is not None
        body = None
        if not any(_is_opaque(a) for a in args):
            with plainly():
                body = definition.expand(tuple(args))
        if not isinstance(body, Program):
            return self.leaf(step, args, "the operator has no mapping of its own")
        return self.run(body, args)

    def leaf(self, step: Step, args: Sequence[Value], why: str) -> list[Value]:
        """Keep a node whole."""
        node, n_out = step.node, len(step.node.outputs)
        self.session.leaves.setdefault(node.op, why)
        self.session.counts[node.op] += 1
        with disable_proxy_modes_tracing():
            types = leaves.result_types(node, step.opset, args, step.attrs, self.session.fresh)
            vals = [UNKNOWN if t is None else torch.empty(t[1], dtype=t[0]) for t in types]
        attrs = {k: str(v) if isinstance(v, PortType) else self._attr(v) for k, v in step.attrs.items()}
        target = Leaf(leaves.leaf_name(node.op, node.domain, step.opset, n_out))
        return self.emit(target, args, attrs, vals, tupled=n_out > 1)


class _WholeRecurrent(TorchFunctionMode):
    """Keeps recurrent operators whole with types of our own: torch's fake kernels would fix batch and length to numbers."""

    _OPS: ClassVar[dict[Any, Any]] = {
        torch.lstm: torch.ops.aten.lstm.input,
        torch.gru: torch.ops.aten.gru.input,
        torch.rnn_tanh: torch.ops.aten.rnn_tanh.input,
        torch.rnn_relu: torch.ops.aten.rnn_relu.input,
    }

    def __init__(self, level: Level) -> None:
        super().__init__()
        self.level = level

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op = self._OPS.get(func)
        if op is None or kwargs or len(args) != 9:
            return func(*args, **(kwargs or {}))
        x, start, bidirectional = args[0], args[1], args[7]
        states = list(start) if isinstance(start, (list, tuple)) else [start]
        with disable_proxy_modes_tracing():
            y = x.new_empty((*x.shape[:-1], states[0].shape[-1] * (2 if bidirectional else 1)))
            vals = [y, *(torch.empty_like(s) for s in states)]
        return tuple(self.level.emit(op, args, {}, vals, tupled=True))


@dataclass(frozen=True, slots=True)
class _Const:
    """A constant not yet asked for."""

    value: Value


_NO_LIST = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
)
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_STRUCTURAL = frozenset(
    {"SequenceConstruct", "SequenceAt", "SequenceInsert", "SequenceErase", "SequenceLength", "SequenceEmpty"}
)
"""Operators that only handle lists of values, whatever those are."""


def _handles_lists(step: Step, args: Sequence[Value]) -> bool:
    """Whether a node only puts values into a known list or takes them out."""
    op = step.node.op
    return op in _STRUCTURAL and (op == "SequenceConstruct" or isinstance(args[0], list))


def _is_opaque(v: Any) -> bool:
    return isinstance(v, Opaque) or (isinstance(v, list) and any(_is_opaque(x) for x in v))


def _number(n: Any) -> Any:
    return torch.sym_ite(n, 1, 0) if isinstance(n, torch.SymBool) else n


def _count(v: Any) -> int:
    return v.numel() if isinstance(v, torch.Tensor) else v.size


@contextmanager
def plainly() -> Generator[None]:
    """Compute with real tensors, outside of the trace."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch._C.DisableTorchFunction():
        yield
