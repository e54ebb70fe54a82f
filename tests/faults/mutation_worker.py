"""Runs damaged models one after another, in a process that a crash or a hang may cost.

    python -m tests.faults.mutation_worker {hotfuse|captured|onnxruntime} FOLDER FIRST LAST

Case k is FOLDER/k.onnx. A line is printed before and after each case, so that the parent knows which one to blame;
outputs are left in FOLDER/k.<library>.npz.
"""

from __future__ import annotations

import json
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.make_models import small_feed

MEMORY = 8 << 30
"""Address space a worker may have: an allocation that follows an absurd size must fail, not starve the machine."""

_NUMPY = {
    "tensor(float)": "f4",
    "tensor(int64)": "i8",
    "tensor(double)": "f8",
    "tensor(bool)": "?",
    "tensor(int32)": "i4",
}


def feed_for(inputs: list[Any]) -> dict[str, Any]:
    """The usual feed, cut to what the damaged model declares where that is sensible."""
    base = small_feed()["x"]
    feed: dict[str, Any] = {}
    for arg in inputs:
        dims = [d if isinstance(d, int) else n for d, n in zip(arg.shape, base.shape, strict=False)]
        if arg.type == "tensor(float)" and (arg.shape == [] or dims == list(base.shape)):
            feed[arg.name] = base
        else:
            sizes = [d if isinstance(d, int) and 0 <= d <= 8 else 2 for d in arg.shape]
            feed[arg.name] = np.resize(base, sizes).astype(_NUMPY.get(arg.type, "f4"))
    return feed


def hotfuse(path: Path) -> dict[str, Any]:
    """Load, describe and run with Hotfuse; anything but our own errors is reported as a failure."""
    from hotfuse.base.errors import HotfuseError, InternalError
    from hotfuse.session import InferenceSession

    try:
        session = InferenceSession(path)
        session.get_outputs()
        outputs = session.run(None, feed_for(session.get_inputs()))
    except InternalError:
        return {"outcome": "bug", "text": traceback.format_exc()}
    except HotfuseError as e:
        causes, at = [], e.__cause__
        while at is not None:
            causes.append(type(at).__name__)
            at = at.__cause__
        return {"outcome": "refused", "text": str(e), "kind": type(e).__name__, "causes": causes}
    except Exception:
        return {"outcome": "bug", "text": traceback.format_exc()}
    _save(path.with_suffix(".hotfuse.npz"), outputs)
    return {"outcome": "ran", "text": ""}


def captured(path: Path) -> dict[str, Any]:
    """A model that runs, again with a capture: the graph must give what the model's own code gave."""
    from hotfuse.base.settings import Settings
    from hotfuse.session import InferenceSession

    session = InferenceSession(path, settings=Settings(capture="inline"))
    feed = feed_for(session.get_inputs())
    own, graph = session.run(None, feed), session.run(None, feed)
    stats = session.stats()
    bad = [i for i, (a, b) in enumerate(zip(own, graph, strict=True)) if not _same(a, b)]
    if bad or stats["deopts"] or stats["rejected"]:
        return {"outcome": "bug", "text": f"outputs {bad} differ\n{session.explain(full=True)}"}
    return {"outcome": "ran", "text": "", "in_graph": stats["graph_calls"]}


def _same(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) if a.dtype.kind == "f" else np.array_equal(a, b)


def onnxruntime(path: Path) -> dict[str, Any]:
    """The same with ONNX Runtime, whose every exception is a refusal."""
    import onnxruntime as ort

    ort.set_default_logger_severity(4)
    try:
        session = ort.InferenceSession(path)
        outputs = session.run(None, feed_for(session.get_inputs()))
    except Exception as e:
        return {"outcome": "refused", "text": str(e), "kind": type(e).__name__}
    _save(path.with_suffix(".onnxruntime.npz"), outputs)
    return {"outcome": "ran", "text": "", "range": _range(path)}


def _range(path: Path) -> float:
    """The largest magnitude among the values computed on the way: past 1e15, squares and sums overflow float32."""
    import onnx
    import onnxruntime as ort

    model = onnx.load(path)
    known = {o.name for o in model.graph.output}
    inner = [o for n in model.graph.node for o in n.output if o and o not in known]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    session = ort.InferenceSession(model.SerializeToString())
    values = session.run(inner, feed_for(session.get_inputs())) if inner else []
    floats = [v for v in values if isinstance(v, np.ndarray) and v.dtype.kind == "f" and v.size]
    largest = max((float(np.abs(v).max()) for v in floats), default=0.0)
    return largest if np.isfinite(largest) else 1e308


def _save(path: Path, outputs: list[Any]) -> None:
    arrays = [np.asarray(o) if isinstance(o, np.ndarray) else np.zeros(0) for o in outputs]
    np.savez(path, *[a.astype(str) if a.dtype.kind == "O" else a for a in arrays])


def peak_kib() -> int:
    """The most memory this program held. `ru_maxrss` will not do: it remembers the process that this one was forked from."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(library: str, folder: str, first: str, last: str) -> None:
    """Run cases first..last-1."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    run = {"hotfuse": hotfuse, "captured": captured, "onnxruntime": onnxruntime}[library]
    print("ready", flush=True)
    for k in range(int(first), int(last)):
        print(f"begin {k}", flush=True)
        result = run(Path(folder) / f"{k}.onnx")
        print(f"end {k} {json.dumps(result)}", flush=True)
    print(f"peak {peak_kib()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
