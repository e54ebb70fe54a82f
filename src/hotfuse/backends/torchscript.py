"""Library calls that follow each other as one TorchScript function: Python's lock is taken once for all of them.

A graph as a Python function takes the lock back after every operator. One calling thread pays some microseconds for it. Sixteen
threads that serve at once hand the lock around five hundred times a call, and each time a thread has to wake up. So an OCR model
of 408 operators answered 188 calls a second on 16 cores, and 720 as a TorchScript function (decision 71).

The functions are made of nodes, not of text or by tracing, and run as they are written: TorchScript's own profiling, fusing and
differentiating stay off. What TorchScript cannot say (control flow, operators of other vocabularies, writes into arguments,
random numbers) stays a call from Python, and regions end there.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from hotfuse.backends.overwritten import VIEWS, overwritable, writing
from hotfuse.backends.pycode import Meaning, flat_function
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, output_values, values_in
from hotfuse.ir.types import DType, ScalarKind, ScalarType, TensorType
from hotfuse.ops.folded_conv import PREVIOUS, FoldedConv
from hotfuse.ops.table import is_mutating, is_random, packet, resolve
from hotfuse.ops.torch_args import to_torch

MIN_OPERATORS = 4
"""Operators in the smallest region: entering one costs about as much as three calls from Python."""
_REGION = "hotfuse.region"
_HOST = {
    "sym.add": "aten::add", "sym.sub": "aten::sub", "sym.mul": "aten::mul", "sym.floordiv": "aten::floordiv",
    "sym.neg": "aten::neg", "sym.max": "prim::max", "sym.min": "prim::min",
}  # fmt: skip
"""Arithmetic on sizes, of integers only."""
_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3}
"""The numbers that TorchScript has for formats; it knows dtypes, layouts and devices itself."""
_SCALARS = {ScalarKind.INT: torch._C.IntType, ScalarKind.FLOAT: torch._C.FloatType, ScalarKind.BOOL: torch._C.BoolType}
_INTS = ("IntType", "SymIntType")


class _Unsaid(Exception):
    """TorchScript has no words for a node."""


class ScriptedRegion:
    """Nodes as one function. Calls that TorchScript does not serve as eager would take the nodes one by one.

    Those are calls that record gradients or cast automatically, and calls that raise: the same nodes run from Python have the
    exceptions that programs expect. Where they do not raise, the function is at fault and is not called again.
    """

    __slots__ = ("_function", "_nodes", "failed")

    def __init__(self, function: Callable[..., Any], nodes: Callable[..., Any]) -> None:
        self._function, self._nodes = function, nodes
        self.failed = ""
        """Why the function is no longer called."""

    def __call__(self, *args: Any) -> Any:
        """What the nodes give: one value, or a tuple of them."""
        if torch.is_grad_enabled() or self.failed or torch.is_autocast_enabled("cpu"):
            return self._nodes(*args)
        before = torch._C._get_graph_executor_optimize(False)  # the calling thread's own setting
        try:
            return self._function(*args)
        except Exception as e:  # whatever it is, the nodes say it in eager's words
            said = str(e).strip().splitlines()
        finally:
            torch._C._get_graph_executor_optimize(before)
        made = self._nodes(*args)
        self.failed = said[-1] if said else "no reason given"
        return made


@dataclass(frozen=True, slots=True)
class Scripted:
    """A graph whose regions are single nodes."""

    graph: Graph
    meaning: Meaning
    regions: tuple[ScriptedRegion, ...]
    text: str
    """The operators of all regions, line by line."""

    def failures(self) -> tuple[str, ...]:
        """What explains that operators are called from Python again."""
        return tuple(f"a region of the graph left TorchScript: {r.failed}" for r in self.regions if r.failed)


def scripted(graph: Graph, meaning: Meaning) -> Scripted | None:
    """What to run instead; None where no region is long enough."""
    last_read = _last_reads(graph)
    nodes: list[Node] = []
    made: dict[str, ScriptedRegion] = {}
    texts: list[str] = []

    def close(first: int, last: int, writer: _RegionWriter) -> None:
        outs = tuple(v for n in graph.nodes[first:last] for v in n.outs if last_read.get(v.name, -1) >= last)
        if last - first < MIN_OPERATORS or not outs:
            nodes.extend(graph.nodes[first:last])
            return
        name = f"{_REGION}{len(made)}"
        piece = Graph(f"{graph.name}.r{len(made)}", tuple(writer.inputs.values()), (), graph.nodes[first:last], outs)
        made[name] = ScriptedRegion(writer.function(name.replace(".", "_"), outs), _one_by_one(piece, meaning))
        texts.extend([f"{name}:", *(f"    # {n.op}{writer.overwrites(n)}" for n in piece.nodes)])
        nodes.append(Node(Kind.OPERATOR, name, piece.inputs, outs, loc=graph.nodes[first].loc))

    first, writer, dying = 0, _RegionWriter(), overwritable(graph)
    for i, node in enumerate(graph.nodes):
        if not writer.add(node, meaning, overwrite=i in dying):
            close(first, i, writer)
            nodes.append(node)
            first, writer = i + 1, _RegionWriter()
    close(first, len(graph.nodes), writer)
    if not made:
        return None

    def also(node: Node) -> tuple[Callable[..., Any], bool]:
        return (made[node.op], len(node.outs) > 1) if node.op in made else meaning(node)

    return Scripted(replace(graph, nodes=tuple(nodes)), also, tuple(made.values()), "\n".join(texts))


def _last_reads(graph: Graph) -> dict[str, int]:
    """By value, the number of the last node that reads it; the number of nodes for outputs."""
    found = {v.name: i for i, n in enumerate(graph.nodes) for v in n.ins}
    return found | {v.name: len(graph.nodes) for v in output_values(graph)}


def _one_by_one(piece: Graph, meaning: Meaning) -> Callable[..., Any]:
    """The nodes called from Python, made when first needed: most regions never do."""
    made: list[Callable[..., Any]] = []

    def run(*args: Any) -> Any:
        if not made:
            made.append(flat_function(piece, meaning, {})[0])
        outs = made[0](*args)
        return outs if len(outs) > 1 else outs[0]

    return run


class _RegionWriter:
    """Nodes as TorchScript's, as long as it has words for them. Weights are inputs: a program may exchange their memory."""

    def __init__(self) -> None:
        self.graph: Any = torch._C.Graph()
        self.inputs: dict[str, Value] = {}
        self._values: dict[str, Any] = {}
        self._constants: dict[tuple[type, Any], Any] = {}
        self._new: list[Any] = []
        self._overwriting: set[str] = set()

    def overwrites(self, node: Node) -> str:
        """What the text says of a node that writes into its first argument."""
        return ", into its argument" if any(v.name in self._overwriting for v in node.outs) else ""

    def add(self, node: Node, meaning: Meaning, *, overwrite: bool = False) -> bool:
        """Append a node, which may write into its first argument; False where it cannot be said, and all is as it was."""
        if node.kind is not Kind.OPERATOR or any(_torchscript_type(v) is None for v in (*node.ins, *node.outs)):
            return False
        known, self._new = len(self.inputs), []
        try:
            if node.op in _HOST:
                outs = self._host(node)
            else:
                fn, several = meaning(node)
                outs = self._written(node, fn) if overwrite else []
                if outs:
                    self._overwriting |= {v.name for v in node.outs}
                else:
                    outs = self._folded(fn, node) if isinstance(fn, FoldedConv) else self._operator(node, fn, several=several)
        except _Unsaid:
            self._take_back(known)
            return False
        for v, out in zip(node.outs, outs, strict=True):
            out.setType(_torchscript_type(v))
            self._values[v.name] = out
        return True

    def function(self, name: str, outs: tuple[Value, ...]) -> Callable[..., Any]:
        """What was added, as a function of `inputs` that gives these values: several as a tuple."""
        for v in outs:
            self.graph.registerOutput(self._values[v.name])
        if len(outs) > 1:
            self.graph.makeMultiOutputIntoTuple()
        return torch._C._create_function_from_graph(name, self.graph)

    # --- nodes -----------------------------------------------------------------------------------

    def _host(self, node: Node) -> list[Any]:
        numbers = [a.type if isinstance(a, Value) else a for a in node.args]
        whole = all(type(n) is int or (isinstance(n, ScalarType) and n.kind is ScalarKind.INT) for n in numbers)
        if not whole or node.attrs or len(node.args) > 2:
            raise _Unsaid
        return self._append(_HOST[node.op], [self._arg(a, torch._C.IntType.get()) for a in node.args], 1)

    def _operator(self, node: Node, fn: Any, *, several: bool) -> list[Any]:
        found = resolve(node.op)
        if not isinstance(found, OpOverload) or found.namespace != "aten" or fn is not found._op:
            raise _Unsaid
        if is_mutating(node.op) or is_random(node.op):
            raise _Unsaid
        schema: Any = found._schema
        args = self._arguments(schema, node.args, dict(node.attrs))
        lists = [r.type.kind() == "ListType" for r in schema.returns]
        if any(lists) and (len(lists) != 1 or schema.returns[0].type.getElementType().kind() != "TensorType"):
            raise _Unsaid
        outs = self._call(schema, args, len(lists))
        if any(lists):
            outs[0].setType(torch._C.ListType(torch._C.TensorType.get()))
            return self._append("prim::ListUnpack", outs, len(node.outs))
        if len(outs) != len(node.outs) or (several and len(outs) == 1):
            raise _Unsaid
        return outs

    def _written(self, node: Node, fn: Any) -> list[Any]:
        """A piece that is written into memory of this region's own; nothing where the node is to give a copy after all. What the
        region is given stays as it is: where the function raises, its nodes are run on the same once more."""
        whole, given = node.args[0], {v.name for v in self.inputs.values()}
        found = resolve(node.op)
        if not isinstance(whole, Value) or whole.name in given or whole.name not in self._values:
            return []
        if not isinstance(found, OpOverload) or fn is not found._op:
            return []
        if (view := VIEWS.get(packet(node.op))) is None:
            into = writing(node)
            return [] if into is None else self._call(into._schema, self._arguments(into._schema, node.args, dict(node.attrs)), 1)
        schema: Any = found._schema
        whole, piece, *places = self._arguments(schema, node.args, dict(node.attrs))
        (part,) = self._call(view._schema, [whole, *places], 1)
        copy: Any = torch.ops.aten.copy_.default._schema
        self._call(copy, [part, piece, self._constant(False, copy.arguments[2].type)], 1)  # noqa: FBT003 - the operator's own
        return [whole]

    def _folded(self, conv: FoldedConv, node: Node) -> list[Any]:
        """A convolution with what became part of it, for the images it is made for."""
        (image,) = node.ins
        if not (isinstance(image.type, TensorType) and image.type.dtype is DType.F32 and len(image.type.shape) == conv.dims):
            raise _Unsaid
        last = self._value(image)
        for op, args, attrs in conv.steps:
            made: list[Any] = []
            schema = op._schema
            given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **attrs}
            for a in schema.arguments:
                value = given.get(a.name, a.default_value)
                made.append(last if value is PREVIOUS else self._constant(value, a.type, a.N))
            (last,) = self._call(schema, made, 1)
        return [last]

    def _call(self, schema: Any, args: list[Any], outs: int) -> list[Any]:
        """An operator, which TorchScript must take for the very overload that was asked for, by the types of its arguments."""
        made = self._append(schema.name, args, outs)
        if self._new[-1].schema().partition("(")[0] != f"{schema.name}.{schema.overload_name}".removesuffix("."):
            raise _Unsaid
        return made

    def _append(self, kind: str, args: list[Any], outs: int) -> list[Any]:
        node = self.graph.insertNode(self.graph.create(kind, args, outs))
        self._new.append(node)
        return list(node.outputs())

    def _take_back(self, inputs: int) -> None:
        """What a node that could not be said has left; the first so many inputs are others'."""
        for node in reversed(self._new):
            node.destroy()
        for name in list(self.inputs)[inputs:]:
            del self.inputs[name], self._values[name]
            self.graph.eraseInput(len(self.inputs))

    # --- arguments -------------------------------------------------------------------------------

    def _arguments(self, schema: Any, args: tuple[Arg, ...], attrs: dict[str, Arg]) -> list[Any]:
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | attrs
        found: list[Any] = []
        for a in schema.arguments:
            if a.name in given:
                found.append(self._arg(given[a.name], a.type, a.N))
            elif a.has_default_value():
                found.append(self._constant(a.default_value, a.type, a.N))
            else:
                raise _Unsaid
        return found

    def _arg(self, arg: Arg, wanted: Any, length: int | None = None) -> Any:
        if isinstance(arg, Value):
            return self._value(arg)
        if isinstance(arg, tuple) and any(True for _ in values_in(arg)):
            kind = _inner(wanted)
            if kind.kind() != "ListType":
                raise _Unsaid
            element = kind.getElementType()
            return self._list([self._arg(a, element) for a in arg], element)
        return self._constant(to_torch(arg), wanted, length)

    def _constant(self, value: Any, wanted: Any, length: int | None = None) -> Any:
        """A number, a name or a list of them, of the type that the operator takes."""
        if value is None:
            if wanted.kind() != "OptionalType":
                raise _Unsaid
            return self._kept(value)
        wanted = _inner(wanted)
        if wanted.kind() == "ListType":
            element = wanted.getElementType()
            values = value if isinstance(value, (list, tuple)) else [value] * (length or 1)
            return self._list([self._constant(v, element) for v in values], element)
        if wanted.kind() == "TensorType":
            if isinstance(value, torch.Tensor) and not value.requires_grad:
                return self.graph.insertConstant(value)
            raise _Unsaid
        if isinstance(value, torch.memory_format):
            value = _FORMATS[value]
        if wanted.kind() == "FloatType" and type(value) is int:
            value = float(value)
        if not isinstance(value, (bool, int, float, str, torch.dtype, torch.layout, torch.device)):
            raise _Unsaid
        return self._kept(value)

    def _kept(self, value: Any) -> Any:
        key = (type(value), repr(value))
        if key not in self._constants:
            self._constants[key] = self.graph.insertConstant(value)
        return self._constants[key]

    def _list(self, values: list[Any], element: Any) -> Any:
        if element.kind() in _INTS:
            element = torch._C.IntType.get()
        made = self._append("prim::ListConstruct", values, 1)[0]
        made.setType(torch._C.ListType(element))
        return made

    def _value(self, v: Value) -> Any:
        if v.name not in self._values:
            self.inputs[v.name] = v
            self._values[v.name] = self.graph.addInput(f"i{len(self._values)}")
            self._values[v.name].setType(_torchscript_type(v))
        return self._values[v.name]


def _inner(wanted: Any) -> Any:
    return wanted.getElementType() if wanted.kind() == "OptionalType" else wanted


def _torchscript_type(v: Value) -> Any:
    """None for values that a function cannot take."""
    if isinstance(v.type, TensorType):
        return torch._C.TensorType.get() if v.type.device == "cpu" else None
    return _SCALARS[v.type.kind].get() if isinstance(v.type, ScalarType) else None
