"""`python -m benchmarks.page`: see the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import benchmarks.page as about
from benchmarks.model_rows import ROOT
from benchmarks.page.measurements import MEASUREMENTS, Measurement, of_profile
from benchmarks.page.records import MixedRecords, PageRecord, Stamp, all_kept, keep, kept
from benchmarks.page.render import page, put, readme_table
from benchmarks.page.running import ChangedSources, measure, stamp

STORED = ROOT / "benchmarks" / "results" / "page"


def measured(
    rows: Sequence[Measurement], of: Stamp, folder: Path, *, again: bool = False,
    run: Callable[[Measurement, Stamp], PageRecord] = measure, say: Callable[[str], None] = print,
) -> list[PageRecord]:  # fmt: skip
    """The records of these rows: those that there are, and those that had to be measured; each is kept before the next begins."""
    found: list[PageRecord] = []
    for row in rows:
        if why := row.impossible():
            say(f"{row.name}: {why}")
            continue
        record = None if again else kept(folder, of, row.name, row.command)
        if record is None:
            record = run(row, of)
            keep(folder, record)
            told = ", ".join(f"{f.label} {f.value if f.value is None else round(f.value, 3)}{f.unit}" for f in record.figures)
            say(f"{row.name}: {told or record.why} [{record.seconds:.0f} s]")
        found.append(record)
    return found


def listed(rows: Sequence[Measurement], of: Stamp, folder: Path) -> list[str]:
    """What there is to measure."""
    lines = [f"{m.seconds:6.0f} s  {'kept' if kept(folder, of, m.name, m.command) else m.impossible() or 'to measure':<12} {m.name}"
             for m in rows]  # fmt: skip
    left = sum(m.seconds for m in rows if not m.impossible() and not kept(folder, of, m.name, m.command))
    return [*lines, f"{left / 60:.0f} minutes are left"]


def write(records: Sequence[PageRecord], document: Path, readme: Path) -> None:
    """Both documents, from records of one stamp, in the order of the measurements."""
    order = {m.name: i for i, m in enumerate(MEASUREMENTS)}
    known = sorted((r for r in records if r.name in order), key=lambda r: order[r.name])
    expected = [(m, m.impossible()) for m in {m.name: m for m in MEASUREMENTS}.values()]
    document.write_text(page(known, expected), encoding="utf-8")
    readme.write_text(put(readme.read_text(encoding="utf-8"), readme_table(known)), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, keep, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=about.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--profile", choices=["quick", "full"], default="quick")
    parser.add_argument("--only", default="", help="measurements whose names begin so; several with |")
    parser.add_argument("--again", action="store_true", help="measure what has a record, too")
    parser.add_argument("--dirty", action="store_true", help="measure sources that no commit has; the page says so")
    parser.add_argument("--list", action="store_true", help="what there is to measure")
    parser.add_argument("--write", action="store_true", help="write from the records that there are; measure nothing")
    parser.add_argument("--commit", help="with --write: records of another commit")
    parser.add_argument("--results", type=Path, default=STORED)
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    asked = parser.parse_args(arguments)
    begins = tuple(asked.only.split("|"))
    rows = [m for m in of_profile(asked.profile) if m.name.startswith(begins)]
    try:
        if asked.write:
            commit = asked.commit or stamp(dirty_allowed=True).commit
            write(all_kept(asked.results, commit), asked.document, asked.readme)
            return 0
        of = stamp(dirty_allowed=asked.dirty or asked.list)
        if asked.list:
            print("\n".join(listed(rows, of, asked.results)))
            return 0
        measured(rows, of, asked.results, again=asked.again, say=lambda text: print(text, flush=True))
        if not asked.only:
            write(all_kept(asked.results, of.commit), asked.document, asked.readme)
    except (ChangedSources, MixedRecords) as e:
        print(f"not measured: {e}" if isinstance(e, ChangedSources) else f"not written: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
