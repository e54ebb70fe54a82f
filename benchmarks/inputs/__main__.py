"""Input-driven specialization, case by case.

    python -m benchmarks.inputs [padding ..] [--quick] [--threads N] [--json FILE] [--plots FOLDER]
    python -m benchmarks.inputs padding --contenders packed,file --shares 0.33,1

Each case is a module of this folder with `rows(quick)`: what it measured, as plain dicts, one a line of its table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import torch

import benchmarks.inputs as cases


def shown(rows: list[dict[str, Any]]) -> str:
    """A table for a reader."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([str(row.get(n, "")) for n in names] for row in rows)]
    wide = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, wide, strict=True)) for line in lines)


def main() -> int:
    known = [m.name for m in pkgutil.iter_modules(cases.__path__) if not m.name.startswith("_")]
    parser = argparse.ArgumentParser(description="Input-driven specialization, case by case.")
    parser.add_argument("case", nargs="*", help=f"of {', '.join(known)}; all of them without")
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contenders", help="of padding, besides eager, or strategies of flips, with commas; all of them without")
    parser.add_argument("--shares", help="of real tokens (padding), with commas")
    parser.add_argument("--json", type=Path, help="write every row there")
    parser.add_argument("--plots", type=Path, help="draw every case there, how many times as fast, line by line of its table")
    args = parser.parse_args()
    if unknown := sorted(set(args.case) - set(known)):
        parser.error(f"no case {unknown[0]!r}: {', '.join(known)}")
    chosen: dict[str, Any] = {}
    if args.contenders:
        chosen["contenders"] = args.contenders.split(",")
    if args.shares:
        chosen["shares"] = [float(s) for s in args.shares.split(",")]
    if chosen and args.case != ["padding"] and (args.case != ["flips"] or args.shares):
        parser.error("--contenders are of padding and flips, --shares of padding")
    torch.set_num_threads(args.threads)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in args.case or known:
        found[name] = importlib.import_module(f"benchmarks.inputs.{name}").rows(args.quick, **chosen)
        print(f"{name}\n{shown(found[name])}\n", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    if args.plots is not None:
        from benchmarks.curves import draw

        print("\n".join(str(p) for p in draw(found, args.plots)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
