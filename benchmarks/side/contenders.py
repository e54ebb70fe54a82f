"""How every contender loads a case and answers a call; each runs in a process of its own.

One that cannot take part raises `Absent` with the reason, or whatever it raises: either way it is a line of the report. Whoever
has no setting of its own for the number of threads is kept to as many processors.
"""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import quiet
from benchmarks.side.cases import Case, Model
from benchmarks.side.traffic import Feed

Arrays = list[np.ndarray[Any, Any]]


class Absent(Exception):
    """Why a contender does not take part."""


@dataclass(slots=True)
class Loaded:
    """A contender that is ready for its first call."""

    call: Callable[[Any], Any]
    prepare: Callable[[Any], Any] = lambda feed: feed
    """A feed in its own form; not timed."""
    settle: Callable[[Callable[[], Any], float], bool] = field(default=lambda call, limit_s: True)
    """Given a call to repeat: until the best that there will be serves, which it says, or until so many seconds are over."""
    about: Callable[[], dict[str, Any]] = dict
    arrays: Callable[[Any], Arrays] = field(default=lambda result: [np.asarray(v) for v in result])


@dataclass(frozen=True, slots=True)
class Job:
    """What a contender is to load."""

    case: Case
    model: Model
    example: Any
    threads: int
    onnx: Path | None
    """The model as an ONNX file: its own, or an export that nobody's time counts."""

    @property
    def file(self) -> Path:
        if self.onnx is None:
            raise Absent("the model cannot be exported to ONNX")
        return self.onnx


def _tensors(feed: Feed) -> dict[str, Any]:
    import torch

    return {n: torch.from_numpy(np.ascontiguousarray(v)) for n, v in feed.items()}


def _flat(result: Any) -> Arrays:
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_flatten(result)[0]
    return [v.detach().numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for v in leaves]


def _module(job: Job) -> Any:
    if job.model.module is None:
        raise Absent("an ONNX model has no torch code")
    return job.model.module


def eager(job: Job) -> Loaded:
    module = _module(job)
    return Loaded(lambda feed: module(**feed), _tensors, arrays=_flat)


def inductor(job: Job, *, freezing: bool = False, mode: str | None = None, dynamic: bool | None = None) -> Loaded:
    import torch
    import torch._inductor.config as config

    config.freezing = freezing
    compiled = torch.compile(_module(job), mode=mode, dynamic=dynamic)
    return Loaded(lambda feed: compiled(**feed), _tensors, arrays=_flat)


def hotfuse(job: Job, *, tiers: int | None = None) -> Loaded:
    import hotfuse as package
    from hotfuse.base.settings import Settings

    settings = Settings().with_(threads=job.threads)
    if tiers is not None:
        settings = settings.with_(tiers=tiers)
    if job.model.application:
        return application(job, package.InferenceSession)
    if job.model.path is not None:
        session = package.InferenceSession(job.model.path, settings=settings)
        return Loaded(lambda feed: session.run(None, feed), settle=_settle(settings.hot_calls, session.wait),
                      about=lambda: served(session))
    fast = package.jit(_module(job), settings=settings)
    return Loaded(lambda feed: fast(**feed), _tensors, _settle(settings.hot_calls, fast.wait), lambda: served(fast), _flat)


def _settle(hot: int, wait: Callable[[float], bool]) -> Callable[[Callable[[], Any], float], bool]:
    def settle(call: Callable[[], Any], limit_s: float) -> bool:
        ends = time.monotonic() + limit_s
        for _ in range(3):
            for _ in range(hot + 1):
                call()
            if not wait(max(0.0, ends - time.monotonic())):
                return False
        return True

    return settle


def served(fast: Any) -> dict[str, Any]:
    """What served, and what was decided on the way: evidence for the table's reader."""
    stats, found = fast.stats(), fast.explain().to_dict()
    plans = [p for site in found["sites"] for p in site["plans"]]
    deployed = [{"at": d["at"], "why": d["why"], "subject": d["subject"]} for d in found["decisions"] if d["action"] == "deploy"]
    return {"tier": max((p["tier"] for p in plans), default=None), "calls_per_tier": stats["calls_per_tier"],
            "swaps": stats["swaps"], "refused": stats["refused"], "deployed": deployed[:20]}


def _wait_for_all(sessions: Sequence[Any]) -> Callable[[float], bool]:
    def wait(limit_s: float) -> bool:
        ends = time.monotonic() + limit_s
        return all([one.wait(max(0.0, ends - time.monotonic())) for one in sessions])

    return wait


def application(job: Job, session: type | None) -> Loaded:
    """Rapidocr with its own session class or another; what it answers is text."""
    from examples.ocr_client import build, rapidocr

    context = rapidocr()
    read, sessions = build(context.__enter__(), session, job.threads)

    wait = _wait_for_all(sessions) if session is not None else lambda _: True
    return Loaded(read, settle=_settle(3 if session is not None else 0, wait),
                  arrays=lambda lines: [np.array([ord(c) for c in "\n".join(lines)], np.float64)],
                  about=lambda: {"context": bool(context)})


def ort(job: Job) -> Loaded:
    import onnxruntime

    if job.model.application:
        return application(job, None)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads, options.inter_op_num_threads = job.threads, 1
    session = onnxruntime.InferenceSession(str(job.file), options, providers=["CPUExecutionProvider"])
    known = {i.name for i in session.get_inputs()}
    return Loaded(lambda feed: session.run(None, feed), lambda feed: {n: v for n, v in feed.items() if n in known})


def openvino(job: Job) -> Loaded:
    ov = quiet.openvino()
    converted = ov.convert_model(str(job.file))
    if not job.case.dynamic and not job.case.trace:
        converted.reshape({n: list(v.shape) for n, v in job.example.items()})
    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": job.threads,
                "NUM_STREAMS": 1}
    request = ov.Core().compile_model(converted, "CPU", settings).create_infer_request()
    return Loaded(lambda feed: list(request.infer(feed).values()))


def _pinned(job: Job) -> None:
    """No more processors than threads."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: job.threads]))


def _onnx_model(job: Job) -> Any:
    import onnx

    return onnx.load(str(job.file))


def jax(job: Job) -> Loaded:
    if not job.case.jax:
        raise Absent("JAX reads neither torch modules nor ONNX files; only kernels were written for it")
    _pinned(job)
    package = importlib.import_module("jax")
    function = getattr(importlib.import_module("benchmarks.side.jax_kernels"), job.case.jax)
    weights = {n: package.numpy.asarray(t.detach().numpy()) for n, t in job.model.module.state_dict().items()}
    compiled = package.jit(lambda feed: function(weights, **feed))
    return Loaded(lambda feed: package.block_until_ready(compiled(feed)),
                  lambda feed: {n: package.numpy.asarray(v) for n, v in feed.items()}, arrays=lambda y: [np.asarray(y)])


def iree(job: Job) -> Loaded:
    _pinned(job)
    from iree import compiler, runtime
    from iree.compiler.dialects import util  # noqa: F401  (registers what the importer emits)
    from iree.compiler.extras import onnx_importer
    from iree.compiler.ir import Context

    context = Context()
    info = onnx_importer.ModelInfo(_with_shapes(_onnx_model(job)))
    module = info.create_module(context=context).operation
    onnx_importer.NodeImporter.define_function(info.main_graph, module).import_all()
    code = compiler.compile_str(str(module), input_type="onnx", target_backends=["llvm-cpu"],
                                extra_args=["--iree-llvmcpu-target-cpu=host"])
    instance = runtime.Config("local-task")
    loaded = runtime.load_vm_module(runtime.VmModule.copy_buffer(instance.vm_instance, code), instance)
    name = info.main_graph.graph_proto.name
    function, names = loaded[name], [i.name for i in info.main_graph.graph_proto.input]

    def arrays(result: Any) -> Arrays:
        return [np.asarray(r) for r in (result if isinstance(result, tuple | list) else (result,))]

    # Results are read back to the host, as everybody's are.
    return Loaded(lambda feed: arrays(function(*feed)), lambda feed: [feed[n] for n in names], arrays=lambda y: y)


def _with_shapes(model: Any) -> Any:
    import onnx

    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def tvm(job: Job) -> Loaded:
    """By its default pipeline: without tuning, which takes hours and without which its kernels are plain loops."""
    _pinned(job)
    package = importlib.import_module("tvm")
    relax, frontend = package.relax, importlib.import_module("tvm.relax.frontend.onnx")
    shapes = {n: list(v.shape) for n, v in job.example.items()}
    module = frontend.from_onnx(_onnx_model(job), shape_dict=shapes, keep_params_in_input=False)
    target = package.target.Target({"kind": "llvm", "mcpu": package.target.codegen.llvm_get_system_cpu()})
    machine = relax.VirtualMachine(package.compile(module, target), package.cpu())
    names = [p.name for p in module["main"].params]

    def arrays(result: Any) -> Arrays:
        return [r.numpy() for r in (result if hasattr(result, "__len__") and not hasattr(result, "numpy") else (result,))]

    return Loaded(lambda feed: machine["main"](*feed),
                  lambda feed: [package.runtime.tensor(np.ascontiguousarray(feed[n])) for n in names], arrays=arrays)


def tinygrad(job: Job) -> Loaded:
    _pinned(job)
    package = importlib.import_module("tinygrad")
    try:
        device = package.Device.DEFAULT
    except RuntimeError as e:
        raise Absent(f"tinygrad has no device here ({e}): on processors it needs clang or LLVM's shared library") from e
    runner = importlib.import_module("tinygrad.nn.onnx").OnnxRunner(str(job.file))
    compiled = package.TinyJit(lambda **feed: [t.realize() for t in runner(feed).values()])

    def settle(call: Callable[[], Any], _limit_s: float) -> bool:
        for _ in range(3):
            call()
        return True

    return Loaded(lambda feed: [t.numpy() for t in compiled(**feed)],
                  lambda feed: {n: package.Tensor(np.ascontiguousarray(v), device=device).realize() for n, v in feed.items()},
                  settle)


CONTENDERS: dict[str, Callable[[Job], Loaded]] = {
    "hotfuse": hotfuse,
    "hotfuse-tier0": lambda job: hotfuse(job, tiers=0),
    "eager": eager,
    "inductor": inductor,
    "inductor-freezing": lambda job: inductor(job, freezing=True),
    "inductor-autotune": lambda job: inductor(job, mode="max-autotune"),
    "inductor-dynamic": lambda job: inductor(job, dynamic=True),
    "ort": ort,
    "openvino": openvino,
    "jax": jax,
    "iree": iree,
    "tvm": tvm,
    "tinygrad": tinygrad,
}
PACKAGES = {"ort": "onnxruntime", "openvino": "openvino", "jax": "jax", "iree": "iree-base-compiler", "tvm": "apache-tvm",
            "tinygrad": "tinygrad"}
"""What has to be installed."""
_OURS, _INDUCTOR = ("hotfuse.api", "hotfuse.session"), ("torch._dynamo", "torch._inductor.compile_fx")
IMPORTS = {
    **{n: _OURS for n in CONTENDERS if n.startswith("hotfuse")}, **{n: _INDUCTOR for n in CONTENDERS if n.startswith("inductor")},
    "ort": ("onnxruntime",), "openvino": ("openvino",), "jax": ("jax",), "iree": ("iree.compiler", "iree.runtime"),
    "tvm": ("tvm",), "tinygrad": ("tinygrad",),
}  # fmt: skip
"""What everybody imports before the clock starts, as torch is imported for eager; how long that took is recorded."""


def export(case: Case, folder: Path) -> Path:
    """A torch model as an ONNX file, by the first exporter that manages; changing dims are declared."""
    import torch

    from benchmarks.peers import Positional

    model = case.build()
    feed = _tensors(case.feed())
    module = Positional(model.module, list(feed)).eval()
    path, reasons = folder / "model.onnx", list[str]()
    for dynamo in (False, True):
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                torch.onnx.export(module, tuple(feed.values()), str(path), input_names=list(feed), dynamo=dynamo,
                                  dynamic_axes=case.dynamic or None, verbose=False)
            return path
        except Exception as e:  # any exporter may fail in any way; the line says how
            reasons.append(f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"[:160])
    raise Absent("; ".join(reasons))
