# pyright: reportPrivateUsage=false
# Torch keeps what a front end needs private.
"""An fx graph of undecomposed ATen ops becomes the hypergraph.

torch.export, Dynamo and the ONNX tracer all hand over the same thing, a `GraphModule` whose nodes carry fake tensors in
`meta["val"]`; this is the only conversion from there to `ir.Graph`. Tuple results become several outs. In-place ops become pure
ones (`functional`). `no_grad` and disabled autocast regions are inlined. `torch.cond`, `while_loop` and our own control leaves
become control nodes with nested graphs. For everything that the hypergraph cannot express there is a CaptureError that names the
user's line.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hotfuse.base.errors import CaptureError, InternalError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends import functional
from hotfuse.frontends.captured import DeadDraw
from hotfuse.frontends.functional import Cell, Storage, ViewStep
from hotfuse.frontends.leaf import ControlLeaf, Leaf
from hotfuse.frontends.varlen import packed_for_varlen
from hotfuse.ir.graph import Arg, Graph, Kind, Loc, Node, Param, Value, values_in
from hotfuse.ir.types import ObjectType, ScalarType, Type
from hotfuse.ops.schema import draws_random
from hotfuse.ops.sym import sym_name
from hotfuse.ops.torch_args import from_torch, to_torch
from hotfuse.ops.torch_dtypes import dtype_of
from hotfuse.ops.torch_types import scalar_type, tensor_type

hop = torch.ops.higher_order


@dataclass(frozen=True, slots=True)
class PlaceholderRole:
    """What a placeholder stands for: an `input`, a `param` under a key, or `unused`."""

    kind: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Converted:
    """A graph and what the conversion learned about it."""

    graph: Graph
    constants: dict[str, torch.Tensor]
    """Tensors that tracing stored in the graph module, by param key."""
    written: tuple[int, ...] = ()
    """Inputs that the program writes in place; what they hold then are the last outputs."""
    returned: tuple[tuple[int, int], ...] = ()
    """Outputs that are such an input itself: (output, input)."""
    draws: tuple[DeadDraw, ...] = ()
    """Random numbers that nobody reads."""


def to_graph(
    gm: fx.GraphModule, roles: Sequence[PlaceholderRole], *, name: str = "main", strip_prefix: str = "", writable: bool = False
) -> Converted:
    """Convert; `roles` says for each placeholder, in order, what it stands for, `writable` that inputs may be written
    and the random generator may move on: the serving side sees to both behind a call.
    """
    packed_for_varlen(gm)
    c = _Converter(name, strip_prefix, writable=writable)
    graph = c.convert(gm, roles)
    return Converted(graph, c.constants, c.written, c.returned, tuple(c.draws))


_SKIP_DIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "torch/", "<")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def location(node: fx.Node, strip_prefix: str = "") -> Loc:
    """The user's line and the module path of a node."""
    file, line = "", 0
    for path, number in _FRAME.findall(node.meta.get("stack_trace") or ""):
        if not path.startswith(_SKIP_DIRS):
            file, line = path, int(number)
    stack = node.meta.get("nn_module_stack") or {}
    name = ""
    for entry in stack.values():
        name = str(entry[0]) if isinstance(entry, tuple) else str(entry)
    name = "" if name.startswith("_empty_nn_module_stack") else name
    if strip_prefix and (name == strip_prefix or name.startswith(strip_prefix + ".")):
        name = name[len(strip_prefix) + 1 :]
    return Loc(file, line, node.meta.get("hotfuse_name") or name)


def type_of(val: Any) -> Type:
    """The type of a traced value."""
    if isinstance(val, torch.Tensor):
        return tensor_type(val)
    if isinstance(val, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
        return scalar_type(val)
    return ObjectType()


class _Converter:
    """State of one graph's conversion; nested graphs get a converter of their own."""

    def __init__(self, name: str, strip_prefix: str, *, writable: bool = False) -> None:
        self.name = name
        self.strip_prefix = strip_prefix
        self.nodes: list[Node] = []
        self.names: set[str] = set()
        self.fakes: dict[str, Any] = {}
        self.env: dict[fx.Node, Any] = {}
        self.mutates = False
        self.loc = Loc()
        self.constants: dict[str, torch.Tensor] = {}
        self._params: dict[str, Param] = {}
        self._writable = writable
        self.written: tuple[int, ...] = ()
        self.returned: tuple[tuple[int, int], ...] = ()
        self.draws: list[DeadDraw] = []
        self._given: list[Storage] = []
        """Memory of the inputs."""

    # --- the graph -------------------------------------------------------------------------------

    def convert(self, gm: fx.GraphModule, roles: Sequence[PlaceholderRole]) -> Graph:
        self.mutates = _mutates(gm)
        inputs: list[Value] = []
        given: list[Cell] = []
        params = self._params
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        if len(places) != len(roles):
            raise InternalError(f"{len(places)} placeholders, {len(roles)} roles")
        for place, role in zip(places, roles, strict=True):
            if role.kind == "unused":
                continue
            if role.kind == "param" and role.key in params:  # tied weights: one param
                self.env[place] = self._own(params[role.key].value, f"parameter {role.key!r}")
                continue
            value = self._value(place.name, place.meta.get("val"))
            if role.kind == "input":
                inputs.append(value)
                self.env[place] = self._own(value, "" if self._writable else f"its input {place.name!r}")
                given.append(self.env[place])
                self._given.append(self.env[place].storage)
            else:
                params[role.key] = Param(value, role.key)
                self.env[place] = self._own(value, f"parameter or buffer {role.key!r}")
        outputs = self._body(gm)
        self.written = tuple(i for i, cell in enumerate(given) if cell.storage.version)
        self.returned = self._returned(gm, {id(given[i].storage): i for i in self.written})
        outputs += [functional.read(given[i], self._emit) for i in self.written]
        used = {v.name for n in self.nodes for v in n.ins} | {v.name for out in outputs for v in values_in(out)}
        kept = tuple(p for p in params.values() if p.value.name in used)
        return Graph(self.name, tuple(inputs), kept, tuple(self.nodes), tuple(outputs))

    def _returned(self, gm: fx.GraphModule, written: dict[int, int]) -> tuple[tuple[int, int], ...]:
        """Outputs that are a written input as a whole."""
        outs = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        cells = [self.env.get(o) if isinstance(o, fx.Node) else None for o in (outs if isinstance(outs, tuple | list) else [outs])]
        return tuple(
            (k, written[id(c.storage)])
            for k, c in enumerate(cells)
            if isinstance(c, Cell) and not c.chain and id(c.storage) in written
        )

    def _body(self, gm: fx.GraphModule) -> list[Arg]:
        """Convert the nodes of a (possibly inlined) graph module; gives its outputs."""
        for node in gm.graph.nodes:
            self.loc = location(node, self.strip_prefix)
            try:
                match node.op:
                    case "placeholder":
                        continue
                    case "get_attr":
                        self.env[node] = self._attribute(gm, node)
                    case "output":
                        outs = node.args[0]
                        outs = list(outs) if isinstance(outs, tuple | list) else [outs]
                        return [self._read(o) for o in outs]
                    case "call_function":
                        self.env[node] = self._call(node)
                    case _:
                        raise CaptureError(f"{node.op} {node.target} in a captured graph")
            except CaptureError as e:
                if e.where:
                    raise
                raise CaptureError(e.what, where=str(self.loc), because=e.because, hint=e.hint, why=e.why) from e
        raise InternalError("a captured graph has no output node")

    def _attribute(self, gm: fx.GraphModule, node: fx.Node) -> Any:
        target: Any = gm
        for part in str(node.target).split("."):
            target = getattr(target, part)
        if isinstance(target, torch.Tensor):
            key = f"constant.{node.target}"
            if key not in self._params:
                self._params[key] = Param(self._value(node.name, node.meta.get("val", target)), key)
                self.constants[key] = target
            return self._own(self._params[key].value, f"constant {node.target!r}")
        return target

    # --- one call --------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Any:
        target: Any = node.target
        if target is operator.getitem:
            results = self.env[node.args[0]]  # type: ignore[index]
            if not isinstance(results, list):
                raise CaptureError("an operator returns a list inside its results", because="no type says that here")
            return results[node.args[1]]  # type: ignore[index]
        if isinstance(target, torch._ops.OpOverload):
            return self._operator(node, target)
        if isinstance(target, Leaf):
            return self._plain(node, Kind.OPERATOR, target.op)
        if isinstance(target, ControlLeaf):
            graphs = tuple(self._nested(g, name) for g, name in zip(target.graphs, _names(target), strict=True))
            return self._plain(node, Kind.CONTROL, f"control.{target.kind}", graphs)
        if (name := sym_name(target)) is not None:
            return self._plain(node, Kind.OPERATOR, name)
        if target is hop.wrap_with_set_grad_enabled:  # a backward pass runs the model's own code
            return self._inline(node.args[1], node.args[2:])
        if target is hop.wrap_with_autocast:
            if node.args[2]:
                raise CaptureError("the model enables autocast inside", hint="call it under autocast from outside")
            return self._inline(node.args[4], node.args[5:])
        if target is hop.cond:
            return self._cond(node)
        if target is hop.while_loop:
            return self._while(node)
        if target is torch._C._set_grad_enabled:
            return None
        if target is torch.amp.autocast_mode._enter_autocast:
            if len(node.args) > 2 and node.args[2] is not False:
                raise CaptureError("the model enables autocast inside", hint="call it under autocast from outside")
            return None
        if target is torch.amp.autocast_mode._exit_autocast:
            return None
        raise CaptureError(f"the graph calls {getattr(target, '__name__', target)}", because="no meaning for it here")

    def _operator(self, node: fx.Node, op: Any) -> Any:
        if "val" not in node.meta and not node.users and op._schema.returns and not op._schema.is_mutable:
            return None  # a call that failed while tracing, before another path was taken
        args = tuple(self._read(a) for a in node.args)
        attrs = tuple((k, self._read(a)) for k, a in sorted(node.kwargs.items()))
        if draws_random(str(op), args, dict(attrs)):
            if self._writable and not node.users and (draw := _dead_draw(op, node)) is not None:
                self.draws.append(draw)
                return None
            raise CaptureError(f"the model draws random numbers with {op}", why=Why.RANDOM, hint="call model.eval()")
        if op is torch.ops.aten.batch_norm.default and node.args[5] and node.args[3] is not None:
            return self._training_batch_norm(node)
        if op is torch.ops.aten.detach_.default:
            op = torch.ops.aten.detach.default
        if torch.Tag.inplace_view in op.tags:
            return self._view_in_place(node, op, args, attrs)
        if op._schema.is_mutable:
            return self._mutation(node, op)
        out = self._add(node.name, Kind.OPERATOR, str(op), args, attrs, node.meta.get("val"))
        if self.mutates and node.args and _may_alias(op) and isinstance(node.args[0], fx.Node):
            source = self.env[node.args[0]]
            if isinstance(source, Cell):
                return self._as_views(node, op, source, out)
        return out

    def _plain(self, node: fx.Node, kind: Kind, op: str, graphs: tuple[Graph, ...] = ()) -> Any:
        args = tuple(self._read(a) for a in node.args)
        attrs = tuple((k, self._read(a)) for k, a in sorted(node.kwargs.items()))
        return self._add(node.name, kind, op, args, attrs, node.meta.get("val"), graphs)

    def _add(
        self, name: str, kind: Kind, op: str, args: tuple[Arg, ...], attrs: tuple[tuple[str, Arg], ...], val: Any,
        graphs: tuple[Graph, ...] = (),
    ) -> Any:
        """Add a node whose results look like `val`; gives a cell, or a list of them."""
        several = isinstance(val, tuple | list)
        vals: Sequence[Any] = val if several else [] if val is None else [val]
        outs = tuple(self._value(f"{name}_{i}" if several else name, v) for i, v in enumerate(vals))
        self.nodes.append(Node(kind, op, args, outs, attrs, graphs, self.loc))
        cells = [self._own(v, "") for v in outs]
        return cells if several else cells[0] if cells else None

    # --- in-place ops ----------------------------------------------------------------------------

    def _mutation(self, node: fx.Node, op: Any) -> Cell:
        where = str(self.loc)
        if (composed := functional.composed(op)) is not None:
            cell = self.env[node.args[0]]  # type: ignore[index]
            x, *rest = (self._read(a) for a in node.args)
            after = composed(self._emit, x, *rest, **{k: self._read(a) for k, a in node.kwargs.items()})
            functional.write(cell, after, self._emit, where, lambda storage: self._is_dead(storage, node))
            return cell
        pure, written = functional.pure_variant(op, where)
        cell = self.env[node.kwargs[written] if written in node.kwargs else node.args[0]]  # type: ignore[index]
        before = functional.read(cell, self._emit)
        args = tuple(self._read(a) for a in node.args)
        after = self._emit(pure, *args, **{k: self._read(a) for k, a in node.kwargs.items() if k != written})
        if written in node.kwargs and tuple(self.fakes[after.name].shape) != tuple(self.fakes[before.name].shape):
            raise CaptureError(f"{op} resizes the tensor that it writes", where=where, hint="give it one of the result's shape")
        if self.fakes[after.name].dtype != self.fakes[before.name].dtype:
            after = self._emit(torch.ops.aten.to.dtype, after, dtype_of(self.fakes[before.name].dtype))
        functional.write(cell, after, self._emit, where, lambda storage: self._is_dead(storage, node))
        return cell

    def _is_dead(self, storage: Storage, at: fx.Node) -> bool:
        """Whether memory that the graph made is read by no node behind this one, whatever it is called by."""
        if storage.owner or any(storage is s for s in self._given):
            return False
        names = (
            node for node, cells in self.env.items()
            if any(isinstance(c, Cell) and c.storage is storage for c in (cells if isinstance(cells, list) else [cells]))
        )  # fmt: skip
        return all(n.graph is at.graph and not any(user is not at and user > at for user in n.users) for n in names)

    def _training_batch_norm(self, node: fx.Node) -> Cell:
        """A batch norm that writes its running statistics, which only their owner may have written for him."""
        x, weight, bias, mean, var, training, momentum, eps = (self._read(a) for a in node.args[:8])
        pure = torch.ops.aten._native_batch_norm_legit_functional.default
        outs = self._emit(pure, x, weight, bias, mean, var, training, momentum, eps)
        for cell, after in zip(node.args[3:5], outs[3:], strict=True):
            functional.write(self.env[cell], after, self._emit, str(self.loc), lambda s: self._is_dead(s, node))  # type: ignore[index]
        return self._own(outs[0], "")

    def _view_in_place(self, node: fx.Node, op: Any, args: tuple[Arg, ...], attrs: tuple[tuple[str, Arg], ...]) -> Cell:
        """A tensor that gets another shape: every name that the program has for it stands for a view of what it was."""
        cell, view = self.env[node.args[0]], functional.view_variant(op, str(self.loc))  # type: ignore[index]
        callers = cell.storage.owner or any(cell.storage is s for s in self._given)
        if callers and all(functional.may_be_itself(step.op) for step in cell.chain):
            raise CaptureError(f"{op} changes the shape of a tensor that is the caller's", why=Why.STATEFUL,
                               because="a captured graph has no side effects", hint="use the out-of-place form of this op")
        out = self._add(node.name, Kind.OPERATOR, str(view), args, attrs, node.meta.get("val"))
        made = self._as_views(node, view, cell, out)
        cell.chain, cell.value, cell.version = made.chain, made.value, made.version
        return cell

    def _as_views(self, node: fx.Node, op: Any, source: Cell, out: Any) -> Any:
        """The results of a view op share the storage of its source."""
        rest = tuple(self._read(a) for a in node.args[1:])
        kwargs = tuple((k, self._read(a)) for k, a in sorted(node.kwargs.items()))

        def link(cell: Cell, index: int | None) -> Cell:
            shared = functional.aliases(op, self.fakes[source.value.name], self.fakes[cell.value.name])
            if shared is None:
                source.storage.unsure.append(cell.storage)
                cell.storage.unsure.append(source.storage)
            if not shared:
                return cell
            view = ViewStep(op, rest, kwargs, index)
            return Cell(source.storage, (*source.chain, view), cell.value, source.storage.version)

        return [link(c, i) for i, c in enumerate(out)] if isinstance(out, list) else link(out, None)

    def _emit(self, op: Any, *args: Arg, **kwargs: Arg) -> Any:
        """Add a pure node that the traced program did not have, with its type from a fake run."""
        fakes = [self._fake(a) for a in args]
        mode = _fake_mode(self.fakes.values())
        with mode:
            val = op(*fakes, **{k: self._fake(a) for k, a in kwargs.items()})
        out = self._add(op.overloadpacket.__name__, Kind.OPERATOR, str(op), args, tuple(sorted(kwargs.items())), val)
        return [c.value for c in out] if isinstance(out, list) else out.value

    def _fake(self, arg: Arg) -> Any:
        if isinstance(arg, Value):
            return self.fakes[arg.name]
        if isinstance(arg, tuple):
            return [self._fake(a) for a in arg]
        return to_torch(arg)

    # --- regions and control ---------------------------------------------------------------------

    def _inline(self, target: Any, args: Sequence[Any]) -> list[Any]:
        """Put a region's nodes here; gives its results as cells."""
        gm = self.env[target]
        for place, arg in zip((n for n in gm.graph.nodes if n.op == "placeholder"), args, strict=True):
            self.env[place] = self.env[arg] if isinstance(arg, fx.Node) else arg
        self.mutates = self.mutates or _mutates(gm)
        outputs = self._body(gm)
        return [self._own(o, "") if isinstance(o, Value) else o for o in outputs]

    def _nested(self, gm: fx.GraphModule, name: str) -> Graph:
        inner = _Converter(name, self.strip_prefix)
        roles = [PlaceholderRole("input") for n in gm.graph.nodes if n.op == "placeholder"]
        graph = inner.convert(gm, roles)
        if graph.params:
            raise CaptureError(f"a nested graph holds constants ({graph.params[0].key})")
        return graph

    def _cond(self, node: fx.Node) -> Any:
        pred, then, other, operands = node.args[:4]
        graphs = (self._nested(self.env[then], "then"), self._nested(self.env[other], "else"))  # type: ignore[index]
        args = (self._read(pred), tuple(self._read(o) for o in operands))  # type: ignore[union-attr]
        return self._add(node.name, Kind.CONTROL, "control.if", args, (), node.meta.get("val"), graphs)

    def _while(self, node: fx.Node) -> Any:
        """`while cond(c): c = body(c)` as a loop whose body ends by computing the next condition."""
        cond, body, carried, extra = node.args[:4]
        first = [self._read(a) for a in (*carried, *extra)]  # type: ignore[misc]
        cond_gm, body_gm = self.env[cond], self.env[body]  # type: ignore[index]
        start = self._splice(cond_gm, first)[0]
        inner = _Converter("body", self.strip_prefix)
        fakes = [self.fakes[v.name] if isinstance(v, Value) else v for v in first]
        n = len(carried)  # type: ignore[arg-type]
        step = inner._changing("iteration", 0)
        go = inner._value("go", self.fakes[start.name] if isinstance(start, Value) else start)
        ins = [inner._changing(f"c{i}", f) if i < n else inner._value(f"c{i}", f) for i, f in enumerate(fakes)]
        after = inner._splice(body_gm, ins)
        again = inner._splice(cond_gm, [*after, *ins[n:]])[0]
        graph = Graph("body", (step, go, *ins), (), tuple(inner.nodes), (again, *after))
        args = (None, start, tuple(first[:n]), tuple(first[n:]))
        return self._add(node.name, Kind.CONTROL, "control.loop", args, (), node.meta.get("val"), (graph,))

    def _splice(self, gm: fx.GraphModule, args: Sequence[Arg]) -> list[Arg]:
        for place, arg in zip((n for n in gm.graph.nodes if n.op == "placeholder"), args, strict=True):
            self.env[place] = self._own(arg, "") if isinstance(arg, Value) else arg
        self.mutates = self.mutates or _mutates(gm)
        return self._body(gm)

    # --- values ----------------------------------------------------------------------------------

    def _value(self, name: str, val: Any) -> Value:
        unique, k = name, 1
        while unique in self.names:
            unique, k = f"{name}.{k}", k + 1
        self.names.add(unique)
        self.fakes[unique] = val
        return Value(unique, type_of(val))

    def _changing(self, name: str, val: Any) -> Value:
        """A loop body's value: a number there is another one in each iteration, so its type must not tell it."""
        value = self._value(name, val)
        return Value(value.name, ScalarType(value.type.kind)) if isinstance(value.type, ScalarType) else value

    def _own(self, value: Value, owner: str) -> Cell:
        return Cell(Storage(value, owner=owner), (), value, 0)

    def _read(self, arg: Any) -> Arg:
        """An fx argument as a graph argument, up to date with every in-place op before it."""
        if isinstance(arg, fx.Node):
            arg = self.env[arg]
        if isinstance(arg, Cell):
            return functional.read(arg, self._emit)
        if isinstance(arg, tuple | list):
            return tuple(self._read(a) for a in arg)
        return from_torch(arg)


def _names(leaf: ControlLeaf) -> tuple[str, ...]:
    return ("then", "else") if leaf.kind == "if" else ("body",)


def _mutates(gm: fx.GraphModule) -> bool:
    """Whether an in-place op stands anywhere in the program, regions included."""
    modules = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    targets = (n.target for m in modules for n in m.graph.nodes if n.op == "call_function")
    return any(isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable for t in targets)


def _dead_draw(op: Any, node: fx.Node) -> DeadDraw | None:
    """A draw from the default generator that a server can repeat; None for others."""
    val = node.meta.get("val")
    if op not in _DRAWS or not isinstance(val, torch.Tensor) or val.device.type != "cpu":
        return None
    sizes = tuple(val.shape)
    return DeadDraw(_DRAWS[op], sizes, val.dtype) if all(type(s) is int for s in sizes) else None


_DRAWS = {torch.ops.aten.rand.default: "rand", torch.ops.aten.randn.default: "randn"}


def _may_alias(op: Any) -> bool:
    returns = op._schema.returns
    return bool(returns) and returns[0].alias_info is not None


def _fake_mode(fakes: Any) -> FakeTensorMode:
    for f in fakes:
        if isinstance(f, torch.Tensor) and hasattr(f, "fake_mode"):
            return f.fake_mode  # type: ignore[attr-defined]
    raise InternalError("no fake tensor in a traced graph")
