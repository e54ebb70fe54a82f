"""What benchmarks printed, as figures. A benchmark says nothing of aims: those are of the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.model_rows import OURS, TIER0
from benchmarks.page.records import Figure

Reading = Callable[[Any], list[Figure]]
WARM_S = {"silero-vad": 0.3}
"""Asked of second processes of small models; of others a second."""
NAMES = {"ort": "ONNX Runtime", "openvino": "OpenVINO", "inductor": "Inductor", "eager": "eager"}


def document(text: str) -> Any:
    """The JSON document that a benchmark ends with: all of what it wrote, or its last line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        lines = text.strip().splitlines()
        if not lines:
            raise ValueError("it wrote nothing") from None
        return json.loads(lines[-1])


def whole_model(row: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.models`: over the best of the others, and what a call takes."""
    others: dict[str, float] = {n: r for n, r in row["ratios"].items() if n not in (OURS, TIER0)}
    if OURS not in row["timings"] or not others:
        raise ValueError(row["absent"].get(OURS, "nothing to compare with"))
    best: str = min(others, key=lambda n: others[n])
    low, high = row.get("spreads", {}).get(best, (None, None))
    absent = "; ".join(f"{NAMES.get(n, n)} absent" for n in row["absent"] if n in NAMES)
    return [Figure("over the best", others[best], "×", low, high, NAMES.get(best, best), at_least=0.97, note=absent),
            Figure("a call", row["timings"][OURS]["median_ms"], "ms")]  # fmt: skip


def corpus_rows(lines: Sequence[Mapping[str, Any]], at_least: float) -> list[Figure]:
    """`benchmarks.corpus run`: each model over the best peer."""
    found: list[Figure] = []
    for row in lines:
        others: dict[str, float] = {n: r for n, r in row["ratios"].items() if n != OURS}
        if row["status"] != "ok" or not others:
            why = row["why"] or row["status"]
            found.append(Figure(row["model"], None, "×", against="the best peer", at_least=at_least, note=why))
            continue
        best: str = min(others, key=lambda n: others[n])
        served = "" if row["tier"] else "no compiled code within the traffic"
        found.append(Figure(row["model"], others[best], "×", against=NAMES.get(best, best), at_least=at_least, note=served))
    return found


def jsonl(text: str) -> list[Mapping[str, Any]]:
    """One document a line."""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def small_modules(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.never_worse --only small`: 0.95 of eager, or two microseconds more."""
    found: list[Figure] = []
    for name, row in doc.items():
        if name.startswith("small: "):
            fine = row["added_us"] <= 2
            note = f"{row['added_us']:+.1f} us, {row['serves']}"
            found.append(Figure(name.removeprefix("small: ").partition(",")[0], row["over_eager"], "×", against="eager",
                                at_least=None if fine else 0.95, note=note))  # fmt: skip
    return found


def saturated(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.saturated --json`."""
    found: list[Figure] = []
    for name, row in doc.items():
        found += [
            Figure(f"{name}: requests a second at the end", row["over_peer"], "×", against="the peer", at_least=1.2),
            Figure(f"{name}: until the plan, over the same on idle cores", row["slower"], "times", at_most=3.0),
            Figure(f"{name}: requests lost until then", 100 * row["lost"], "%", at_most=10.0)]  # fmt: skip
    return found


def warm_start(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.warm --parts start --json`."""
    found: list[Figure] = []
    for name, row in doc["start"].items():
        found += [Figure(f"{name}: first process, until compiled code answers", row["cold_s"], "s", at_most=15.0),
                  Figure(f"{name}: second process", row["warm_s"], "s", at_most=WARM_S.get(name, 1.0))]  # fmt: skip
        if row.get("first_seconds") is not None:
            found.append(Figure(f"{name}: first seconds of a later process", row["first_seconds"], "×", against="ONNX Runtime",
                                at_least=1.3))  # fmt: skip
            found.append(Figure(f"{name}: the same with sizes that nobody had before", row["first_seconds_new_sizes"], "×",
                                against="ONNX Runtime"))  # fmt: skip
    return found


def first_seconds(doc: Mapping[str, float]) -> list[Figure]:
    """`benchmarks.start --json`: nothing kept by earlier processes."""
    return [Figure(f"{n}: calls in the first seconds", r, "×", against="ONNX Runtime", at_least=0.9) for n, r in doc.items()]


def recipes(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.programs recipes`."""
    rows: Mapping[str, Mapping[str, Any]] = doc["recipes"]["recipes"]
    found = [Figure(n.replace("_", " "), r.get("times_as_fast"), "×", against="the same program",
                    note=f"not run: {r['not_run']}" if "not_run" in r else "" if r["same"] else "OTHER RESULTS")
             for n, r in rows.items()]  # fmt: skip
    return [*found, Figure("all of them, geomean", doc["recipes"]["geomean"], "×", against="the same program", at_least=1.3)]


def gradients(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.programs gradients`."""
    return [Figure("BERT-base, gradients enabled", doc["gradients"]["over_eager"], "×", against="eager", at_least=1.3)]


def compile_backend(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.programs compile`."""
    over, asked = doc["compile"]["over_inductor"], (1.0, 5.0, 3.0)
    return [Figure(f'`torch.compile(backend="hotfuse")`: {n}', r, "×", against="Inductor", at_least=a)
            for (n, r), a in zip(over.items(), asked, strict=True)]  # fmt: skip


def regional(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.programs regional`."""
    found = doc["regional"]
    return [Figure(f"12 blocks compiled one by one, over {n}", found[f"over_{n}"], "×", against=n, at_least=1.3,
                   note="OTHER RESULTS" if found["wrong"] else "") for n in ("eager", "inductor")]  # fmt: skip


def padding(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.inputs padding --json`."""
    found: list[Figure] = []
    for row in doc["padding"]:
        aim = 3.3 if row["real"] == "33%" else 1.0 if row["real"] == "100%" else None
        behind = f", behind {row['behind']}" if "behind" in row else ""
        found += [Figure(f"{row['real']} real tokens{behind}{', as a file' if n == 'file' else ''}", row[f"{n} over eager"], "×",
                         against="eager", at_least=aim) for n in ("packed", "file") if f"{n} over eager" in row]  # fmt: skip
    return found


def dispatch(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.dispatch --json`."""
    return [Figure("guards, 10 inputs", doc["dispatch_us"], "us", at_most=2.0),
            Figure("a call beyond its kernels, worst model", doc["worst_beyond_us"], "us", at_most=doc["limit_us"])]  # fmt: skip


def watching(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.watching --json`."""
    return [Figure("watching and the audit, the worst model", 100 * doc["watching_overhead"], "%", at_most=1.0)]


def server(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.server`: while the first plan is made, and behind that."""
    return [Figure("first half, its first plan is made", doc["over_own_first_half"], "×", against="the own code", at_least=1.0),
            Figure("second half", doc["over_own_second_half"], "×", against="the own code", at_least=1.0)]  # fmt: skip


def decode(lines: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """`benchmarks.decode --json`."""
    found: list[Figure] = []
    for row in lines:
        label = f"{row['size']} M parameters, {row['dtype']}"
        note = "the same tokens" if not row["differ"] else f"{row['differ']} tokens differ"
        found += [Figure(label, row["ms"]["eager"] / row["ms"]["hotfuse"], "×", against="eager", at_least=1.3, note=note),
                  Figure(f"{label}, of the memory roof", 100 * row["roof_ms"] / row["ms"]["hotfuse"], "%")]  # fmt: skip
    return found


def data_paths(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.data_paths --json`."""
    return [Figure(n, r["over_eager"], "×", against="eager", at_least=1.0) for n, r in doc.items()]


def memory(doc: Mapping[str, Any]) -> list[Figure]:
    """`benchmarks.memory --json`."""
    return [Figure(f"{n}: grown, over ONNX Runtime's {r['ort_mb']:.0f} MB", r["hotfuse_mb"] / r["ort_mb"], "times", at_most=2.0)
            for n, r in doc.items()]  # fmt: skip


def adapt(doc: Mapping[str, float]) -> list[Figure]:
    """`benchmarks.adapt --json`: its plain numbers, as they are called there."""
    return [Figure(name.replace("_", " "), value, "") for name, value in doc.items()]


def by_threads(doc: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """`benchmarks.threads --json`."""
    return [Figure(f"{r['model']}, {r['threads']} threads", r.get("ratio"), "×", against="the best of eager and ONNX Runtime",
                   at_least=1.0) for r in doc]  # fmt: skip


def on_devices(doc: Mapping[str, float]) -> list[Figure]:
    """`benchmarks.cuda --json`."""
    return [Figure(name, ratio, "×", against="the best of torch", at_least=0.97) for name, ratio in doc.items()]
