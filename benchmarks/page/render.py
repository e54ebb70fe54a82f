"""The page and README's table, as text made of records of one commit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.page.measurements import SECTIONS, Measurement, Section
from benchmarks.page.records import Figure, PageRecord, one_stamp

BEGIN, END = "<!-- page:begin -->", "<!-- page:end -->"
GEOMEAN_AIM = 1.6


def page(records: Sequence[PageRecord], expected: Sequence[tuple[Measurement, str]]) -> str:
    """All of docs/benchmarks.md. `expected` are the measurements that there are, each with why it cannot be had here, if so."""
    parts = [*_head(records), *_short(records)]
    for section in SECTIONS:
        parts += _section(section, [r for r in records if r.name.partition("/")[0] == section.name])
    return "\n".join([*parts, *_missing(records, expected)]).rstrip() + "\n"


def _head(records: Sequence[PageRecord]) -> list[str]:
    of = one_stamp(records)
    versions = ", ".join(f"{n} {v}" for n, v in of.versions.items())
    dates = sorted({r.date for r in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    changed = " **with changes that no commit has**" if of.dirty else ""
    return [
        "# Benchmarks", "",
        "Written by `python -m benchmarks.page`; edits are lost. Every figure is of one commit, one machine and the command beside",
        "it; none is a promise for another machine. Over 1 means that Hotfuse is faster. How to read them, and causes of losses:",
        "[performance-notes.md](performance-notes.md).", "",
        f"Commit `{of.commit[:12]}`{changed}, {when}; {of.machine}; {versions}.", "",
    ]  # fmt: skip


def _short(records: Sequence[PageRecord]) -> list[str]:
    figures = [(r, f) for r in records for f in r.figures]
    ratios = [f for _, f in figures if f.is_ratio and f.value is not None]
    lost = [(r, f) for r, f in figures if f.lost]
    missed = [(r, f) for r, f in figures if f.missed]
    out = ["## In short", ""]
    for threads in sorted({r.threads for r in records if r.name.startswith("models/") and r.figures}):
        models = [r for r in records if r.name.startswith("models/") and r.threads == threads and r.figures]
        values = [v for r in models if (v := r.figures[0].value) is not None]
        verdict = "" if geomean(values) >= GEOMEAN_AIM else f", **asked {GEOMEAN_AIM:g}**"
        mean = f"{geomean(values):.2f}× the best of the others"
        out.append(f"- {_threads(threads)}: {mean}, geomean of {len(values)} models{verdict}.")
    out.append(f"- {len(ratios)} comparisons: {len(ratios) - len(lost)} won, {len(lost)} lost.")
    out += [f"- Lost: {_title(r)}, {f.label}: {_value(f)} {f.against}." for r, f in lost]
    out += [f"- Missed: {_title(r)}, {f.label}: {_value(f)}, asked {_aim(f)}." for r, f in missed if not f.lost]
    out += [f"- Failed: {_title(r)}: {r.why}." for r in records if r.outcome != "ok"]
    return [*out, ""]


def _section(section: Section, records: Sequence[PageRecord]) -> list[str]:
    if not records:
        return []
    out = [f"## {section.title}", "", section.about, ""]
    if section.name == "models":
        return [*out, *_models(records), "", *_commands(records), ""]
    out += ["| what | threads | measured | over | asked | |", "| --- | --- | --- | --- | --- | --- |"]
    for r in records:
        for f in r.figures:
            value = f"**{_value(f)}**" if f.missed or f.lost else _value(f)
            out.append(f"| {_title(r)}: {f.label} | {r.threads} | {value} | {f.against} | {_aim(f)} | {f.note} |")
        if r.outcome != "ok":
            out.append(f"| {_title(r)} | {r.threads} | **{r.outcome}** | | | {r.why} |")
    return [*out, "", *_commands(records), ""]


def _models(records: Sequence[PageRecord]) -> list[str]:
    threads = sorted({r.threads for r in records})
    by = {(_model(r), r.threads): r for r in records}
    out = [f"| model | {' | '.join(f'{_threads(t)} | a call' for t in threads)} |", "| --- " * (1 + 2 * len(threads)) + "|"]
    for name in dict.fromkeys(_model(r) for r in records):
        out.append(f"| {name} | {' | '.join(' | '.join(_pair(by.get((name, t)))) for t in threads)} |")
    return out


def _model(r: PageRecord) -> str:
    return _title(r).partition(",")[0]


def _pair(record: PageRecord | None) -> tuple[str, str]:
    """A model's ratio and its time."""
    if record is None:
        return "–", ""
    if record.outcome != "ok" or len(record.figures) < 2:
        return f"**{record.outcome}**: {record.why}", ""
    ratio, call = record.figures[:2]
    text = f"{_value(ratio)} {ratio.against}"
    return (f"**{text}**" if ratio.lost else text), _value(call)


def _commands(records: Sequence[PageRecord]) -> list[str]:
    """How each was measured: one line where they differ by the model alone."""
    if records[0].name.startswith("models/"):
        return [f"`{_command(records[0])}`, and so on."]
    return [f"- {_title(r)}: `{_command(r)}`" for r in records]


def _command(r: PageRecord) -> str:
    """As a reader would type it: files that the page gave it have names."""
    return r.command.replace("{out}", "out.json").replace("{folder}", "DIR")


def _missing(records: Sequence[PageRecord], expected: Sequence[tuple[Measurement, str]]) -> list[str]:
    have = {r.name for r in records}
    rows = [(m, why) for m, why in expected if m.name not in have]
    if not rows:
        return []
    out = ["## Not measured", ""]
    impossible = [(m, why) for m, why in rows if why]
    out += [f"- {m.name}: {why} (`{m.command}`)." for m, why in impossible]
    if rest := [m.name for m, why in rows if not why]:
        out.append(f"- Not run (`python -m benchmarks.page --profile full`): {'; '.join(rest)}.")
    return out


def readme_table(records: Sequence[PageRecord]) -> str:
    """What stands between README's markers: models at each number of threads, and a row for each of the other measurements."""
    of = one_stamp(records)
    models = [r for r in records if r.name.startswith("models/") and r.outcome == "ok"]
    threads = sorted({r.threads for r in models})
    by = {(_model(r), r.threads): r for r in models}
    head = f"| model | {' | '.join(map(_threads, threads))} |"
    rows = [f"| {n} | {' | '.join(_short_ratio(by.get((n, t))) for t in threads)} |" for n in dict.fromkeys(map(_model, models))]
    means = ["geomean", *(f"{geomean([r.figures[0].value or math.nan for r in models if r.threads == t]):.2f}×" for t in threads)]
    changed = " with changes" if of.dirty else ""
    lines = [f"Commit `{of.commit[:12]}`{changed}; {of.machine}; torch {of.versions.get('torch', '?')}; fp32; over the best of the "
             "others that can run the model, in turns.", "", head, "| --- " * (1 + len(threads)) + "|", *rows,
             f"| {' | '.join(means)} |", "", *_beside_models(records),
             "All figures, and what is asked of them: [docs/benchmarks.md](docs/benchmarks.md)."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _beside_models(records: Sequence[PageRecord]) -> list[str]:
    """A row for each measurement that is not of a model: what is won, and what is lost or misses its aim."""
    rows: list[str] = []
    for r in (r for r in records if not r.name.startswith("models/")):
        bad = [f for f in r.figures if f.lost or f.missed]
        won = [f for f in r.figures if f.is_ratio and f.value is not None and f not in bad]
        if won or bad:
            over = ", ".join(dict.fromkeys(f.against for f in r.figures if f.against and f in [*won, *bad]))
            lost = f"**{_phrases(bad)}**" if bad else ""
            rows.append(f"| {_title(r)} | {over} | {_phrases(won)} | {lost} |")
    return ["| measured | over | faster | slower, or misses its aim |", "| --- " * 4 + "|", *rows, ""] if rows else []


def _phrases(figures: Sequence[Figure]) -> str:
    return "; ".join(f"{f.label} {_value(f)}" for f in figures)


def _short_ratio(record: PageRecord | None) -> str:
    if record is None:
        return "–"
    f = record.figures[0]
    text = f"{f.value:.2f}× {f.against}" if f.value is not None else "–"
    return f"**{text}**" if f.lost else text


def put(text: str, table: str) -> str:
    """A document with what stands between the markers replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the file has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def geomean(values: Iterable[float]) -> float:
    """Of ratios; not a number where there are none."""
    several = [v for v in values if v > 0]
    return math.exp(sum(map(math.log, several)) / len(several)) if several else math.nan


def _title(r: PageRecord) -> str:
    return r.name.partition("/")[2]


def _threads(n: int) -> str:
    return f"{n} thread{'s' if n > 1 else ''}"


def _value(f: Figure) -> str:
    if f.value is None:
        return "none"
    spread = f" ({f.low:.2f}–{f.high:.2f})" if f.low is not None and f.high is not None else ""
    if f.unit == "×":
        return f"{f.value:.2f}×{spread}"
    digits = f"{f.value:.3g}" if abs(f.value) < 1000 else f"{f.value:.0f}"
    return f"{digits}{'' if f.unit in ('%', '') else ' '}{f.unit}{spread}"


def _aim(f: Figure) -> str:
    unit = "×" if f.unit == "×" else f" {f.unit}" if f.unit not in ("", "%") else f.unit
    bounds = (("≥", f.at_least), ("≤", f.at_most))
    return " and ".join(f"{sign} {bound:g}{unit}" for sign, bound in bounds if bound is not None)
