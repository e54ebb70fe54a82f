"""Tier 1 in the worker: group, lower, generate, compile. The answer is text and object code.

Groups that are alike but for their names (the layers of an encoder) are compiled once. A group that cannot be lowered, or whose
pieces cannot, stays with the library; each such decision is a note.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotfuse.backends.llvm.native import compile_kernel
from hotfuse.backends.llvm.target import Target, host
from hotfuse.base.errors import HotfuseError
from hotfuse.compile.trial import attempt
from hotfuse.fusion.groups import Group, group, reordered
from hotfuse.fusion.layout import channels_last
from hotfuse.ir.graph import Graph
from hotfuse.ir.normal import normalized
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify
from hotfuse.lower import Core, lower
from hotfuse.lower.codec import to_json
from hotfuse.lower.lowered import Lowered
from hotfuse.lower.tiling import core_for
from hotfuse.machine.topology import topology
from hotfuse.ops.table import packet

Message = tuple[dict[str, Any], list[bytes]]


@dataclass(slots=True)
class _Shop:
    """What has been made so far in one request."""

    lower: Callable[[Graph], Lowered]
    sizes: Mapping[str, int]
    """What the symbols are in a real call, to try kernels with."""
    kernels: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    codes: list[bytes] = field(default_factory=list[bytes])
    known: dict[str, int] = field(default_factory=dict[str, int])
    notes: dict[str, int] = field(default_factory=dict[str, int])

    def kernel(self, piece: Graph) -> int:
        """The number of the kernel for a group, made if its like has not been seen; -1 where there is none."""
        normal = normalized(piece)
        text = show(normal)
        if text not in self.known:
            self.known[text] = self._make(normal)
        return self.known[text]

    def _make(self, normal: Graph) -> int:
        ops = "+".join(dict.fromkeys(packet(n.op).removeprefix("aten.") for n in normal.nodes))
        start = time.perf_counter()
        try:
            lowered = self.lower(normal)
            compiled = compile_kernel(lowered.kernel)
            made = time.perf_counter() - start
            outcome = attempt(normal, lowered, compiled, self.sizes)
        except HotfuseError as e:
            note = f"{ops} stays with the library: {e.because or e.what}"
            self.notes[note] = self.notes.get(note, 0) + 1
            return -1
        self.kernels.append({**to_json(lowered), "ops": ops, "compile_s": round(made, 4),
                             "kernel_us": round(outcome.kernel_us, 1), "library_us": round(outcome.library_us, 1)})
        self.codes.append(compiled.code)
        return len(self.codes) - 1


def host_core(target: Target) -> Core:
    """What tiling needs to know of this machine."""
    caches = {(c.level, c.kind): c.bytes for c in topology().caches}
    l1, l2 = caches.get((1, "data")), caches.get((2, "unified"))
    return core_for(target.lanes, many_registers=target.name in ("avx512", "neon"), l1=l1, l2=l2)


def make(graph: Graph, sizes: Mapping[str, int]) -> Message:
    """Everything the serving process needs to build a tier-1 plan; `sizes` are those of a real call."""
    core = host_core(host())
    graph = channels_last(graph)
    shop = _Shop(lambda g: lower(g, core), sizes)
    groups: list[tuple[Group, int]] = []
    for g in group(graph):
        groups += _settle(graph, g, shop)
    ordered = verify(reordered(graph, [g for g, _ in groups]))
    parts: list[list[int]] = []
    at = 0
    for g, kernel in groups:
        if parts and kernel < 0 and parts[-1][2] < 0:
            parts[-1][1] = at + len(g.nodes)
        else:
            parts.append([at, at + len(g.nodes), kernel])
        at += len(g.nodes)
    header = {"ok": True, "graph": show(ordered), "parts": parts, "kernels": shop.kernels,
              "notes": [f"{n} ({k} times)" if k > 1 else n for n, k in shop.notes.items()]}
    return header, shop.codes


def _settle(graph: Graph, g: Group, shop: _Shop) -> list[tuple[Group, int]]:
    """A group with its kernel; halves of it where the whole has none and the halves may."""
    if g.kind == "library":
        return [(g, -1)]
    kernel = shop.kernel(extract(graph, g.nodes, "group"))
    if kernel >= 0 or len(g.nodes) == 1:
        return [(g, kernel)]
    first = _prefix(g)
    rest = g.nodes[first:]
    return [*_settle(graph, Group(g.nodes[:first], g.kind), shop), *_settle(graph, Group(rest, "rows"), shop)]


def _prefix(g: Group) -> int:
    """Where to cut a group that has no kernel: behind a contraction or convolution, or in the middle."""
    return 1 if g.kind in ("contract", "convolution") else len(g.nodes) // 2


def handle(header: dict[str, Any], _blobs: Sequence[bytes]) -> Message:
    """The request of kind `tier1`: a graph as text, and the sizes of a real call."""
    return make(verify(parse(header["graph"])), {str(k): int(v) for k, v in header["dims"].items()})
