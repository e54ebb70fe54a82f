"""Convolution + bias + activation: generated kernels against torch, oneDNN, ONNX Runtime and OpenVINO, each in its own layout.

    python -m benchmarks.conv [--threads 1 2] [--rounds N] [--only TEXT] [--seconds S] [--torch-only] [--json]

The distinct convolutions of ResNet-50 and the depthwise ones of MobileNetV3-Large at 224 x 224, one image. Contenders take turns;
every turn begins with a rest, until the threads of whoever came before have stopped spinning (`timing.rest`), and some milliseconds
of calls that are not counted: a layer of a network in steady state finds a core that is awake, and its memory in cache. Torch
with channels first and last, oneDNN with packed weights and the activation fused, and ours with channels last allocate their
results. ONNX Runtime and OpenVINO, where installed, have a model of the one layer. They compute in layouts of their own and convert
at both ends, as they would once for a whole network: what counts for them is what their profilers say of all nodes but these
conversions, which leaves out what a call costs. A ratio above 1 means that ours is faster than the best of the others; `least`
compares the fastest calls, which other load disturbs least. Cells are kept (`benchmarks.cells`): with `--seconds` the grid is
measured in slices.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper

from benchmarks.cells import Cells, add_options, cells
from benchmarks.gemm import Call, geomean
from benchmarks.timing import WARM_S, rest
from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.runs.kernel_call import artifact
from hotfuse.compile.host import host_core
from hotfuse.ir.text import parse
from hotfuse.lower.cpu.conv.conv_group import lower_convolution
from hotfuse.lower.cpu.conv.shape import Axis
from hotfuse.native.target import host

BURST_S = 0.004
"""Calls that count, of a turn."""
MIN_CHANNELS = 4
"""Fewer input channels than these are those of a picture, which comes channels first."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One convolution, of square windows on square images."""

    inputs: int
    outputs: int
    size: int
    window: int
    stride: int = 1
    groups: int = 1
    act: str = "relu"

    @property
    def padding(self) -> int:
        """As much as keeps the size."""
        return self.window // 2

    @property
    def out(self) -> int:
        """Outputs along a side."""
        return Axis(self.size, self.window, self.stride, self.padding).out

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.out**2 * self.outputs * self.inputs // self.groups * self.window**2

    def __str__(self) -> str:
        kind = "depthwise " if self.groups > 1 else ""
        return f"{kind}{self.inputs}->{self.outputs} {self.window}x{self.window}/{self.stride} @{self.size} {self.act}"


RESNET50 = (
    Shape(3, 64, 224, 7, 2),
    Shape(64, 64, 56, 1), Shape(64, 64, 56, 3), Shape(64, 256, 56, 1), Shape(256, 64, 56, 1),
    Shape(256, 128, 56, 1), Shape(128, 128, 56, 3, 2), Shape(128, 512, 28, 1), Shape(256, 512, 56, 1, 2),
    Shape(512, 128, 28, 1), Shape(128, 128, 28, 3),
    Shape(512, 256, 28, 1), Shape(256, 256, 28, 3, 2), Shape(256, 1024, 14, 1), Shape(512, 1024, 28, 1, 2),
    Shape(1024, 256, 14, 1), Shape(256, 256, 14, 3),
    Shape(1024, 512, 14, 1), Shape(512, 512, 14, 3, 2), Shape(512, 2048, 7, 1), Shape(1024, 2048, 14, 1, 2),
    Shape(2048, 512, 7, 1), Shape(512, 512, 7, 3),
)  # fmt: skip
MOBILENET = tuple(
    Shape(c, c, size, window, stride, c, act)
    for c, size, window, stride, act in (
        (16, 112, 3, 1, "relu"), (64, 112, 3, 2, "relu"), (72, 56, 3, 1, "relu"), (72, 56, 5, 2, "relu"),
        (120, 28, 5, 1, "relu"), (240, 28, 3, 2, "hardswish"), (200, 14, 3, 1, "hardswish"),
        (184, 14, 3, 1, "hardswish"), (480, 14, 3, 1, "hardswish"), (672, 14, 3, 1, "hardswish"),
        (672, 14, 5, 2, "hardswish"), (960, 7, 5, 1, "hardswish"),
    )
)  # fmt: skip


Told = Callable[[], list[float]]
"""What a contender itself says of the seconds its calls took."""


def contenders(s: Shape, others: bool = True) -> tuple[dict[str, Call], dict[str, Told], float]:
    """Every way to do it on the same data, those that time themselves, and the seconds that ours took to compile."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, s.inputs, s.size, s.size, generator=generator)
    w = torch.randn(s.outputs, s.inputs // s.groups, s.window, s.window, generator=generator)
    w /= (w.numel() / s.outputs) ** 0.5
    b = torch.randn(s.outputs, generator=generator)
    last = x.contiguous(memory_format=torch.channels_last)
    w_last = w.contiguous(memory_format=torch.channels_last)
    act: Any = getattr(F, s.act)
    calls: dict[str, Call] = {
        "torch": lambda: act(F.conv2d(x, w, b, s.stride, s.padding, 1, s.groups)),
        "torch channels last": lambda: act(F.conv2d(last, w_last, b, s.stride, s.padding, 1, s.groups)),
    }
    if torch.backends.mkldnn.is_available():
        both = [s.stride] * 2
        packed = torch.ops.mkldnn._reorder_convolution_weight(
            w, [s.padding] * 2, both, [1, 1], s.groups, list(x.shape)
        )
        fused = torch.ops.mkldnn._convolution_pointwise
        calls["onednn packed"] = lambda: fused(
            last, packed, b, [s.padding] * 2, both, [1, 1], s.groups, s.act, [], ""
        )  # fmt: skip
    told: dict[str, Told] = {}
    if others:
        model = layer(s, x, w, b)
        if importlib.util.find_spec("onnxruntime"):
            calls["onnxruntime"], told["onnxruntime"] = onnxruntime(model, x)
        if importlib.util.find_spec("openvino"):
            calls["openvino"], told["openvino"] = openvino(model, x)
    run, seconds = ours(s, w, b)
    image = x if s.inputs < MIN_CHANNELS else last
    calls["ours"] = lambda: run(image)[0]
    exact = act(F.conv2d(x.double(), w.double(), b.double(), s.stride, s.padding, 1, s.groups))
    for name, call in calls.items():
        worst = (call() - exact).abs().max().item()
        if not worst < 1e-4:
            raise SystemExit(f"{name} is wrong by {worst} at {s}")
    return calls, told, seconds


def layer(s: Shape, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> bytes:
    """The layer as an ONNX model."""
    into = ["x", "w", "b"]
    attributes = {"strides": [s.stride] * 2, "pads": [s.padding] * 4, "group": s.groups}
    names = {"relu": "Relu", "hardswish": "HardSwish"}
    nodes = [helper.make_node("Conv", into, ["h"], **attributes), helper.make_node(names[s.act], ["h"], ["y"])]
    ends = [
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, shape)
        for n, shape in (("x", list(x.shape)), ("y", [1, s.outputs, s.out, s.out]))
    ]
    weights = [numpy_helper.from_array(t.numpy(), n) for n, t in (("w", w), ("b", b))]
    graph = helper.make_graph(nodes, "layer", ends[:1], ends[1:], weights)
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


def onnxruntime(model: bytes, x: torch.Tensor) -> tuple[Call, Told]:
    """ONNX Runtime, on as many threads as torch has, and its own account of a run without conversions of layout."""
    ort: Any = importlib.import_module("onnxruntime")
    folder = tempfile.TemporaryDirectory()
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.enable_profiling = True
    options.profile_file_prefix = str(Path(folder.name) / "layer")
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    image = x.numpy()

    def told() -> list[float]:
        with folder:
            events = json.loads(Path(session.end_profiling()).read_text())
        runs: list[float] = []
        first = ""
        for e in (e for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time")):
            first = first or e["name"]
            if e["name"] == first:
                runs.append(0.0)
            if not e["args"]["op_name"].startswith("Reorder"):
                runs[-1] += e["dur"] / 1e6
        return runs

    return lambda: torch.from_numpy(session.run(None, {"x": image})[0]), told


def openvino(model: bytes, x: torch.Tensor) -> tuple[Call, Told]:
    """OpenVINO, on as many threads as torch has, and its own account of a run without conversions of layout."""
    ov: Any = importlib.import_module("openvino")
    core = ov.Core()
    hints = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32", "PERF_COUNT": True}
    request = core.compile_model(core.read_model(model, b""), "CPU", hints).create_infer_request()
    image = x.numpy()
    seconds: list[float] = []

    def call() -> torch.Tensor:
        result = torch.from_numpy(request.infer([image], share_inputs=True, share_outputs=True)[0])
        seconds.append(
            sum(p.real_time.total_seconds() for p in request.profiling_info if p.node_type not in ("Reorder", "Transpose"))
        )
        return result

    return call, lambda: seconds


def ours(s: Shape, w: torch.Tensor, b: torch.Tensor) -> tuple[Any, float]:
    """The kernel with its call; the first convolution reads the image as cameras and loaders give it, channels first."""
    into = "" if s.inputs < MIN_CHANNELS else "{0,2,3,1}"
    kind = f"f32[1, {s.outputs}, {s.out}, {s.out}]{{0,2,3,1}}"
    graph = parse(f"""graph layer(%x: f32[1, {s.inputs}, {s.size}, {s.size}]{into}) {{
      param %w: f32[{s.outputs}, {s.inputs // s.groups}, {s.window}, {s.window}] = "w"
      param %b: f32[{s.outputs}] = "b"
      %h: {kind} = aten.conv2d.default(%x, %w, %b, [{s.stride}, {s.stride}], [{s.padding}, {s.padding}], [1, 1], {s.groups})
      %y: {kind} = aten.{s.act}.default(%h)
      return %y }}""")
    lowered = lower_convolution(graph, host_core(host()), name="layer")
    compiled = compile_kernel(lowered.kernel)
    run = artifact(graph, lowered, load_kernel(compiled), {"w": w, "b": b}, "").run
    return run, sum(compiled.seconds.values())


def turns(calls: dict[str, Call], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[bool]]]:
    """Seconds of every call that counts, the contenders in turns; and of all calls, in order, whether they count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    counted: dict[str, list[bool]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls) if i % 2 == 0 else list(calls)[::-1]:
            rest()
            begin = start = time.perf_counter()
            while start - begin < WARM_S + BURST_S or not counted[name][-1]:  # what is slow is counted once a turn
                calls[name]()
                end = time.perf_counter()
                counted[name].append(start - begin >= WARM_S)
                if counted[name][-1]:
                    times[name].append(end - start)
                start = end
    return times, counted


def measure(s: Shape, threads: int, rounds: int, others: bool) -> dict[str, Any]:
    """One cell of the grid."""
    torch.set_num_threads(threads)
    calls, told, seconds = contenders(s, others)
    times, counted = turns(calls, rounds)
    for name, of_itself in told.items():
        said = of_itself()
        times[name] = [t for t, counts in zip(said[len(said) - len(counted[name]) :], counted[name], strict=True) if counts]
    row: dict[str, Any] = {"shape": str(s), "threads": threads, "compile_ms": round(seconds * 1e3, 1)}
    for what, pick in (("median", statistics.median), ("least", min)):
        found = {n: pick(t) for n, t in times.items()}
        best = min(t for n, t in found.items() if n != "ours")
        row[what] = {n: round(t * 1e6, 1) for n, t in found.items()}
        row[f"ratio_{what}"] = round(best / found["ours"], 3)
        row[f"ratio_{what}_eager"] = round(found["torch"] / found["ours"], 3)
    row["gflops"] = round(s.operations / row["least"]["ours"] / 1e3, 1)
    return row


def report(row: dict[str, Any]) -> None:
    """One line."""
    print(f"t{row['threads']} {row['shape']:44} least us {row['least']}  ratio {row['ratio_least']:.2f} (median "
          f"{row['ratio_median']:.2f}), over eager {row['ratio_least_eager']:.2f}, {row['gflops']:.0f} GFLOP/s, "
          f"compiled in {row['compile_ms']:.0f} ms", flush=True)  # fmt: skip


def summary(label: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means over some shapes; prints a line."""
    found = {k: round(geomean([r[k] for r in rows]), 3) for k in rows[0] if k.startswith("ratio")}
    worst = min(rows, key=lambda r: r["ratio_least"])
    behind = [r["shape"] for r in rows if min(r["least"]["torch"], r["least"]["torch channels last"]) < r["least"]["ours"]]
    print(f"# {label}: {len(rows)} shapes, geometric means {found}, worst {worst['shape']} {worst['ratio_least']}; torch's own "
          f"operators, which a plan takes where they are faster, are so for {', '.join(behind) or 'none'}", flush=True)  # fmt: skip
    return found


def grid(kept: Cells, options: argparse.Namespace) -> dict[str, Any]:
    """All shapes on every number of threads, one after the other, as far as the slice goes."""
    result: dict[str, Any] = {}
    step = 4 if options.quick else 1
    for threads in options.threads:
        whole: list[dict[str, Any]] = []
        for label, shapes in (("resnet50", RESNET50), ("mobilenet_v3_large depthwise", MOBILENET)):
            rows: list[dict[str, Any]] = []
            for s in (s for s in shapes[::step] if options.only in str(s)):
                work = functools.partial(measure, s, threads, options.rounds, not options.torch_only)
                row = kept.measured(f"t{threads} {s}", work)
                if row is not None:
                    rows.append(row)
                    report(row)
            if rows:
                result[f"t{threads} {label}"] = {"summary": summary(f"t{threads} {label}", rows), "shapes": rows}
            whole += rows
        if whole:
            result[f"t{threads} geomean_least"] = summary(f"t{threads} all", whole)["ratio_least"]
    return result


def main() -> int:
    """Run all shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--quick", action="store_true", help="every fourth shape")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--torch-only", action="store_true", help="without ONNX Runtime and OpenVINO")
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    add_options(parser)
    options = parser.parse_args()
    kept = cells("conv", options, rounds=options.rounds, alone=options.torch_only)
    with torch.inference_mode():
        result = grid(kept, options)
    if kept.left:
        print(kept.remaining())
    if options.json:
        print(json.dumps({"target": host().name, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
