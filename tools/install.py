"""Install this project for development, with a pip for each of up to four cores: one pip unpacks wheels on one core.

    python tools/install.py

`requirements-dev.txt` names all that has to be there, the largest wheels first, so nothing needs to be resolved to begin with:
the lines are dealt out, and each pip installs its share alone. One more pip then resolves what pyproject.toml asks for: it finds
everything there, installs what a line lacked on this machine, and installs the project itself. Where packages come from is pip's
own configuration.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ROOT / "requirements-dev.txt"
MAX_PIPS = 4
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")


def dealt(lines: Sequence[str], shares: int) -> list[list[str]]:
    """Lines in turns to and fro: 1, 2, 2, 1, 1, … so that no share has the larger one of every pair."""
    found: list[list[str]] = [[] for _ in range(shares)]
    for i, line in enumerate(lines):
        turn, place = divmod(i, shares)
        found[place if turn % 2 == 0 else shares - 1 - place].append(line)
    return [share for share in found if share]


def main() -> int:
    """Install; pip's exit status."""
    text = VERSIONS.read_text(encoding="utf-8").splitlines()
    lines = [line for line in text if line.strip() and not line.startswith("#")]
    shares = dealt(lines, max(1, min(MAX_PIPS, os.cpu_count() or 1)))
    pips = [subprocess.Popen([*PIP, "--no-deps", *share]) for share in shares]
    if any([p.wait() for p in pips]):  # all of them, also where the first has failed
        print("hotfuse: a pip failed; what it left out is installed by the next one", file=sys.stderr)
    return subprocess.run([*PIP, "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[dev]"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
