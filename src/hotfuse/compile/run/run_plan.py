"""Planning native runs in the worker: where every value lies, which kernel is called with what, what leaves the run.

The plan goes through the nodes of a body once. Kernels are calls; views are arithmetic; a condition whose branches are native
is a branch of the run. Where a kernel wants a value in another order than it lies in, a copying kernel goes in between. Whatever
does not fit raises CannotLower, and the run ends before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hotfuse.compile.parts import renamed
from hotfuse.compile.run.given_order import GivenOrders
from hotfuse.compile.run.run_steps import (
    GraphScope,
    KernelSource,
    LevelParts,
    PlannedBranch,
    PlannedCall,
    PlannedChoice,
    PlannedMark,
    PlannedMove,
    PlannedStep,
    Pointer,
    Root,
    RunState,
    alike,
    tensor_of,
    written,
)
from hotfuse.ir.control_bodies import Branch as Branched
from hotfuse.ir.control_bodies import branches, control_name, inside
from hotfuse.ir.dims import Dim, expr, substitute, sym, symbols
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value
from hotfuse.ir.subgraph import extract
from hotfuse.ir.types import STRIDED, DType, Layout, TensorType, size_of
from hotfuse.lower.common.algebra import mul, product, same
from hotfuse.lower.common.codec import argument_to_json
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import (
    BufferArgument,
    BufferRole,
    PackArgument,
    StateArgument,
    StrideArgument,
    SymbolArgument,
    dense_strides,
)
from hotfuse.lower.common.own_sizes import anchored, with_own_sizes
from hotfuse.lower.cpu import scratch
from hotfuse.lower.run.description import LOOP_VAR, THREADS, Constant, Word
from hotfuse.lower.run.places import Lies, does_nothing, fits, is_view, operand, view
from hotfuse.ops.movement import APPEND
from hotfuse.ops.table import Access, lookup


class RunPlanner:
    """Plans one run of a level, part by part."""

    def __init__(self, level: LevelParts, bench: KernelSource) -> None:
        self.level, self.bench, self.orders = level, bench, GivenOrders(level)
        self.keys = {p.value.name: p.key for p in level.graph.params}
        self.state = RunState()

    def add(self, part: int) -> None:
        """Go on with a part; raises CannotLower, and is as before, where it does not fit."""
        before = self.state
        self.state = before.copy()
        try:
            scope = GraphScope(self.level.graph, self.keys, self.state.lies, top=True)
            steps = self._part(scope, self.level, part)  # may exchange the state, by one with more in it
            self.state.steps += [*steps, PlannedMark(part)]
        except CannotLower:
            self.state = before
            raise

    # -- parts and nodes

    def _part(self, scope: GraphScope, level: LevelParts, part: int) -> list[PlannedStep]:
        first, last, kernel = level.parts[part]
        if kernel >= 0:
            piece = anchored(level.graph, extract(level.graph, range(first, last), "group"))
            return self._chosen(scope, piece, kernel)
        if part in level.branches:
            return self._branch(scope, level.graph.nodes[first], level.branches[part])
        return [step for node in level.graph.nodes[first:last] for step in self._free(scope, node)]

    def _free(self, scope: GraphScope, node: Node) -> list[PlannedStep]:
        if does_nothing(node):
            return []
        if node.op == APPEND:
            return self._append(scope, node)
        if not is_view(node):
            raise CannotLower(f"{node.op} has no kernel")
        steps: list[PlannedStep] = []
        for i, out in enumerate(node.outs):
            lies = view(node, i, lambda name: self._where(scope, name))
            if lies is None and (given := operand(node, i)) is not None:
                dense, more = self._laid_out(self._where(scope, given.name), given, Layout())
                steps += more
                lies = view(node, i, lambda name, dense=dense: dense)
            if lies is None:
                raise CannotLower(f"{node.op} is not a view")
            scope.lies[out.name] = lies
        return steps

    def _append(self, scope: GraphScope, node: Node) -> list[PlannedStep]:
        """A cache with more behind it: what is new goes to its end. The past is there when the run begins."""
        past, new, dim = node.args
        (out,) = node.outs
        if not scope.top or not isinstance(past, Value) or not isinstance(new, Value) or not isinstance(dim, int):
            raise CannotLower("a cache that grows inside a branch")
        if past.name not in {v.name for v in scope.graph.inputs}:
            raise CannotLower("a cache that is no input of the graph")
        made, more = tensor_of(out), tensor_of(new)
        strides = dense_strides(made.shape, made.layout)
        self._where(scope, past.name)
        begin = self._where(scope, new.name)
        root = self._made(out.name, made, strides)
        scope.lies[out.name] = Lies(root, 0, strides)
        self.state.grown[out.name] = past.name, dim
        end = mul(tensor_of(past).shape[dim], strides[dim])
        if fits(begin.strides, more.shape, dense_strides(more.shape, made.layout)):
            size = mul(product(more.shape), size_of(more.dtype))
            return [PlannedMove(Pointer(begin.root, begin.offset), Pointer(root, end), size)]
        return [moved(step, root, end) for step in self._copy(begin, more, made.layout, root)]

    def _where(self, scope: GraphScope, name: str) -> Lies:
        """Where a value lies; what comes from outside is an input of the run, or a constant."""
        if name in scope.lies:
            return scope.lies[name]
        if name in scope.keys:
            param = next(p.value for p in scope.graph.params if p.value.name == name)
            scope.lies[name] = self._constant(param, scope.keys[name])
        elif scope.top:
            scope.lies[name] = self._input(_value(scope.graph, name))
        else:
            raise CannotLower(f"%{name} comes from nowhere")
        return scope.lies[name]

    def _input(self, v: Value) -> Lies:
        v = self.orders.given(v)
        s, t = self.state, tensor_of(v)
        s.inputs.append(v)
        s.roots.append(Root("input", v.name, t.dtype, product(t.shape)))
        if not t.layout.strided:
            return Lies(len(s.roots) - 1, 0, dense_strides(t.shape, t.layout))
        names = [f"@{v.name}.{d}" for d in range(len(t.shape))]
        s.strided |= {n: (len(s.inputs) - 1, d) for d, n in enumerate(names)}
        return Lies(len(s.roots) - 1, 0, tuple(sym(n) for n in names))

    def _constant(self, v: Value, key: str) -> Lies:
        s, t = self.state, tensor_of(v)
        word = self._word(Word(Constant.PARAM, key=key, layout=t.layout))
        s.roots.append(Root("param", v.name, t.dtype, product(t.shape), word))
        if not t.layout.strided:
            return Lies(len(s.roots) - 1, 0, dense_strides(t.shape, t.layout))
        return Lies(len(s.roots) - 1, 0, tuple(self._stride(key, d) for d in range(len(t.shape))))

    def _stride(self, key: str, dim: int) -> Dim:
        word = self._word(Word(Constant.STRIDE, key=key, dim=dim))
        return sym(self.state.symbols.setdefault(word, f"@word{word}"))

    def _word(self, word: Word) -> int:
        if word not in self.state.words:
            self.state.words.append(word)
        return self.state.words.index(word)

    # -- calls

    def _chosen(self, scope: GraphScope, piece: Graph, kernel: int) -> list[PlannedStep]:
        """A group by the kernel that is best at the call's size, where it has several."""
        *before, general = self._call(scope, piece, kernel)
        variants = self.bench.variants(kernel)
        if variants is None or not isinstance(general, PlannedCall):
            return [*before, general]
        size = substitute(variants.size, with_own_sizes(piece)[1])
        if any(s.startswith(LOOP_VAR) for s in symbols(size)):
            return [*before, general]  # it differs from one iteration to the next
        lies = dict(scope.lies)
        outs = {v: lies[v].root for v in general.stored}
        found: list[PlannedCall | None] = []
        for number in variants.kernels:
            if number in (kernel, -1):
                found.append(general if number == kernel else None)
                continue
            *more, call = self._call(scope, piece, number, outs)
            if more or not isinstance(call, PlannedCall) or any(not _lie_alike(scope.lies[v], lies[v]) for v in outs):
                return [*before, general]  # it wants its operands elsewhere: what serves any size serves all
            found.append(call)
            scope.lies.update({v: lies[v] for v in outs})
        if isinstance(size, int):
            only = found[sum(size > end for end in variants.ends)]
            return [*before, general if only is None else only]
        return [*before, PlannedChoice(size, variants.ends, tuple(found))]

    def _call(self, scope: GraphScope, piece: Graph, kernel: int, outs: Mapping[str, int] | None = None) -> list[PlannedStep]:
        """A kernel with its arguments; `outs` are buffers that results go into, where they exist already."""
        own, meaning = with_own_sizes(piece)
        lowered = renamed(self.bench.lowered(kernel), own)
        types = {v.name: tensor_of(v) for v in (*piece.inputs, *(o for n in piece.nodes for o in n.outs))
                 if isinstance(v.type, TensorType)}  # fmt: skip
        keys = {p.value.name: p.key for p in piece.params}
        layouts = {p.value.name: tensor_of(p.value).layout for p in piece.params}
        strides = {name: tuple(substitute(d, meaning) for d in ds) for name, ds in lowered.strides}
        steps: list[PlannedStep] = []
        buffers: list[Pointer] = []
        sizes: list[Dim] = []
        reads: list[tuple[int, str]] = []
        writes: list[tuple[int, str]] = []
        made: list[str] = []
        stored: list[str] = []
        for a in lowered.arguments:
            match a:
                case BufferArgument(role=BufferRole.INPUT):
                    lies = self._where(scope, a.value)
                    if not types[a.value].layout.strided:
                        lies, more = self._laid_out(lies, Value(a.value, types[a.value]), types[a.value].layout)
                        steps += more
                    buffers.append(Pointer(lies.root, lies.offset))
                    reads.append((lies.root, a.buffer))
                case BufferArgument(role=BufferRole.OUTPUT):
                    root = (outs or {}).get(a.value, -1)
                    if root < 0:
                        root = self._made(a.value, types[a.value], strides[a.value])
                    scope.lies[a.value] = Lies(root, 0, strides[a.value])
                    buffers.append(Pointer(root))
                    writes.append((root, a.buffer))
                    made.append(a.value if scope.top else "")
                    stored.append(a.value)
                case BufferArgument():
                    buffers.append(Pointer(-1, 0, self._word(Word(Constant.PARAM, key=keys[a.value], layout=layouts[a.value]))))
                case PackArgument():
                    named = replace(a.spec, sources=tuple(replace(s, name=keys[s.name]) for s in a.spec.sources))
                    text = json.dumps(argument_to_json(PackArgument("", named)), sort_keys=True)
                    buffers.append(Pointer(-1, 0, self._word(Word(Constant.PACK, pack=text))))
                case StateArgument():
                    text = json.dumps(argument_to_json(replace(a, buffer="")), sort_keys=True)
                    buffers.append(Pointer(-1, 0, self._word(Word(Constant.STATE, kernel=kernel, pack=text))))
                case SymbolArgument():
                    sizes.append(substitute(sym(a.symbol), meaning))
                case StrideArgument():
                    if a.value in keys:
                        sizes.append(self._stride(keys[a.value], a.dim))
                    else:
                        sizes.append(self._where(scope, a.value).strides[a.dim])
        own_memory = scratch.plan(lowered.kernel)
        need: Dim = 0
        if own_memory.needs_arena:
            known = dict(zip(lowered.kernel.sizes, sizes, strict=True))
            slices = expr("*", substitute(own_memory.slice, known), expr("+", sym(THREADS), 1))
            need = expr("+", substitute(own_memory.shared, known), slices)
        word = self._word(Word(Constant.KERNEL, kernel=kernel))
        pointwise = all(lookup(n.op).access is Access.POINTWISE for n in piece.nodes)
        steps.append(PlannedCall(word, kernel, tuple(buffers), tuple(sizes), need, tuple(reads), tuple(writes),
                                 lowered.kernel if pointwise else None, tuple(made), tuple(stored)))  # fmt: skip
        return steps

    def _made(self, name: str, t: TensorType, strides: tuple[Dim, ...]) -> int:
        """Memory for a result."""
        elements = product(t.shape)
        if not any(fits(strides, t.shape, dense_strides(t.shape, layout)) for layout in (Layout(), t.layout)):
            reach = [expr("*", expr("+", n, -1), s) for n, s in zip(t.shape, strides, strict=True)]
            elements = expr("max", elements, expr("+", 1, *reach))
        self.state.roots.append(Root("made", name, t.dtype, elements))
        return len(self.state.roots) - 1

    def _laid_out(self, lies: Lies, v: Value, layout: Layout) -> tuple[Lies, list[PlannedStep]]:
        """A value densely in a layout, copied where it is not known to lie so."""
        t = tensor_of(v)
        dense = dense_strides(t.shape, layout)
        if fits(lies.strides, t.shape, dense):
            return lies, []
        key = (lies, layout)
        if key not in self.state.copied:
            root = self._made(f"{v.name} contiguous", t, dense)
            steps = self._copy(lies, t, layout, root)
            self.state.copied[key] = Lies(root, 0, dense)
            return self.state.copied[key], steps
        return self.state.copied[key], []

    def _copy(self, lies: Lies, t: TensorType, layout: Layout, root: int) -> list[PlannedStep]:
        kernel, piece = self.bench.copying(t.dtype, t.shape, layout)
        (given,), (out,) = piece.inputs, piece.nodes[-1].outs
        scope = GraphScope(piece, {}, {given.name: lies}, top=False)
        return self._call(scope, piece, kernel, {out.name: root})

    # -- branches

    def _branch(self, scope: GraphScope, node: Node, levels: Sequence[LevelParts]) -> list[PlannedStep]:
        condition, captures = node.args[0], node.args[1]
        if node.attrs or not isinstance(condition, Value) or not isinstance(captures, tuple):
            raise CannotLower(f"{node.op} of an unusual form")
        t = tensor_of(condition)
        if t.dtype is not DType.BOOL or any(n != 1 for n in t.shape):
            raise CannotLower("a condition that is not one truth value")
        at = self._where(scope, condition.name)
        outs = [self._made(v.name, tensor_of(v), dense_strides(tensor_of(v).shape, Layout())) for v in node.outs]
        sides: list[tuple[PlannedStep, ...] | None] = []
        name = control_name(node, scope.inside)
        for i, (found, level) in enumerate(zip(branches(scope.graph, node), levels, strict=True)):
            lies = self._captured(scope, found, captures)  # what lies outside stays known, whatever becomes of the branch
            before = self.state
            self.state = before.copy()
            try:
                sides.append(tuple(self._side(level, lies, node.outs, outs, inside(name, i))))
            except CannotLower:
                self.state = before
                sides.append(None)
            else:
                self.state.lies, self.state.copied = before.lies, before.copied
        if sides[0] is None and sides[1] is None:
            raise CannotLower("no branch is native")
        for v, root in zip(node.outs, outs, strict=True):
            scope.lies[v.name] = Lies(root, 0, dense_strides(tensor_of(v).shape, Layout()))
        return [PlannedBranch(Pointer(at.root, at.offset), tuple(outs), sides[0], sides[1], name)]

    def _captured(self, scope: GraphScope, found: Branched, captures: tuple[Arg, ...]) -> dict[str, Lies]:
        """Where a branch's inputs lie."""
        lies: dict[str, Lies] = {}
        for inner, i in zip(found.graph.inputs, found.takes, strict=True):
            outer = captures[i]
            if not isinstance(outer, Value):
                raise CannotLower("a capture that is not a value")
            alike(inner, outer)
            if isinstance(outer.type, TensorType):
                lies[inner.name] = self._where(scope, outer.name)
        return lies

    def _side(
        self, level: LevelParts, lies: dict[str, Lies], outs: Sequence[Value], into: Sequence[int], path: str
    ) -> list[PlannedStep]:
        """The steps of one branch, its results in the given buffers."""
        graph = level.graph
        scope = GraphScope(graph, {p.value.name: p.key for p in graph.params}, lies, top=False, inside=path)
        steps = [step for part in range(len(level.parts)) for step in self._part(scope, level, part)]
        if len(graph.outputs) != len(outs):
            raise CannotLower("a branch with other results than its node")
        for given, out, root in zip(graph.outputs, outs, into, strict=True):
            if not isinstance(given, Value):
                raise CannotLower("a branch that returns a number")
            alike(given, out)
            t = tensor_of(out)
            at = self._where(scope, given.name)
            made = self.state.roots[at.root]
            whole = at.offset == 0 and fits(at.strides, t.shape, dense_strides(t.shape, Layout()))
            own = made.kind == "made" and at.root not in self.state.into and written(steps, at.root)
            if whole and own and at.root not in into and same(made.elements, product(t.shape)):
                self.state.into[at.root] = root
            else:
                steps += self._copy(at, t, Layout(), root)
        return steps


def moved(step: PlannedStep, root: int, offset: Dim) -> PlannedStep:
    """A copy into the beginning of a buffer, into a later place of it."""
    assert isinstance(step, PlannedCall)
    return replace(step, buffers=tuple(Pointer(root, offset) if p.root == root else p for p in step.buffers))


def _lie_alike(a: Lies, b: Lies) -> bool:
    """Whether two kernels write a result in the same places."""
    return (a.root, a.offset) == (b.root, b.offset) and all(same(m, n) for m, n in zip(a.strides, b.strides, strict=True))


def _value(graph: Graph, name: str) -> Value:
    for v in graph.inputs:
        if v.name == name:
            return v
    return next(v for n in graph.nodes for v in n.outs if v.name == name)


def copy_graph(dtype: DType, shape: tuple[Dim, ...], layout: Layout) -> Graph:
    """A tensor with any strides, copied into a layout."""
    given = Value("x", TensorType(dtype, shape, STRIDED))
    made = Value("y", TensorType(dtype, shape, layout))
    node = Node(Kind.OPERATOR, "aten.clone.default", (given,), (made,))
    return Graph("group", (given,), (), (node,), (made,))
