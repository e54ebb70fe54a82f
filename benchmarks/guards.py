"""What it costs to find the plan of a call: guards of a site with several plans, natively and in Python.

    python -m benchmarks.guards [--inputs 1,2,10] [--plans 1,8] [--json]

Each input is a rank-3 fp32 tensor with one fixed and one shared symbolic size; plans differ in another size, and the last one,
which the call fits, is generic in it. The time is that of the whole look-up, with the call from Python. `torch.compile`'s guards
over the same inputs stand beside on request (`--peers`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from hotfuse.analysis.call_facts import Dense, Facts, Holds, Plain, Ranked, Sized, Typed, place
from hotfuse.analysis.decision import decide
from hotfuse.ir.dims import Sym, sym
from hotfuse.ir.types import DType
from hotfuse.native.guard import native_select, select_text
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.serve.dispatch import Case, InlineCache


def facts(inputs: int) -> Facts:
    found: list[Any] = []
    for i in range(inputs):
        found += [Plain(i), Typed(i, DType.F32), Ranked(i, 3), Dense(i, 3, None, True), Sized(i, 2, 64)]
    found += [Holds(Sym("==", (sym(place(i, 0)), sym(place(0, 0))))) for i in range(1, inputs)]
    return tuple(found)


def site(inputs: int, plans: int, native: bool) -> InlineCache[int]:
    cache: InlineCache[int] = InlineCache(inputs, plans, None)
    general = facts(inputs)
    cache.add(Case(general, 0))
    for n in range(1, plans):
        cache.add(Case((*general, Sized(0, 1, 8 * n)), n))
    if native:
        cache._submit = lambda job: job()
        cache._in_background()
        assert cache.table.native, cache.reason
    return cache


def microseconds(runs: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Medians over interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - begin) / calls * 1e6)
    return {name: median(t) for name, t in times.items()}


def routed(cache: InlineCache[Any], leaves: list[torch.Tensor]) -> object:
    """What a call does to find its plan."""
    table = cache.table
    number = table.select(*leaves)
    return table.routes[number] if number >= 0 else None


def measure(inputs: int, plans: int, peers: bool) -> dict[str, float]:
    leaves = [torch.randn(2, 57, 64) for _ in range(inputs)]
    native, python = site(inputs, plans, True), site(inputs, plans, False)
    slot = epochs.slot()

    def marked() -> object:
        outer = slot.epoch
        slot.epoch = outer or epochs.now
        try:
            return routed(native, leaves)
        finally:
            slot.epoch = outer

    runs: dict[str, Callable[[], object]] = {
        "native": lambda: routed(native, leaves),
        "native, with an epoch mark": marked,
        "python": lambda: routed(python, leaves),
        "nothing": lambda: None,
    }
    if peers:
        compiled = torch.compile(lambda *ts: ts[0], backend="eager", dynamic=True)
        runs["torch.compile, empty graph"] = lambda: compiled(*leaves)
        compiled(*leaves)
    with torch.no_grad():
        return microseconds(runs, 15, 2000)


def costs(inputs: int, plans: int) -> dict[str, float]:
    """What making a native decision takes, in milliseconds; only the first two hold the interpreter lock."""
    general = facts(inputs)
    cases = [(*general, Sized(0, 1, 8 * n)) for n in range(1, plans)] + [general]
    native_select(decide(cases))
    begin = time.perf_counter()
    decision = decide(cases)
    decided = time.perf_counter()
    select_text(decision)
    written = time.perf_counter()
    native_select(decision)
    done = time.perf_counter()
    return {"decide": (decided - begin) * 1e3, "text": (written - decided) * 1e3, "all": (done - written) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", default="1,2,10")
    parser.add_argument("--plans", default="1,8")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for inputs in map(int, options.inputs.split(",")):
        for plans in map(int, options.plans.split(",")):
            times = measure(inputs, plans, options.peers)
            made = costs(inputs, plans)
            found[f"{inputs} inputs, {plans} plans"] = {"us": times, "ms_to_make": made}
            print(f"{inputs:3} inputs {plans:2} plans: " + "  ".join(f"{k} {v:.3f} us" for k, v in times.items()))
            print("    to make: " + "  ".join(f"{k} {v:.2f} ms" for k, v in made.items()))
    if options.json:
        last = list(found.values())[-1]["us"]
        print(json.dumps({"dispatch_us": last["native, with an epoch mark"], "guard_us": last["native"], "cases": found}))


if __name__ == "__main__":
    main()
