"""One caller that never pauses, from a cold start, with default settings: when are padded batches packed, and what do calls miss?

A BERT encoder with a masked mean (8 sequences padded to 128, a third of the tokens real), the module through `hotfuse.jit` and its
file through `InferenceSession`, called back to back. A line says when each plan began to serve, what a call took at the end in
turns with eager, and what part of the time calls missed until then, by what eager takes alone. Each has an empty cache and profile
store, so that no earlier process helps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import hotfuse
from benchmarks.inputs.padding import Encoder, Run, batch, exported, of_session
from hotfuse.base.events import Action

SHARE, BATCHES, ROUNDS = 0.33, 16, 5
BUSY_S, QUICK_S = 60.0, 30.0


def rows(quick: bool) -> list[dict[str, Any]]:
    """One line for the module and one for its file."""
    torch.manual_seed(0)
    model = Encoder(2 if quick else 12, 768).eval()
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        file = exported(model)
        for name in ("module", "file"):
            with tempfile.TemporaryDirectory() as place:
                settings = hotfuse.Settings(cache_dir=Path(place))
                served: Any = (
                    hotfuse.jit(model, settings=settings) if name == "module" else hotfuse.InferenceSession(file, settings=settings)
                )
                run = served if name == "module" else of_session(served)
                found.append({"": name, **busy(model, run, served, QUICK_S if quick else BUSY_S)})
                served.close()
                print(found[-1], flush=True)
    return found


def busy(model: Encoder, run: Run, served: Any, seconds: float) -> dict[str, Any]:
    """Call for so long, then in turns with eager."""
    batches = [batch(SHARE) for _ in range(BATCHES)]
    alone = statistics.median([_seconds(model, b) for b in batches[:4]][1:])
    took: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        took.append(_seconds(run, batches[len(took) % BATCHES]))
    decided = [d for d in served.explain(full=True).to_dict()["decisions"] if d["action"] == Action.DEPLOY.value]
    packed = [round(d["at"], 1) for d in decided if d["evidence"].get("tier") == 2]
    before = [s for s, at in zip(took, _ends(took), strict=True) if packed and at < packed[-1]]
    pairs = [(_seconds(model, b), _seconds(run, b)) for b in batches[:ROUNDS]]
    error = max(float((run(*b) - model(*b)).abs().max()) for b in batches[:2])
    missed = round(1 - alone * len(before) / sum(before), 2) if before else None
    eager, ours = (statistics.median(p[i] for p in pairs) for i in (0, 1))
    return {
        "captured s": next((round(d["at"], 1) for d in decided if d["evidence"].get("tier") == 0), None), "packed s": packed,
        "eager alone ms": round(1e3 * alone), "missed until then": missed,
        "eager ms": round(1e3 * eager), "ours ms": round(1e3 * ours), "over eager": round(eager / ours, 2), "error": f"{error:.1e}",
    }  # fmt: skip


def _seconds(run: Run, given: tuple[torch.Tensor, torch.Tensor]) -> float:
    begin = time.perf_counter()
    run(*given)
    return time.perf_counter() - begin


def _ends(took: list[float]) -> list[float]:
    """When each call was over."""
    return [sum(took[: i + 1]) for i in range(len(took))]
