# pyright: reportPrivateUsage=false
# torch keeps unbacked sizes and the list of a graph's nodes private.
"""One graph being traced: its values, and what is known of them. The walk over a program's nodes is `trace_walk`.

Everything is a value of the graph under construction: fake tensors that make_fx tracks, `Opaque` values of unknown type,
and lists of them. Small tensors whose numbers are known carry those in a side table.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any

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

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.leaf import UNKNOWN
from hotfuse.frontends.onnx.onnx_program import ProgramStep
from hotfuse.frontends.onnx.tracing import shape_algebra
from hotfuse.frontends.onnx.tracing.direct import Descriptions, DirectOperators
from hotfuse.frontends.onnx.tracing.shape_algebra import LIMIT, Numbers
from hotfuse.frontends.onnx.values import Value


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A value of unknown type; `const` is set when it is a constant torch has no type for."""

    proxy: fx.Proxy
    const: Any = None


ControlFn = Callable[["TracedLevel", ProgramStep, list[Value]], Sequence[Value]]
"""Traces a control operator; it needs levels of its own, so it is given from outside."""


@dataclass(slots=True)
class Session:
    """What all graphs of one trace share."""

    mode: FakeTensorMode
    control: ControlFn
    constants: dict[str, Value] = field(default_factory=dict[str, Value])
    key_of: dict[int, str] = field(default_factory=dict[int, str])
    leaves: dict[str, str] = field(default_factory=dict[str, str])

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


_NO_LIST = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
)


class TracedLevel:
    """One graph being traced: the model's, or one inside a control operator."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tracer: Any = None
        self.inputs: list[fx.Node] = []
        self.consts: dict[str, fx.Node] = {}
        self.where = ""
        self._known: dict[int, tuple[torch.Tensor, Numbers]] = {}
        self._const_values: dict[str, Any] = {}
        self.descriptions = Descriptions(session.mode)

    # --- the graph -------------------------------------------------------------------------------

    def trace(self, body: Callable[[], Sequence[Value]]) -> fx.GraphModule:
        """Run `body` under make_fx; its results become the outputs, in a tuple."""

        def flat() -> tuple[Any, ...]:
            self.tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
            with DirectOperators(self):
                results = body()
            return tuple(self.as_output(v) for v in results)

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
                proxy = self._placeholder(key, value) if fake else self._input_node(key)
                val: Any = value if fake else self._described(value, proxy)
                self.consts[key] = proxy.node
                if not fake and value.numel() <= LIMIT and value.dtype not in _NO_LIST:
                    with plainly():
                        self.know(val, shape_algebra.array(value.reshape(-1).tolist(), tuple(value.shape)))
            else:
                proxy = self._placeholder(key, UNKNOWN)
                self.consts[key] = proxy.node
                val = Opaque(proxy, value)
            self._const_values[key] = val
        return self._const_values[key]

    def _described(self, value: torch.Tensor, proxy: fx.Proxy) -> torch.Tensor:
        """A fake tensor that looks like a constant. Torch's own way asks a hundred questions, each of which the trace would see."""
        with torch._C.DisableTorchFunction():
            return self.descriptions.named(
                self.tracer, proxy, tuple(value.shape), value.stride(), value.dtype, value.device
            )

    def _input_node(self, name: str) -> fx.Proxy:
        target = "".join(c if c.isalnum() else "_" for c in name)
        return self.tracer.create_proxy("placeholder", f"v_{target}", (), {})

    def _placeholder(self, name: str, val: Any) -> fx.Proxy:
        proxy = self._input_node(name)
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

    def owns(self, v: Any) -> bool:
        """Whether a result can be named in this graph."""
        if isinstance(v, list):
            return all(self.owns(x) for x in v)
        if isinstance(v, torch.Tensor):
            return isinstance(self.proxy(v), fx.Proxy)
        return v is None or isinstance(v, Opaque)

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


def drop_unused(level: TracedLevel) -> None:
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


def is_opaque(v: Any) -> bool:
    """Whether a value's type is unknown, or that of one in a list."""
    return isinstance(v, Opaque) or (isinstance(v, list) and any(is_opaque(x) for x in v))


def _number(n: Any) -> Any:
    return torch.sym_ite(n, 1, 0) if isinstance(n, torch.SymBool) else n


@contextmanager
def plainly() -> Generator[None]:
    """Compute with real tensors, outside of the trace."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch._C.DisableTorchFunction():
        yield
