"""Many random fused graphs at once: `python -m tests.fuzz [--graphs 5000] [--seed N] [--save build/fuzz]`, or `make fuzz`.

Every fifth graph is built around a product, convolution or attention, the others are chains, reductions and movements; a third of
them have sizes that are known at run time only. Each is held against torch in double precision, through the tile interpreter where
that is quick, and as native code. The seed is printed first; a graph that fails is saved as text with its kernel, and the same
seed makes it again.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import test_centres, test_lower
from tests.fuzz.centres import random_centre
from tests.fuzz.groups import random_group

CENTRES = 5
"""One graph in so many has a heavy centre."""
EVERY_S = 10.0


def _chain(seed: int, folder: Path) -> bool | None:
    group = random_group(seed)
    return None if test_lower.borders_of_floor(group) else test_lower.check(group, seed % 3 == 0, folder)


def _centre(seed: int, folder: Path) -> bool | None:
    return test_centres.check(random_centre(seed), seed % 3 == 0, folder)


def main(argv: list[str] | None = None) -> int:
    """Give 1 where a graph failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random fused graphs against torch in float64.")
    parser.add_argument("--graphs", type=int, default=5000, help="how many graphs that become kernels (default: 5000)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: a new one)")
    parser.add_argument("--save", type=Path, default=Path("build/fuzz"), help="where graphs that fail are saved")
    given = parser.parse_args(argv)
    first = secrets.randbelow(1 << 30) if given.seed is None else given.seed
    print(f"seed {first}", flush=True)
    given.save.mkdir(parents=True, exist_ok=True)
    done = drawn = 0
    failed: list[int] = []
    told = time.monotonic()
    while done < given.graphs and drawn < 4 * given.graphs + 40:
        seed = first + drawn
        one: Callable[[int, Path], bool | None] = _centre if drawn % CENTRES == 0 else _chain
        drawn += 1
        try:
            done += one(seed, given.save) is True
        except AssertionError as e:
            failed.append(seed)
            done += 1
            print(e, file=sys.stderr, flush=True)
        if time.monotonic() - told > EVERY_S:
            told = time.monotonic()
            print(f"{done} of {given.graphs}, {len(failed)} failed", flush=True)
    print(f"{done} graphs from seed {first} became kernels ({drawn} drawn), {len(failed)} failed")
    return 1 if failed or done < given.graphs else 0


if __name__ == "__main__":
    sys.exit(main())
