"""docs/benchmarks.md from records that this test makes up: their text, that they are of one commit, and that nothing is measured
twice. Nothing is timed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import bytecode, curves
from benchmarks.page import readings
from benchmarks.page.__main__ import main, measured, write
from benchmarks.page.measurements import MEASUREMENTS, SECTIONS, Measurement, of_profile
from benchmarks.page.records import Figure, MixedRecords, PageRecord, Stamp, all_kept, keep, kept, one_stamp, parsed
from benchmarks.page.render import BEGIN, END, page, put, readme_table
from benchmarks.page.running import ChangedSources, measure, stamp

VERSIONS = {"Python": "3.12.1", "torch": "2.13.0"}
OF = Stamp("0123456789abcdef", dirty=False, machine="a processor, 2 cores", cores=2, versions=VERSIONS)


def record(name: str, *figures: Figure, threads: int = 1, of: Stamp = OF) -> PageRecord:
    command = f"python -m benchmarks.{name.partition('/')[0]} --json {{out}}"
    return PageRecord(name, command, of, threads, "2026-01-02", 12.0, figures=figures)


def model(name: str, ratio: Figure, ms: float, threads: int = 1) -> PageRecord:
    return record(f"models/{name}", replace(ratio, at_least=0.97), Figure("a call", ms, "ms"), threads=threads)


RECORDS = [
    model("bert", Figure("over the best", 1.25, low=1.2, high=1.3, against="OpenVINO"), 80.5),
    model("tiny", Figure("over the best", 0.9, low=0.85, high=0.95, against="ONNX Runtime"), 0.25),
    model("bert, 2 threads", Figure("over the best", 1.5, against="eager"), 44.0, threads=2),
    record("start/second processes", Figure("bert: second process", 1.4, "s", at_most=1.0),
           Figure("tiny: second process", None, "s", at_most=0.3)),
    replace(record("memory/a text recognizer"), outcome="late", why="not done after 240 s"),
]  # fmt: skip
RECIPES = record("programs/recipes", *(Figure(label, ratio, against="the same program")
                                       for label, ratio in (("text", 1.5), ("speech", 0.8), ("all", 1.2))))  # fmt: skip
WHOLE = '''\
# Benchmarks

Written by `python -m benchmarks.page`; edits are lost. Every figure is of one commit, one machine and the command beside
it; none is a promise for another machine. Over 1 means that Hotfuse is faster. How to read them, and causes of losses:
[performance-notes.md](performance-notes.md).

Commit `0123456789ab`, 2026-01-02; a processor, 2 cores; Python 3.12.1, torch 2.13.0.

## In short

- 1 thread: 1.06× the best of the others, geomean of 2 models, **asked 1.6**.
- 2 threads: 1.50× the best of the others, geomean of 1 models, **asked 1.6**.
- 3 comparisons: 2 won, 1 lost.
- Lost: tiny, over the best: 0.90× (0.85–0.95) ONNX Runtime.
- Missed: second processes, bert: second process: 1.4 s, asked ≤ 1 s.
- Missed: second processes, tiny: second process: none, asked ≤ 0.3 s.
- Failed: a text recognizer: not done after 240 s.

## Whole models in steady state

{models}

| model | 1 thread | a call | 2 threads | a call |
| --- | --- | --- | --- | --- |
| bert | 1.25× (1.20–1.30) OpenVINO | 80.5 ms | 1.50× eager | 44 ms |
| tiny | **0.90× (0.85–0.95) ONNX Runtime** | 0.25 ms | – |  |

`python -m benchmarks.models --json out.json`, and so on.

## The first seconds, and second processes

{start}

| what | threads | measured | over | asked | |
| --- | --- | --- | --- | --- | --- |
| second processes: bert: second process | 1 | **1.4 s** |  | ≤ 1 s |  |
| second processes: tiny: second process | 1 | **none** |  | ≤ 0.3 s |  |

- second processes: `python -m benchmarks.start --json out.json`

## Memory

{memory}

| what | threads | measured | over | asked | |
| --- | --- | --- | --- | --- | --- |
| a text recognizer | 1 | **late** | | | not done after 240 s |

- a text recognizer: `python -m benchmarks.memory --json out.json`

## Not measured

- machines/threads: needs 16 cores, this machine has 2 (`python -m benchmarks.threads --all`).
- Not run (`python -m benchmarks.page --profile full`): load/sessions.
'''
README = '''\
Commit `0123456789ab`; a processor, 2 cores; torch 2.13.0; fp32; over the best of the others that can run the model, in turns.

| model | 1 thread | 2 threads |
| --- | --- | --- |
| bert | 1.25× OpenVINO | 1.50× eager |
| tiny | **0.90× ONNX Runtime** | – |
| geomean | 1.06× | 1.50× |

| measured | over | faster | slower, or misses its aim |
| --- | --- | --- | --- |
| second processes |  |  | **bert: second process 1.4 s; tiny: second process none** |
| recipes | the same program | text 1.50×; all 1.20× | **speech 0.80×** |

All figures, and what is asked of them: [docs/benchmarks.md](docs/benchmarks.md).
'''


def row(name: str, *arguments: str) -> Measurement:
    return Measurement(name, arguments or ("nothing",), readings.dispatch, 10)


def test_the_whole_page() -> None:
    about = {s.name: s.about for s in SECTIONS}
    expected = [(row("models/bert"), ""), (row("machines/threads", "threads", "--all"), "needs 16 cores, this machine has 2"),
                (row("load/sessions"), "")]  # fmt: skip
    assert page(RECORDS, expected) == WHOLE.format(models=about["models"], start=about["start"], memory=about["memory"])


def test_the_table_of_the_readme() -> None:
    assert readme_table([*RECORDS, RECIPES]) == README
    assert "| measured |" not in readme_table(RECORDS[:3])
    assert put(f"a\n{BEGIN}\nold\n{END}\nb\n", "new\n") == f"a\n{BEGIN}\nnew\n{END}\nb\n"
    with pytest.raises(ValueError, match="page:begin"):
        put("no markers", "new\n")


@pytest.mark.parametrize("other", [replace(OF, commit="fedcba"), replace(OF, dirty=True), replace(OF, machine="another")])
def test_records_of_two_commits_machines_or_states_are_refused(other: Stamp) -> None:
    with pytest.raises(MixedRecords, match="two"):
        page([*RECORDS, record("load/sessions", of=other)], [])
    with pytest.raises(MixedRecords):
        readme_table([*RECORDS, record("load/sessions", of=other)])
    with pytest.raises(MixedRecords):
        one_stamp([])


def test_changed_sources_are_told_on_the_page() -> None:
    changed = [replace(r, stamp=replace(OF, dirty=True)) for r in RECORDS]
    assert "with changes that no commit has" in page(changed, []) and "with changes;" in readme_table(changed)


def test_what_has_a_record_is_not_measured_again(tmp_path: Path) -> None:
    ran: list[str] = []

    def run(what: Measurement, of: Stamp) -> PageRecord:
        ran.append(what.name)
        late = what.name == "small/late"
        return PageRecord(what.name, what.command, of, 1, "2026-01-02", 1.0, "late" if late else "ok", figures=(Figure("a", 2.0),))

    def go(rows: list[Measurement], of: Stamp = OF, *, again: bool = False) -> list[str]:
        ran.clear()
        assert len(measured(rows, of, tmp_path, again=again, run=run, say=lambda _: None)) == len(rows)
        return list(ran)

    rows = [row("small/one"), row("small/two"), row("small/late")]
    assert go(rows[:1]) == ["small/one"]
    assert go(rows) == ["small/two", "small/late"], "the first one is kept"
    assert go(rows) == ["small/late"], "what was late is tried again"
    assert go([row("small/one", "nothing", "--more")]) == ["small/one"], "another command is another measurement"
    assert go([rows[1]], again=True) == ["small/two"]
    assert go([rows[1]], replace(OF, commit="fedcba")) == ["small/two"], "another commit begins anew"
    assert go([rows[1]], replace(OF, versions={"torch": "2.14.0"})) == ["small/two"], "so does another torch"
    assert {r.stamp.commit for r in all_kept(tmp_path, OF.commit)} == {OF.commit}
    assert go([replace(row("small/sixteen"), cores=1 << 20)][:0]) == []
    assert measured([replace(row("small/many"), cores=1 << 20)], OF, tmp_path, run=run, say=lambda _: None) == []


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    for r in RECORDS:
        keep(tmp_path, r)
        assert parsed(json.dumps(asdict(r))) == r
    assert sorted(r.name for r in all_kept(tmp_path, OF.commit)) == sorted(r.name for r in RECORDS)
    assert kept(tmp_path, OF, RECORDS[0].name, RECORDS[0].command) == RECORDS[0]
    assert kept(tmp_path, OF, RECORDS[-1].name, RECORDS[-1].command) is None


def test_a_tree_with_changes_is_refused(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments], check=True)

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("a = 1\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    clean = stamp(dirty_allowed=False, root=tmp_path)
    assert len(clean.commit) == 40 and not clean.dirty
    (tmp_path / "page.md").write_text("what is measured does not depend on it\n")
    assert stamp(dirty_allowed=False, root=tmp_path) == clean
    (tmp_path / "src" / "b.py").write_text("b = 1\n")
    with pytest.raises(ChangedSources, match=r"1 changed files, .*src/b.py"):
        stamp(dirty_allowed=False, root=tmp_path)
    assert stamp(dirty_allowed=True, root=tmp_path) == replace(clean, dirty=True)


def test_a_measurement_that_fails_or_is_late_is_a_record_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = measure(row("small/none", "no_such_benchmark"), OF)
    assert failed.outcome == "failed" and "no_such_benchmark" in failed.why and not failed.figures
    monkeypatch.setattr(Measurement, "budget_s", property(lambda self: 0.05))
    late = measure(row("small/dispatch", "dispatch"), OF)
    assert (late.outcome, late.why) == ("late", "not done after 0.05 s")


def test_both_documents_are_written_from_what_there_is(tmp_path: Path) -> None:
    readme, document = tmp_path / "README.md", tmp_path / "benchmarks.md"
    readme.write_text(f"# A\n{BEGIN}\nold\n{END}\nrest\n")
    for r in (*RECORDS[:-1], record("gone/measurement", Figure("a", 1.0))):
        keep(tmp_path / "results", replace(r, name=r.name.replace("models/bert", "models/bert-base")))
    write(all_kept(tmp_path / "results", OF.commit), document, readme)
    assert "| bert-base | 1.25×" in document.read_text() and "gone" not in document.read_text()
    assert "old" not in readme.read_text() and "| bert-base | 1.25× OpenVINO |" in readme.read_text()
    where = ["--results", str(tmp_path / "results"), "--document", str(document), "--readme", str(readme)]
    assert main(["--write", "--commit", "nothing", *where]) == 1


def test_rows_have_sections_names_of_their_own_and_fit_the_quick_profile() -> None:
    assert {m.section for m in MEASUREMENTS} <= {s.name for s in SECTIONS}
    for profile in ("quick", "full"):
        names = [m.name for m in of_profile(profile)]
        assert len(set(names)) == len(names)
    assert sum(m.seconds for m in of_profile("quick")) <= 25 * 60


def test_documents_of_benchmarks_become_figures() -> None:
    models = {"ratios": {"hotfuse": 1.0, "tier 0": 1.4, "ort": 1.3, "eager": 2.0}, "spreads": {"ort": [1.2, 1.4]},
              "absent": {"openvino": "no"}, "timings": {"hotfuse": {"median_ms": 3.5}}}  # fmt: skip
    best, call = readings.whole_model(models)
    assert (best.value, best.low, best.high, best.against, best.note) == (1.3, 1.2, 1.4, "ONNX Runtime", "OpenVINO absent")
    assert (call.value, call.unit) == (3.5, "ms")
    with pytest.raises(ValueError, match="ended with status 3"):
        readings.whole_model({"ratios": {}, "timings": {}, "absent": {"hotfuse": "the process ended with status 3"}})
    small = {"benchmark": "x", "small: relu, threads 1": {"over_eager": 0.8, "added_us": 1.0, "serves": "own code"},
             "small: big, threads 1": {"over_eager": 0.8, "added_us": 5.0, "serves": "tier 1"}}  # fmt: skip
    assert [(f.label, f.missed) for f in readings.small_modules(small)] == [("relu", False), ("big", True)]
    load = {"rec": {"over_peer": 1.3, "slower": None, "lost": 0.2}}
    assert [f.missed for f in readings.saturated(load)] == [False, True, True]
    lines = '{"a": 1}\ntext\n{"b": 2}\n'
    assert readings.document(lines) == {"b": 2} and readings.document('{\n "a": 1\n}') == {"a": 1}
    with pytest.raises(ValueError, match="wrote nothing"):
        readings.document("")


def test_documents_of_programs_and_inputs_become_figures() -> None:
    rows = {"denoising": {"same": True, "times_as_fast": 2.0}, "detection": {"same": False, "times_as_fast": 1.5},
            "timm": {"not_run": "no timm here"}}  # fmt: skip
    found = readings.recipes({"recipes": {"recipes": rows, "all_the_same": False, "geomean": 1.7}})
    assert [(f.label, f.value, f.note) for f in found] == [
        ("denoising", 2.0, ""), ("detection", 1.5, "OTHER RESULTS"), ("timm", None, "not run: no timm here"),
        ("all of them, geomean", 1.7, "")]  # fmt: skip
    assert [f.missed for f in found] == [False, False, False, False]
    (over,) = readings.gradients({"gradients": {"over_eager": 1.2, "ms": {}, "tiers": {}}})
    assert over.missed and over.value == 1.2
    shares = [{"real": "33%", "packed over eager": 3.5, "error": "1e-6"}, {"real": "100%", "packed over eager": 0.9},
              {"real": "100%", "behind": "such batches", "packed over eager": 1.1}]  # fmt: skip
    padded = readings.padding({"padding": shares})
    assert [(f.value, f.missed) for f in padded] == [(3.5, False), (0.9, True), (1.1, False)]
    assert [f.label for f in padded][1:] == ["100% real tokens", "100% real tokens, behind such batches"]
    warm = readings.warm_start({"start": {"silero-vad": {"cold_s": 5.0, "warm_s": 0.5, "first_seconds": None}}})
    later = {"cold_s": 5.0, "warm_s": 0.3, "first_seconds": 1.4, "first_seconds_new_sizes": 0.5}
    known = readings.warm_start({"start": {"silero-vad": later}})
    assert [(f.value, f.missed) for f in known[2:]] == [(1.4, False), (0.5, False)]
    assert [f.missed for f in warm] == [False, True]
    (held,) = readings.memory({"rec": {"ort_mb": 100.0, "hotfuse_mb": 180.0}})
    assert (held.value, held.missed) == (1.8, False)
    corpus = [{"model": "a", "ratios": {"hotfuse": 1.0, "ort": 0.9}, "status": "ok", "why": "", "tier": 0},
              {"model": "b", "ratios": {}, "status": "late", "why": "no answer", "tier": None}]  # fmt: skip
    lost, absent = readings.corpus_rows(corpus, at_least=0.95)
    assert lost.missed and lost.note == "no compiled code within the traffic"
    assert absent.missed and absent.value is None and absent.note == "no answer"


def test_measurements_find_bytecode_as_an_installed_package_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the environment forbids writing it, and where a source has changed since."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("x = 1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(bytecode.hotfuse, "__file__", str(package / "__init__.py"))
    bytecode.as_installed()
    compiled = Path(importlib.util.cache_from_source(str(package / "part.py")))
    before = compiled.read_bytes()
    (package / "part.py").write_text("x = 1000")
    os.utime(package / "part.py", (1, 1))
    bytecode.as_installed()
    assert compiled.read_bytes() != before


def test_every_case_of_inputs_is_a_picture(tmp_path: Path) -> None:
    padding = [{"real": "33%", "eager": 3.0, "over eager": 3.5, "error": "1e-6"},
               {"real": "100%", "over eager": 0.9, "over peer": 1.1}]  # fmt: skip
    labels, ratios = curves.lines(padding)
    assert labels == ["33%", "100%"] and ratios == {"over eager": [3.5, 0.9], "over peer": [None, 1.1]}
    (picture,) = curves.draw({"padding": padding, "busy": [{"served": "module", "ms": 3.0}]}, tmp_path / "pictures")
    assert picture.name == "inputs-padding.svg" and "over peer" in picture.read_text()
