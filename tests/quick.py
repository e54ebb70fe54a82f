"""What `make test` runs of tests that take long: as many cases as fit into a budget, drawn from their names.

`make test-all`, which CI runs, runs every case. `costs.txt` holds what a case of each costly test took, in seconds, on two cores;
`make test-costs` measures again. A test that is not listed there runs wholly.

    cost up to BUDGET_S for all cases       all of them
    more                                    as many as fit, at least one; `@pytest.mark.budget_s(N)` gives a table more
    one case longer than MAX_S          none: it repeats on a large scale, or with whole processes, what smaller tests show
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

COSTS = Path(__file__).with_name("costs.txt")
BUDGET_S = 0.5
MAX_S = 2.0
FIRST_S = 4.0
"""Cases that take so long begin before all others: at the end one process would be at the last of them, and the others idle."""


def function_of(name: str) -> str:
    """A test without its case, and without the group that it runs in."""
    return name.partition("[")[0].partition("@")[0]


def costs() -> dict[str, float]:
    """Seconds that one case of a test takes, as measured."""
    found: dict[str, float] = {}
    for line in COSTS.read_text().splitlines() if COSTS.exists() else ():
        seconds, _, name = line.partition(" ")
        found[name.strip()] = float(seconds)
    return found


def drawn(names: Iterable[str], known: Mapping[str, float], budgets: Mapping[str, float]) -> set[str]:
    """The names to run: the same ones whatever else runs, and in whichever order."""
    cases: dict[str, list[str]] = defaultdict(list)
    for name in names:
        cases[function_of(name)].append(name)
    return {name for test, of in cases.items() for name in _few(of, known.get(test, 0.0), budgets.get(test, BUDGET_S))}


def _few(names: list[str], seconds: float, budget_s: float) -> list[str]:
    if seconds * len(names) <= budget_s:
        return names
    if seconds > max(MAX_S, budget_s):
        return []
    return sorted(names, key=lambda n: hashlib.sha256(n.encode()).digest())[: max(1, int(budget_s / seconds))]


def long_ones_first(names: Iterable[str], known: Mapping[str, float]) -> list[str]:
    """An order that ends evenly on several processes; what is shorter stays as it is written."""
    return sorted(names, key=lambda n: -cost if (cost := known.get(function_of(n), 0.0)) >= FIRST_S else 0.0)


def write(took: Mapping[str, float]) -> None:
    """Note what cases took, by name; what did not run keeps its line."""
    tests: dict[str, list[float]] = defaultdict(list)
    for name, seconds in took.items():
        tests[function_of(name)].append(seconds)
    kept = {name: s for name, s in costs().items() if name not in tests}
    kept |= {name: sum(of) / len(of) for name, of in tests.items() if sum(of) > BUDGET_S}
    COSTS.write_text("".join(f"{s:.2f} {name}\n" for name, s in sorted(kept.items())))
