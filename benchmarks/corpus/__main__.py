"""Run the corpus, list it, or add up what was measured; see the package."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.corpus import rows
from benchmarks.corpus.entries import ENTRIES, Entry
from benchmarks.corpus.measure import PEER_NAMES, Table
from benchmarks.corpus.versions import VersionRow
from benchmarks.model_rows import measured_with
from benchmarks.peers import first_line
from benchmarks.side.turns import ROOT
from hotfuse.machine.fingerprint import fingerprint

DEFAULT = Path("build/corpus.jsonl")


def chosen(only: str, family: str) -> list[Entry]:
    """Entries whose name holds one of the texts, of one family."""
    texts = [t for t in only.split(",") if t]
    return [e for e in ENTRIES.values()
            if (not texts or any(t == e.name or (t.endswith("*") and t[:-1] in e.name) for t in texts))
            and (not family or e.family.startswith(family))]  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """What has no row yet (or a library was missing), one model after another; a row is on disk before the next begins."""
    begun = time.monotonic()
    have = set() if options.again else {rows.key_of(r) for r in rows.read(options.json) if r.status != "absent"}
    key = measured_with(fingerprint().to_dict())
    peers = [] if options.quick else [p for p in options.peers.split(",") if p]
    work = [(e, t) for t in options.threads for e in chosen(options.only, options.family) if (e.name, t) not in have]
    for i, (entry, threads) in enumerate(work):
        if options.budget and time.monotonic() - begun > options.budget:
            print(f"{len(work) - i} are left for another run", flush=True)
            break
        row = Table(entry, threads, peers, options.seconds, options.rounds, quick=options.quick,
                    behind_s=options.behind, settle_s=options.settle).measure()
        row.measured_with = key
        rows.append(options.json, row)
        print(row.line(), flush=True)
    return 0


def files(options: argparse.Namespace) -> int:
    """Make the ONNX files that are not kept yet, so that a timed run only reads them; what cannot be exported is told."""
    begun = time.monotonic()
    for entry in chosen(options.only, options.family):
        if options.budget and time.monotonic() - begun > options.budget:
            print("there is more to make", flush=True)
            break
        if entry.kind == "onnx":
            try:
                found = entry.load().path
                print(f"{entry.name:<34} {found.stat().st_size / 1e6 if found else 0:.1f} MB", flush=True)
            except Exception as e:  # an exporter may fail in any way
                print(f"{entry.name:<34} {first_line(e)}", flush=True)
    return 0


def versions(options: argparse.Namespace) -> int:
    """Another version of the source against this one, over eager; files over ONNX Runtime."""
    sources = {"before": options.before.resolve(), "after": ROOT / "src"}
    for entry in chosen(options.only, ""):
        row = VersionRow(entry, sources, options.threads)
        print(row.measure(options.seconds, options.behind, options.settle, options.rounds), flush=True)
    return 0


def main() -> int:
    """The five commands."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--only", default="", help="names, comma-separated; a text and a star: all that hold it")
    running.add_argument("--family", default="")
    running.add_argument("--threads", type=lambda text: [int(t) for t in text.split(",")], default=[1])
    running.add_argument("--seconds", type=float, default=20.0, help="of calls, before anybody is timed")
    running.add_argument("--behind", type=float, default=None, help="seconds: no calls later than so behind the last plan")
    running.add_argument("--settle", type=float, default=0.0, help="seconds without calls behind them, for plans to be finished")
    running.add_argument("--rounds", type=int, default=9)
    running.add_argument("--peers", default=",".join(PEER_NAMES))
    running.add_argument("--budget", type=float, default=0.0, help="no model begins after so many seconds")
    running.add_argument("--quick", action="store_true", help="nobody is timed: is compiled code there, and right?")
    running.add_argument("--again", action="store_true", help="what has a row is measured again")
    running.add_argument("--json", type=Path, default=DEFAULT)
    making = commands.add_parser("files")
    making.add_argument("--only", default="")
    making.add_argument("--family", default="")
    making.add_argument("--budget", type=float, default=0.0, help="none is begun after so many seconds")
    listing = commands.add_parser("list")
    listing.add_argument("--family", default="")
    adding = commands.add_parser("summary")
    adding.add_argument("json", type=Path, nargs="?", default=DEFAULT)
    adding.add_argument("--rows", action="store_true", help="every row, too")
    comparing = commands.add_parser("versions")
    comparing.add_argument("--before", type=Path, required=True, help="the `src` folder of another version")
    comparing.add_argument("--only", default="")
    comparing.add_argument("--threads", type=int, default=1)
    comparing.add_argument("--seconds", type=float, default=12.0)
    comparing.add_argument("--behind", type=float, default=3.0)
    comparing.add_argument("--settle", type=float, default=8.0)
    comparing.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.command == "run":
        return run(options)
    if options.command == "versions":
        return versions(options)
    if options.command == "files":
        return files(options)
    if options.command == "list":
        for e in chosen("", options.family):
            print(f"{e.name:<34} {e.family:<18} {e.kind:<6} {e.source}")
        print(f"{len(ENTRIES)} models", file=sys.stderr)
        return 0
    found = rows.read(options.json)
    if options.rows:
        print("\n".join(r.line() for r in found), end="\n\n")
    print("\n".join(rows.summary(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
