"""Tier 1 in the worker: group, lower, generate, compile. The answer is text and object code.

Groups that are alike but for their names (the layers of an encoder) are compiled once, and tried once per size. A group that
cannot be lowered is cut where that begins, and what is left stays with the library; each such decision is a note.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotfuse.backends.llvm.native import CompiledKernel, compile_kernel
from hotfuse.backends.llvm.target import Target, host
from hotfuse.base.errors import HotfuseError
from hotfuse.compile.trial import attempt
from hotfuse.fusion.groups import Group, group, reordered
from hotfuse.fusion.layout import channels_last
from hotfuse.ir.branches import IF, branches
from hotfuse.ir.dims import evaluate, symbols
from hotfuse.ir.graph import Graph
from hotfuse.ir.normal import normalized
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify
from hotfuse.lower import Core, lower
from hotfuse.lower.codec import to_json
from hotfuse.lower.errors import CannotLower
from hotfuse.lower.lowered import Lowered
from hotfuse.lower.own_sizes import anchored, with_own_sizes
from hotfuse.lower.tiling import core_for
from hotfuse.machine.topology import topology
from hotfuse.ops.table import Access, lookup, packet

Message = tuple[dict[str, Any], list[bytes]]

BUDGET_S = 10.0
"""After so long, a group whose first attempt fails is not cut into smaller ones any more."""
WORTH_CUTTING = 6
"""Nodes in a group that loses to the library, from which on its halves are tried: those of a few fused ops lose as well."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A kernel that compiled, before any trial."""

    lowered: Lowered
    compiled: CompiledKernel
    ops: str
    seconds: float


@dataclass(slots=True)
class _Shop:
    """What has been made so far in one request."""

    lower: Callable[[Graph], Lowered]
    sizes: Mapping[str, int]
    """What the symbols are in a real call, to try kernels with."""
    kernels: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    codes: list[bytes] = field(default_factory=list[bytes])
    lowered: dict[str, Lowered | str] = field(default_factory=dict[str, "Lowered | str"])
    """Per group as text: its kernel before code generation, or why there is none."""
    made: dict[str, _Made] = field(default_factory=dict[str, _Made])
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    tried: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict[tuple[str, tuple[int, ...]], int])
    notes: dict[str, int] = field(default_factory=dict[str, int])
    until: float = field(default_factory=lambda: time.perf_counter() + BUDGET_S)

    def lowers(self, piece: Graph) -> str:
        """Why a group has no kernel; empty if it has one, as far as lowering goes."""
        normal = normalized(with_own_sizes(piece)[0])
        return self._lowered(normal, show(normal))[1]

    def _lowered(self, normal: Graph, text: str) -> tuple[Lowered | None, str]:
        if text not in self.lowered:
            try:
                self.lowered[text] = self.lower(normal)
            except HotfuseError as e:
                self.lowered[text] = e.because or e.what
        found = self.lowered[text]
        return (None, found) if isinstance(found, str) else (found, "")

    def kernel(self, piece: Graph) -> int:
        """The number of the kernel for a group, made if its like has not been seen; -1 where there is none or it loses."""
        own, meaning = with_own_sizes(piece)
        normal = normalized(own)
        text = show(normal)
        sizes = {**self.sizes, **{n: evaluate(d, self.sizes) for n, d in meaning.items() if symbols(d) <= self.sizes.keys()}}
        key = (text, tuple(sizes[n] for n in meaning if n in sizes))
        if key not in self.tried:
            self.tried[key] = self._try(normal, text, sizes)
        return self.tried[key]

    def _try(self, normal: Graph, text: str, sizes: Mapping[str, int]) -> int:
        ops = "+".join(dict.fromkeys(packet(n.op).removeprefix("aten.") for n in normal.nodes))
        try:
            if text not in self.made:
                start = time.perf_counter()
                lowered, why = self._lowered(normal, text)
                if lowered is None:
                    raise CannotLower(why)
                compiled = compile_kernel(lowered.kernel)
                self.made[text] = _Made(lowered, compiled, ops, time.perf_counter() - start)
            made = self.made[text]
            outcome = attempt(normal, made.lowered, made.compiled, sizes)
        except HotfuseError as e:
            self.note(f"{ops} stays with the library: {e.because or e.what}")
            return -1
        if text not in self.numbers:
            self.kernels.append({**to_json(made.lowered), "ops": ops, "compile_s": round(made.seconds, 4),
                                 "kernel_us": round(outcome.kernel_us, 1), "library_us": round(outcome.library_us, 1)})
            self.codes.append(made.compiled.code)
            self.numbers[text] = len(self.codes) - 1
        return self.numbers[text]

    def note(self, text: str) -> None:
        """Remember a decision."""
        self.notes[text] = self.notes.get(text, 0) + 1

    @property
    def spent(self) -> bool:
        """Whether it is too late for second attempts."""
        return time.perf_counter() > self.until


def host_core(target: Target) -> Core:
    """What tiling needs to know of this machine."""
    caches = {(c.level, c.kind): c.bytes for c in topology().caches}
    l1, l2 = caches.get((1, "data")), caches.get((2, "unified"))
    return core_for(target.lanes, many_registers=target.name in ("avx512", "neon"), l1=l1, l2=l2)


def make(graph: Graph, sizes: Mapping[str, int]) -> Message:
    """Everything the serving process needs to build a tier-1 plan; `sizes` are those of a real call."""
    core = host_core(host())
    shop = _Shop(lambda g: lower(g, core), sizes)
    header = {"ok": True, **_body(graph, shop), "kernels": shop.kernels,
              "notes": [f"{n} ({k} times)" if k > 1 else n for n, k in shop.notes.items()]}
    return header, shop.codes


def _body(graph: Graph, shop: _Shop) -> dict[str, Any]:
    """A graph in the order its kernels need: [first node, end, kernel or -1] per part, and the bodies of parts that branch."""
    graph = channels_last(graph)
    groups: list[tuple[Group, int]] = []
    for g in group(graph):
        groups += _settle(graph, g, shop)
    ordered = verify(reordered(graph, [g for g, _ in groups]))
    parts: list[list[int]] = []
    bodies: dict[str, list[dict[str, Any]]] = {}
    at = 0
    for g, kernel in groups:
        entered = _entered(ordered, at, shop)
        if parts and kernel < 0 and parts[-1][2] < 0 and not entered and str(len(parts) - 1) not in bodies:
            parts[-1][1] = at + len(g.nodes)
        else:
            parts.append([at, at + len(g.nodes), kernel])
        if entered:
            bodies[str(len(parts) - 1)] = entered
        at += len(g.nodes)
    return {"graph": show(ordered), "parts": parts, "branches": bodies}


def _entered(graph: Graph, at: int, shop: _Shop) -> list[dict[str, Any]]:
    """The branches of a node, each a body of its own; none where no branch has a kernel."""
    node = graph.nodes[at]
    if node.op != IF:
        return []
    made = [_body(b.graph, shop) for b in branches(graph, node)]
    return made if any(body["branches"] or any(kernel >= 0 for _, _, kernel in body["parts"]) for body in made) else []


def _settle(graph: Graph, g: Group, shop: _Shop) -> list[tuple[Group, int]]:
    """A group with its kernel; pieces of it where the whole has none and the pieces may.

    What cannot be lowered is cut in front of the node that is to blame; what can, but loses to the library, in the middle.
    """
    if g.kind == "library" or all(lookup(graph.nodes[i].op).access is Access.MOVEMENT for i in g.nodes):
        return [(g, -1)]  # what only moves data is views to torch, and those cost nothing
    piece = _piece(graph, g.nodes)
    if g.kind == "recurrent":  # beside its centre it has only what prepares it, which is nothing to compile alone
        return [(g, shop.kernel(piece))]
    why = shop.lowers(piece) if len(g.nodes) > 1 else ""
    if why and not shop.spent:
        first = _blamed(graph, g, shop)
        op = packet(graph.nodes[g.nodes[first]].op).removeprefix("aten.")
        shop.note(f"a group of {len(g.nodes)} is cut before {op}: {why}")
    else:
        kernel = shop.kernel(piece)
        first = _prefix(g)
        if kernel >= 0 or len(g.nodes) == 1 or why or shop.spent or not first:
            return [(g, kernel)]
    rest = g.nodes[first:]
    return [*_settle(graph, Group(g.nodes[:first], g.kind), shop), *_settle(graph, Group(rest, "rows"), shop)]


def _piece(graph: Graph, nodes: Sequence[int]) -> Graph:
    return anchored(graph, extract(graph, nodes, "group"))


def _blamed(graph: Graph, g: Group, shop: _Shop) -> int:
    """How many of a group's nodes, from the first, can be lowered together; at least 1, also where not even that one can.

    Found by bisection: what makes a group impossible rarely becomes possible with more nodes.
    """
    good, bad = 1, len(g.nodes)
    while bad - good > 1:
        middle = (good + bad) // 2
        if shop.lowers(_piece(graph, g.nodes[:middle])):
            bad = middle
        else:
            good = middle
    return good


def _prefix(g: Group) -> int:
    """Where to cut a group that loses: behind a contraction or convolution, in the middle of a long one; 0 for not at all."""
    if g.kind in ("contract", "convolution"):
        return 1
    return len(g.nodes) // 2 if len(g.nodes) >= WORTH_CUTTING else 0


def handle(header: dict[str, Any], _blobs: Sequence[bytes]) -> Message:
    """The request of kind `tier1`: a graph as text, and the sizes of a real call."""
    return make(verify(parse(header["graph"])), {str(k): int(v) for k, v in header["dims"].items()})
