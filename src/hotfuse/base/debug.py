"""`HOTFUSE_DEBUG`: what is printed to stderr, level by level; each level includes those below it.

| level | prints |
| --- | --- |
| 1 | every decision as it is made |
| 2 | units of a compilation: what became of each, and every change of a partitioning |
| 3 | graphs, as captured and as cut into kernels |
| 4 | tile programs |
| 5 | generated LLVM IR |
| 6 | machine code in assembler's notation |
| 7 | every call: which plan, how long |

Levels 5 and 6 generate their text once more in the serving process, so they slow down deployment, and level 7 slows down calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

DECISIONS, UNITS, GRAPHS, TILES, LLVM, ASSEMBLY, CALLS = range(1, 8)


def say(debug: int, level: int, text: Callable[[], str | Iterable[str]]) -> None:
    """Print if that level is asked for; the text is made only then."""
    if debug < level:
        return
    made = text()
    for line in made.splitlines() if isinstance(made, str) else made:
        print(f"hotfuse: {line}", file=sys.stderr)
