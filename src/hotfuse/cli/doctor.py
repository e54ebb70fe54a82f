"""`hotfuse doctor`: what is installed, what the machine really does, and whether the parts start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib import metadata
from typing import Annotated, Literal

import typer

from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings, unread_variables
from hotfuse.cli.machine_limits import MachineLimits, limits, show_limits
from hotfuse.cli.output import heading, print_json, reports_errors, rows
from hotfuse.machine.fingerprint import make_fingerprint
from hotfuse.machine.probe import features, usable_features
from hotfuse.machine.topology import Topology, topology

PACKAGES = (
    "hotfuse", "torch", "numpy", "onnx", "ml_dtypes", "cloudpickle", "llvmlite", "sqlalchemy",
    "onnxruntime", "transformers", "triton",
)  # fmt: skip

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried, and how it went."""

    name: str
    status: Status
    detail: str


@reports_errors
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    peaks: Annotated[bool, typer.Option("--peaks", help="Measure the machine's limits, and keep them.")] = False,
) -> None:
    """Check this installation: versions, devices, CPU features that really execute, limits, threads, cache, worker."""
    settings = Settings()
    top = topology()
    probed = features()
    who = make_fingerprint(top, usable_features())
    found = limits(settings, who, measure=peaks)
    seen = devices()
    report: dict[str, object] = {
        "versions": versions(),
        "devices": seen,
        "machine": top.to_dict(),
        "features": [p.to_dict() for p in probed],
        "fingerprint": who.to_dict(),
        "limits": found.to_dict(),
    }
    checks = [
        check_threads(top),
        check_cache(settings),
        check_environment(),
        check_worker(),
        check_native_code(),
        check_entry_point(),
        check_bf16(),
        *check_devices(seen),
    ]
    report["checks"] = [asdict(c) for c in checks]
    report["ok"] = all(c.status != "FAIL" for c in checks)
    if as_json:
        print_json(report)
    else:
        _show(top, seen, found, checks)
    if not report["ok"]:
        raise typer.Exit(1)


def versions() -> dict[str, str]:
    """Python and the packages that matter; an absent optional one is shown as absent."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


_ASK_CUDA = """
import json
from hotfuse.compile.device.selftest import report
print(json.dumps(report()))
"""


def devices() -> list[dict[str, object]]:
    """Every device torch can use here. GPUs are asked for in a throw-away process: asking starts CUDA, after which the worker that
    is checked below could not be a fork as it is elsewhere."""
    import torch

    found: list[dict[str, object]] = [{"device": "cpu", "name": torch.backends.cpu.get_cpu_capability()}]
    if torch.backends.cuda.is_built():
        found += gpus(_ASK_CUDA)
    return found


def gpus(code: str, timeout_s: float = 120.0) -> list[dict[str, object]]:
    """What a few lines of Python print of them; a process that fails is shown in their place."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, check=True)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as e:
        said = (getattr(e, "stderr", None) or str(e)).strip().splitlines()
        return [{"device": "cuda", "name": f"could not be asked: {said[-1] if said else type(e).__name__}"}]


def check_devices(seen: list[dict[str, object]]) -> list[Check]:
    """Whether a kernel was generated, launched, recorded and replayed on each GPU."""
    found: list[Check] = []
    for device in (d for d in seen if "kernels" in d):
        why, name = str(device["kernels"]), f"kernels on {device['device']}"
        if why:
            found.append(Check(name, "warn", f"plans have library kernels only: {why}"))
        else:
            found.append(Check(name, "ok", "a generated kernel was launched, recorded and replayed"))
    return found


def check_threads(top: Topology) -> Check:
    """Whether torch would start more threads than there are CPUs for them."""
    import torch

    threads = torch.get_num_threads()
    room = min(top.usable_cpus, top.cpu_quota or top.usable_cpus)
    detail = f"torch uses {threads}, {top.usable_cpus} CPUs usable"
    if top.cpu_quota is not None:
        detail += f", quota {top.cpu_quota:g} CPUs"
    if limit := os.environ.get("OMP_NUM_THREADS"):
        detail += f", OMP_NUM_THREADS={limit}"
    return Check("threads", "warn" if threads > room else "ok", detail)


def check_cache(settings: Settings) -> Check:
    """Whether the cache folder can be made and written."""
    folder = settings.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as e:
        return Check("cache folder", "FAIL", f"{folder}: {e.strerror or e}; set HOTFUSE_CACHE_DIR to a writable folder")
    return Check("cache folder", "ok", f"{folder} is writable")


def check_environment() -> Check:
    """Which of our variables are set, by name alone (a store's URL may hold a password), and which of them nothing reads."""
    unread = unread_variables(os.environ)
    if unread:
        return Check("environment", "warn", "; ".join(f"nothing reads {name}: {hint}" for name, hint in unread.items()))
    ours = sorted(name for name in os.environ if name.startswith("HOTFUSE_"))
    return Check("environment", "ok", f"{', '.join(ours)} are read" if ours else "no HOTFUSE_ variable is set")


def _in_process(name: str, code: str, *, fatal: bool, hint: str = "", timeout_s: float = 120.0) -> Check:
    """Run a few lines of Python in a process of their own; its death is a finding, not a crash."""
    start = time.monotonic()
    bad: Status = "FAIL" if fatal else "warn"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as e:
        return Check(name, bad, str(e))
    if done.returncode < 0:
        return Check(name, bad, f"killed by signal {-done.returncode}" + (f"; {hint}" if hint else ""))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Check(name, bad, last + (f"; {hint}" if hint else ""))
    return Check(name, "ok", f"{done.stdout.strip()} in {time.monotonic() - start:.1f} s")


def check_worker(timeout_s: float = 120.0) -> Check:
    """Whether a worker process starts and captures a small model, and the captured graph is proven and deployed."""
    import torch

    from hotfuse.api import jit

    name = "capture in a worker"
    start = time.monotonic()
    settings = Settings().with_(capture="background")
    with torch.inference_mode(), jit(torch.nn.Linear(4, 4).eval(), settings=settings) as fast:
        fast(torch.ones(1, 4))
        drained = fast.wait(timeout_s)
        if fast.stats()["swaps"]:
            taken = time.monotonic() - start
            return Check(name, "ok", f"captured, verified and deployed a small model in {taken:.1f} s")
        last = fast.explain().to_dict()["decisions"][-1]
    if not drained:
        return Check(name, "FAIL", f"no answer within {timeout_s:g} s")
    detail = ", ".join(f"{k}: {v}" for k, v in last["evidence"].items() if v)
    return Check(name, "FAIL", f"{last['why']}; {detail}")


def check_native_code() -> Check:
    """Whether a generated kernel runs, for which instructions it is made, and whether it can use threads."""
    code = """
import torch
from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.threads.parallel import runtime
from hotfuse.native.target import host
from hotfuse.ir.types import DType
from hotfuse.tile.build import KernelBuilder
b = KernelBuilder("twice")
x, y = b.input("x", DType.F32, (64,)), b.output("y", DType.F32, (64,))
t = b.load(x, (0,), (64,))
b.store(y, (0,), b.map("add", t, t))
data, out = torch.arange(64.0), torch.empty(64)
load_kernel(compile_kernel(b.finish()))([data, out])
assert torch.equal(out, data * 2)
print(f"{host().name} code, threads by {runtime().kind}: compiled, loaded and ran")
"""
    found = _in_process("native code", code, fatal=False, hint="models stay on library kernels")
    if found.status == "ok" and "threads by serial" in found.detail:
        return Check(found.name, "warn", f"{found.detail}; torch has loaded no OpenMP runtime that kernels can use")
    return found


def check_bf16() -> Check:
    """Whether torch's own bf16 kernels survive here: they trust advertised features, which may trap."""
    code = "import torch; torch.nn.functional.linear(*[torch.ones(64, 64, dtype=torch.bfloat16)] * 2); print('ran')"
    hint = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 may keep torch from using what traps"
    return _in_process("torch bf16 linear", code, fatal=False, hint=hint)


def check_entry_point() -> Check:
    """Whether `torch.compile(backend="hotfuse")` will find us."""
    name = "torch.compile backend"
    found = [e for e in metadata.entry_points(group="torch_dynamo_backends") if e.name == "hotfuse"]
    if not found:
        return Check(name, "FAIL", "the entry point is not registered; reinstall the package")
    try:
        backend: object = found[0].load()
    except (ImportError, AttributeError, HotfuseError) as e:
        return Check(name, "FAIL", f"{found[0].value} does not load: {e}")
    if not callable(backend):
        return Check(name, "FAIL", f"{found[0].value} is not callable")
    return Check(name, "ok", f"registered as {found[0].value}")


def _size(value: object) -> str:
    return "unknown" if not isinstance(value, int) else f"{value / (1 << 30):.1f} GiB"


def _show(top: Topology, seen: list[dict[str, object]], found: MachineLimits, checks: list[Check]) -> None:
    heading("versions")
    rows(("package", "version"), versions().items(), header=False)
    heading("\nmachine")
    caches = ", ".join(f"L{c.level} {c.kind} {c.bytes >> 10} KiB" for c in top.caches) or "unknown"
    facts = [
        ("cpu", f"{top.cpu} ({top.arch})"),
        ("os", f"{top.os} {top.kernel}"),
        ("cores", f"{top.physical_cores or '?'} physical, {top.logical_cpus} logical, {top.usable_cpus} usable"),
        ("caches", caches),
        ("memory", _size(top.memory_bytes)),
    ]
    rows(("fact", "value"), facts, header=False)
    heading("\ndevices")
    listed = [(d["device"], d["name"], _size(d["memory_bytes"]) if "memory_bytes" in d else "") for d in seen]
    rows(("device", "name", "memory"), listed, header=False)
    heading("\nCPU features (believed only when advertised and executed)")
    yes_no = {True: "yes", False: "no"}
    body = [(p.name, yes_no[p.advertised], yes_no[p.executes], p.detail) for p in features()]
    rows(("feature", "advertised", "executes", "detail"), body)
    show_limits(found)
    heading("\nchecks")
    rows(("check", "status", "detail"), [(c.name, c.status, c.detail) for c in checks], header=False)

