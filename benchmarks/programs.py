"""Programs as people write them, before and after one changed line, side by side in one run.

    python -m benchmarks.programs gradients|compile|regional|families|recipes [--seconds 30] [--threads 1] [--only NAME ...]

| measure | what is compared |
| --- | --- |
| gradients | BERT-base, one row of 128 tokens, called as torch calls it by default: with gradients enabled |
| compile | `torch.compile(backend="hotfuse")` against Inductor: steady, the first call, 40 calls of random lengths in total |
| regional | a transformer's blocks compiled one by one (`block.compile`), by both back ends, beside eager |
| families | tiny models of `benchmarks.families`: the same results, the same tokens, and calls at tier 1 or higher |
| recipes | `examples/recipes` with their own sizes: the same results, and how many times as fast |

`benchmarks.decode` measures tokens a second, `benchmarks.unseen` writes behind torch's back. Contenders take turns; medians. The
last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

import hotfuse
from benchmarks.families import FAMILIES, Family

ROUNDS = 9
RTOL = 1e-3
FAMILY_CALLS, FAMILY_RUNS, NEW_TOKENS = 160, 24, 12
"""Forward calls, and runs of `generate` for so many tokens, before a family counts as one that stays below tier 1."""
LENGTHS = 40


def turns(contenders: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: median(t) for name, t in times.items()}


def served(call: Callable[[], Any], seconds: float, wait: Callable[[float], Any]) -> None:
    """Call for some seconds, then let background work end."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        call()
    wait(60.0)


def bert(layers: int = 12) -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers)).eval()


def gradients(seconds: float) -> dict[str, Any]:
    """With gradients enabled, and none ever asked for."""
    model, ids = bert(), torch.randint(0, 30000, (1, 128))
    with hotfuse.jit(model) as fast:
        served(lambda: fast(ids), seconds, fast.wait)
        ms = turns({"eager": lambda: model(ids), "hotfuse": lambda: fast(ids)})
        tiers = fast.stats()["calls_per_tier"]
    return {"ms": ms, "over_eager": ms["eager"] / ms["hotfuse"], "tiers": tiers}


def compiled(seconds: float, layers: int = 4) -> dict[str, Any]:
    """`torch.compile` with both back ends, each on a model of its own with the same weights."""
    found: dict[str, Any] = {"first_s": {}, "lengths_s": {}}
    models = {backend: bert(layers) for backend in ("hotfuse", "inductor")}
    ids = torch.randint(0, 30000, (1, 128))
    rng = random.Random(0)
    lengths = [torch.randint(0, 30000, (1, rng.randint(5, 128))) for _ in range(LENGTHS)]
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: models["hotfuse"](ids)}
    with torch.inference_mode():
        for backend, model in models.items():
            ours = torch.compile(model, backend=backend)
            begin = time.perf_counter()
            ours(ids)
            found["first_s"][backend] = time.perf_counter() - begin
            begin = time.perf_counter()
            for x in lengths:
                ours(x)
            found["lengths_s"][backend] = time.perf_counter() - begin
            calls[backend] = lambda f=ours: f(ids)
        from hotfuse.torch_backend import wait_compiled

        served(calls["hotfuse"], seconds, wait_compiled)
        found["ms"] = turns(calls)
    found["over_inductor"] = {
        "steady": found["ms"]["inductor"] / found["ms"]["hotfuse"],
        "first call": found["first_s"]["inductor"] / found["first_s"]["hotfuse"],
        f"{LENGTHS} lengths": found["lengths_s"]["inductor"] / found["lengths_s"]["hotfuse"],
    }
    return found


class Block(torch.nn.Module):
    """Of a transformer as image models have them: what every one is scaled by comes with the call."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) * scale
        return x + self.down(torch.nn.functional.gelu(self.up(self.between(x)), approximate="tanh"))


class OtherBlock(Block):
    """The same with code of its own, which another back end compiles."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x, scale)


def regional(seconds: float, blocks: int = 12, width: int = 128) -> dict[str, Any]:
    """Blocks of one class, compiled one by one: all of them share one of Dynamo's graphs, with weights of their own."""
    from hotfuse.torch_backend import wait_compiled

    torch.manual_seed(0)
    plain = torch.nn.ModuleList(Block(width) for _ in range(blocks)).eval()
    models = {"eager": plain}
    for backend, kind in (("hotfuse", Block), ("inductor", OtherBlock)):
        models[backend] = torch.nn.ModuleList(kind(width) for _ in range(blocks)).eval()
        models[backend].load_state_dict(plain.state_dict())
        for block in models[backend]:
            block.compile(backend=backend)
    x, scale = torch.randn(2, 32, width), torch.rand(2, 1, width)

    def run(name: str) -> torch.Tensor:
        h = x
        for block in models[name]:
            h = block(h, scale)
        return h

    calls: dict[str, Callable[[], Any]] = {name: lambda name=name: run(name) for name in models}
    with torch.no_grad():
        served(calls["hotfuse"], seconds, wait_compiled)
        ms = turns(calls, 10 * ROUNDS)
        wrong = disagreement(calls["hotfuse"](), calls["eager"]())
    return {"wrong": wrong, "ms": ms, "over_eager": ms["eager"] / ms["hotfuse"], "over_inductor": ms["inductor"] / ms["hotfuse"]}


def disagreement(got: Any, want: Any) -> str:
    """In what way two results differ; empty where they do not."""
    ours, theirs = ([t for t in pytree.tree_leaves(r) if isinstance(t, torch.Tensor)] for r in (got, want))
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors, not {len(theirs)}"
    for i, (g, w) in enumerate(zip(ours, theirs, strict=True)):
        if g.shape != w.shape or g.dtype != w.dtype:
            return f"tensor {i} is {g.dtype}{list(g.shape)}, not {w.dtype}{list(w.shape)}"
        scale = float(w.double().abs().nan_to_num().max()) if w.numel() else 0.0
        if not torch.allclose(g.double(), w.double(), rtol=RTOL, atol=RTOL * max(scale, 1e-3), equal_nan=True):
            return f"tensor {i} differs by {float((g.double() - w.double()).abs().max()):.3g} of {scale:.3g}"
    return ""


def family(
    row: Family, settings: hotfuse.Settings | None = None, calls: int = FAMILY_CALLS, runs: int = FAMILY_RUNS
) -> dict[str, Any]:
    """One family, forward and where it can `generate`: whether all of it was right, and which tiers answered."""
    model, wrong = row.build(), ""
    rng = torch.random.get_rng_state()
    torch.manual_seed(1)
    with torch.inference_mode(), hotfuse.jit(model, settings=settings) as fast:

        def high() -> int:
            tiers = fast.stats()["calls_per_tier"]
            return tiers["1"] + tiers["2"]

        for k in range(calls):
            feed = row.feed(9 if k % 3 else 12)
            wrong = wrong or disagreement(fast(**feed), model(**feed))
            if k & (k + 1) == 0:
                fast.wait(30)
            if high() > 2:
                break
        forward, generated = high(), 0
        for k in range(runs if row.generates else 0):
            feed = row.feed(7)
            feed.pop("decoder_input_ids", None)
            got, want = (m.generate(**feed, max_new_tokens=NEW_TOKENS, do_sample=False) for m in (fast, model))
            wrong = wrong or ("" if torch.equal(got, want) else "other tokens")
            if k & (k + 1) == 0:
                fast.wait(30)
            if (generated := high() - forward) > NEW_TOKENS:
                break
        told = fast.explain().to_dict()
        why = [r.splitlines()[0] for s in told["sites"] for r in s["refused"]]
        why += [f"{what}: {reason}" for s in told["sites"] for p in s["plans"] for what, reason in p["refused"].items()]
        tiers = fast.stats()["calls_per_tier"]
    torch.random.set_rng_state(rng)
    return {"name": row.name, "wrong": wrong, "forward": forward > 0, "generate": generated > 0 if row.generates else None,
            "tiers": tiers, "why": why[:3]}  # fmt: skip


def families(only: Sequence[str]) -> dict[str, Any]:
    """All of them, a line each."""
    rows = []
    for row in FAMILIES:
        if only and row.name not in only:
            continue
        begin = time.perf_counter()
        found = family(row)
        rows.append(found)
        below = "" if found["forward"] and found["generate"] is not False else f" BELOW TIER 1: {found['why']}"
        seconds = time.perf_counter() - begin
        print(f"{row.name:16} {found['wrong'] or 'right':8} {found['tiers']} {seconds:.1f} s{below}", flush=True)
    reached = [r for r in rows if r["forward"] and r["generate"] is not False]
    below = {r["name"]: r["why"] for r in rows if r not in reached}
    return {"families": len(rows), "right": sum(not r["wrong"] for r in rows), "at_tier_1": len(reached), "below": below,
            "wrong": {r["name"]: r["wrong"] for r in rows if r["wrong"]}}  # fmt: skip


def recipes(only: Sequence[str]) -> dict[str, Any]:
    """With their own sizes; those whose packages are not installed are told of."""
    folder = Path(__file__).parents[1] / "examples" / "recipes"
    rows: dict[str, Any] = {}
    for path in sorted(folder.glob("[a-z]*.py")):
        if path.stem == "common" or (only and path.stem not in only):
            continue
        try:
            found = importlib.import_module(f"examples.recipes.{path.stem}").main()
            rows[path.stem] = {"same": found.same, "times_as_fast": found.before_ms / found.after_ms}
        except (ImportError, hotfuse.HotfuseError) as e:
            rows[path.stem] = {"not_run": str(e).splitlines()[0]}
    ratios = [r["times_as_fast"] for r in rows.values() if "same" in r]
    geomean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    return {"recipes": rows, "all_the_same": all(r.get("same", True) for r in rows.values()), "geomean": geomean}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=["gradients", "compile", "regional", "families", "recipes"])
    parser.add_argument("--seconds", type=float, default=30.0, help="of calls before anything is measured")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="families or recipes")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    warnings.filterwarnings("ignore")
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "gradients": lambda: gradients(asked.seconds), "compile": lambda: compiled(asked.seconds),
        "regional": lambda: regional(asked.seconds), "families": lambda: families(asked.only),
        "recipes": lambda: recipes(asked.only)}  # fmt: skip
    print(json.dumps({asked.measure: measures[asked.measure]()}))


if __name__ == "__main__":
    main()
