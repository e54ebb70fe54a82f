"""Deep random graphs of every access class: hundreds of ops that read each other's results, and what planning them takes.

Windows of windows, pieces of pieces, reductions of reductions and diamonds are what makes planning grow without bound, so they
come more often here than in models. `python -m tests.fuzz.deep` plans a thousand graphs of 500 ops and prints the worst.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hotfuse.compile.host import host_core
from hotfuse.compile.unit.kernel_cache import piece_of
from hotfuse.fusion.groups import group, reordered
from hotfuse.ir.graph import Graph
from hotfuse.lower import lower
from hotfuse.lower.common.effort import limited
from hotfuse.lower.common.errors import CannotLower
from hotfuse.native.target import host
from hotfuse.simplify import simplify
from tests.contract.lowering import group_of
from tests.fuzz.groups import RandomGroup, _Maker

UNBOUNDED = 1 << 60


class _Deep(_Maker):
    """Mostly images, so that windows nest."""

    def step(self) -> None:
        kinds = ["any", "pool", "split", "product", "conv", "diamond"]
        at = max(self.pick(), self.pick())
        x = self.values[at]
        if not x.is_floating_point() or x.numel() > 6000:
            at, x = 0, self.values[0]
        match self.r.choices(kinds, [8, 4, 2, 1, 1, 3])[0]:
            case "pool" if x.dim() == 4:
                size = self.r.choice([2, 3, 5])
                fn: Callable[..., torch.Tensor] = F.max_pool2d if self.r.random() < 0.7 else F.avg_pool2d
                pad = size // 2
                self.add(f"pool{size}", lambda t: fn(t, size, 1, pad), at)
            case "split" if x.dim() and x.shape[0] * x.shape[-1] > 1:
                d = max(range(x.dim()), key=lambda i: x.shape[i])
                n = x.shape[d] // 2
                self.add(f"halves{d}", lambda t: torch.cat([t.narrow(d, n, n), t.narrow(d, 0, n)], d), at)
            case "product" if x.dim() >= 2:
                self.add("product", lambda t: torch.matmul(t, t.transpose(-1, -2)), at)
            case "conv" if x.dim() == 4:
                weight = torch.randn(x.shape[1], x.shape[1], 3, 3)
                self.add("conv", lambda t: F.conv2d(t, weight, padding=1), at)
            case "diamond":
                self.add("diamond", lambda t: t + torch.sigmoid(t) * t, at)
            case _:
                super().step()


def deep_graph(seed: int, nodes: int) -> RandomGroup:
    """A function of about so many ops."""
    m = _Deep(seed)
    generator = torch.Generator().manual_seed(seed)
    m.values.append(torch.randn(1, m.r.choice([2, 4, 8]), m.r.choice([5, 8, 12]), m.r.choice([6, 8, 9]), generator=generator))
    m.inputs = 1
    for _ in range(4 * nodes):
        if len(m.steps) < nodes:
            m.step()
    read = {i for s in m.steps for i in s.of}
    ends = [i for i in range(1, len(m.values)) if i not in read]
    return RandomGroup(seed, m.values[:1], m.steps, ends or [len(m.values) - 1])


@dataclass(frozen=True)
class Planned:
    """What planning a graph took."""

    nodes: int
    kernels: int
    steps: int
    seconds: float
    largest: int
    """Instructions of the largest kernel, as written."""


def planned(graph: Graph) -> Planned:
    """Group a graph and lower every group, cutting those that cannot be lowered, as compilation does."""
    start, core = time.perf_counter(), host_core(host())
    graph = simplify(graph)[0]
    kernels = largest = 0
    with limited(UNBOUNDED) as all_of_it:
        groups = group(graph)
        ordered, at = reordered(graph, groups), 0
        for g in groups:
            waiting = [range(at, at + len(g.nodes))] if g.kind != "library" else []
            at += len(g.nodes)
            while waiting:
                nodes = waiting.pop()

                def lowers(count: int, nodes: range = nodes) -> bool:
                    nonlocal largest
                    try:
                        found = lower(piece_of(ordered, nodes[:count], {}).normal, core)
                    except CannotLower:
                        return False
                    largest = max(largest, len(found.kernel.body))
                    return True

                if lowers(len(nodes)):
                    kernels += 1
                    continue
                good, bad = 1, len(nodes)
                while bad - good > 1:
                    middle = (good + bad) // 2
                    good, bad = (middle, bad) if lowers(middle) else (good, middle)
                waiting += [nodes[:good], nodes[good:]] if len(nodes) > 1 else []
    return Planned(len(graph.nodes), kernels, all_of_it.spent, time.perf_counter() - start, largest)


def traced(seed: int, nodes: int) -> Graph:
    """A deep graph as the front end would give it."""
    made = deep_graph(seed, nodes)
    return group_of(made, made.inputs, constants=True).graph


def main(argv: list[str] | None = None) -> int:
    """Print the graphs that took the longest, and those that took the most steps."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.deep", description="What planning deep random graphs takes.")
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=500, help="ops of one graph, each some nodes (default: 500)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: a new one)")
    given = parser.parse_args(argv)
    first = secrets.randbelow(1 << 30) if given.seed is None else given.seed
    print(f"seed {first}", flush=True)
    found: list[tuple[int, Planned]] = []
    for seed in range(first, first + given.graphs):
        found.append((seed, planned(traced(seed, given.nodes))))
        if len(found) % 10 == 0 or len(found) == given.graphs:
            slow, much = max(found, key=lambda f: f[1].seconds), max(found, key=lambda f: f[1].steps / f[1].nodes)
            print(f"{len(found)} graphs; slowest {slow[1].seconds:.1f} s (seed {slow[0]}, {slow[1].nodes} nodes); "
                  f"most steps a node {much[1].steps / much[1].nodes:.0f} (seed {much[0]})", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
