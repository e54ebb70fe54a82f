"""After a run of every test: what failed beside others runs twice more, alone.

Tests here start processes, race threads and fill a machine of two cores; one that misses a deadline once in a thousand runs tells
nothing of a change. One that fails again does. A few failures at most are repeated, each has to pass both times, and all of them
are named, so that they are mended and not forgotten.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 4
"""Failures that may be chance; more of them have a common cause."""
TIMES = 2


def failed(cache: Path) -> list[str]:
    """The tests that failed in the last run, as pytest noted them."""
    try:
        return sorted(json.loads((cache / "v" / "cache" / "lastfailed").read_text()))
    except (OSError, ValueError):
        return []


def passes_alone(test: str) -> bool:
    """Whether a test passes by itself, in a process of its own, every time."""
    for n in range(1, TIMES + 1):
        print(f"--- alone, {n} of {TIMES}: {test}", flush=True)
        if subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]).returncode:
            return False
    return True


def main() -> int:
    """The exit status: 0 where all that failed passes alone."""
    tests = failed(Path(".pytest_cache"))
    if not tests or len(tests) > MOST:
        print(f"{len(tests)} failed tests are noted: nothing is repeated (from 1 to {MOST} would be)")
        return 1
    if not all(passes_alone(test) for test in tests):
        return 1
    print(f"\nUNSTEADY, failed beside others and passed {TIMES} times alone; mend them:", *tests, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
