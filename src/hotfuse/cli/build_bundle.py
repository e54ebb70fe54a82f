"""`hotfuse build`: compile a model ahead, for the calls it is going to get, into one signed file.

    hotfuse build model.onnx --traffic shapes.json -o model.bundle
    hotfuse build mymodels:encoder --for avx2 --key fleet.key -o encoder.bundle
    hotfuse build mymodels:encoder --input 8x128:int64 -o encoder.bundle            a model that brings no inputs

    traffic ::= [{"dims": {"batch": 8}, "inputs": {"x": 0.5}, "calls": 3}, …]     an ONNX file; what is left out is made up
              | [{"inputs": ["8x128:int64"], "calls": 1}, …]                      a PyTorch model that brings no inputs

The model is served here on made-up calls of these sizes, in a cache of its own, until its best plan answers all of them; what that
cache holds then is the bundle. Nothing is believed of it that was not proven on calls, and where it is used it is proven again.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotfuse.base.errors import HotfuseError, InputError
from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.cli.model_inputs import Feeds, make_feeds
from hotfuse.cli.output import console, pairs, print_json, reports_errors, rows
from hotfuse.cli.stores import machines_named, open_store
from hotfuse.cli.torch_models import is_torch_name, load_torch
from hotfuse.machine.probe import LIMIT

if TYPE_CHECKING:
    from hotfuse.cache.folder import Folder

MAX_CALLS_A_KIND, MAX_KINDS = 100, 64
STEADY_ROUNDS = 8
"""Rounds of all kinds of calls that compiled plans must answer before the model counts as built."""
TRAFFIC = '[{"dims": {"batch": 8}, "calls": 3}], for a PyTorch model [{"inputs": ["8x128:int64"]}]'
ROUNDS = 40
"""Rounds after which what serves then is what there is: tier 0 may be the best for this model."""


@dataclass(frozen=True, slots=True)
class CallKind:
    """A kind of call that the model is going to get."""

    dims: dict[str, str]
    inputs: Any
    calls: int


@dataclass(slots=True)
class Served:
    """A model that is being built: how to call it, and what to ask it."""

    kinds: Sequence[Callable[[], Any]]
    sizes: Sequence[str]
    """The sizes of each kind, for readers, and which of them nobody gave."""
    calls: Sequence[int]
    wait: Callable[[float], bool]
    stats: Callable[[], dict[str, Any]]


@reports_errors
def build(
    model: Annotated[str, typer.Argument(help="An ONNX model, or package.module:name of a PyTorch one.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The bundle.")],
    target: Annotated[str, typer.Option("--for", help="this, avx2, avx512, or a machine of the profile store.")] = "this",
    traffic: Annotated[Path | None, typer.Option(help=f"The calls it is going to get, as JSON: {TRAFFIC}.")] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="Instead of it: name=file.npy or name=number; random otherwise. PyTorch: 2x16:int64."),
    ] = None,
    dims: Annotated[list[str] | None, typer.Option("--dim", help="Instead of it: size of a named dimension, name=number.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a call there.")] = None,
    key: Annotated[Path | None, typer.Option(help="Sign with this key; the default is that of the settings.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Most seconds to spend.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compile a model ahead for the machine and the calls it is going to get, into one signed bundle."""
    from hotfuse.cache.place import opened

    target, features = _features(target)
    if features is not None:
        os.environ[LIMIT] = features  # before anything is compiled; workers inherit it
    kinds = _kinds(traffic, _given(model, inputs or [], dims or []))
    _writable(out)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hotfuse-build-") as folder:
        settings = Settings().with_(cache=folder, threads=threads, idle=False, artifacts=None, capture="background")
        if key is not None:
            settings = settings.with_(cache_key=str(key.expanduser().resolve()))
        held = opened(Path(folder), settings)
        if isinstance(held, str):
            raise InputError("the bundle cannot be signed", because=held, hint="hotfuse keys")
        sizes, tiers = _serve(model, kinds, settings, begin + seconds)
        report = _bundle(model, target, settings, held, out)
    took = round(time.monotonic() - begin, 2)
    report |= {"calls": sizes if as_json else "; ".join(sizes), "calls_per_tier": tiers, "seconds": took}
    if as_json:
        print_json(report)
    else:
        rows(("fact", "value"), report.items(), header=False)


def _writable(out: Path) -> None:
    """Whether the bundle can be written is known before minutes are spent on what is in it."""
    folder = out.absolute().parent
    because = "it is a folder" if out.is_dir() else ""
    because = because or (f"there is no folder {folder}" if not folder.is_dir() else "")
    because = because or ("" if os.access(folder, os.W_OK) else f"nothing can be written in {folder}")
    if because:
        raise InputError(f"{out} cannot be written", because=because)


def _features(target: str) -> tuple[str, str | None]:
    """What the target is called, and the features that code for it may use; None for this machine."""
    from hotfuse.machine.probe import usable_features
    from hotfuse.native.target import level_features

    if target == "this":
        return target, None
    found = level_features(target)
    name, wanted = (target, set(found)) if found is not None else _stored_machine(target)
    if missing := sorted(wanted - usable_features()):
        raise InputError(
            f"code for {name} cannot be tried here", because=f"this machine does not execute {', '.join(missing)}",
            hint="build on such a machine, or for a lesser one: --for avx2",
        )
    return name, " ".join(sorted(wanted))


def _stored_machine(name: str) -> tuple[str, set[str]]:
    """A machine of the profile store or the fleet's database by how its name begins, and what executes there."""
    try:
        with open_store() as store:
            found = machines_named(store.machines(), name)
    except InputError as e:
        hint = "this, avx2, avx512, or a machine of hotfuse db machines"
        raise InputError(f"no machine is called {name!r}", because=e.because or e.what, hint=hint) from e
    if len(executes := {m.identity.get("features", "") for m in found}) > 1:
        raise InputError(f"{name!r} names machines that execute different code", because=", ".join(m.name for m in found),
                         hint="more of the name")  # fmt: skip
    if (arch := found[0].identity.get("arch", "")) != platform.machine():
        raise InputError(f"code for {found[0].name} cannot be tried here", because=f"it is a {arch or 'unknown'} machine",
                         hint="build on such a machine")  # fmt: skip
    return found[0].name, set(executes.pop().split())


def _given(model: str, inputs: Sequence[str], dims: Sequence[str]) -> CallKind:
    """The one kind of call that options describe, as those of other commands do."""
    sizes = pairs(dims, "--dim")
    if not is_torch_name(model):
        return CallKind(sizes, pairs(inputs, "--input") or None, 1)
    if sizes:
        raise InputError("a PyTorch model has no named dims", hint="--input 2x16 for each of its inputs")
    return CallKind({}, list(inputs) or None, 1)


def _kinds(path: Path | None, given: CallKind) -> list[CallKind]:
    """The traffic that a file describes; one kind of call where there is none."""
    if path is None:
        return [given]
    if given.inputs or given.dims:
        raise InputError("the calls are described twice", hint="--traffic, or --input and --dim")
    try:
        listed = json.loads(path.read_text())
        if not isinstance(listed, list) or not 0 < len(listed) <= MAX_KINDS:
            raise ValueError(f"it has to be a list of 1 to {MAX_KINDS} kinds of calls")
        return [_kind(k) for k in listed]
    except (OSError, ValueError, TypeError) as e:
        if isinstance(e, OSError):
            raise InputError(f"{path} cannot be read", because=e.strerror or str(e), hint=f"a file with {TRAFFIC}") from e
        raise InputError(f"{path} does not describe calls", because=str(e), hint=TRAFFIC) from e


def _kind(data: Any) -> CallKind:
    if not isinstance(data, dict):
        raise ValueError("a kind of call is an object")
    if unknown := sorted(set(data) - {"dims", "inputs", "calls"}):
        raise ValueError(f"unknown field {unknown[0]!r}")
    calls = data.get("calls", 1)
    if not isinstance(calls, int) or not 0 < calls <= MAX_CALLS_A_KIND:
        raise ValueError(f"calls is {calls!r}, not a number from 1 to {MAX_CALLS_A_KIND}")
    return CallKind({str(k): str(v) for k, v in dict(data.get("dims", {})).items()}, data.get("inputs"), calls)


def _serve(model: str, kinds: Sequence[CallKind], settings: Settings, until: float) -> tuple[list[str], dict[str, int]]:
    """Serve the model until its best plans answer every kind of call: the sizes of each, and calls per tier."""
    import torch

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with contextlib.ExitStack() as held, torch.no_grad():
        served = (_torch if is_torch_name(model) else _onnx)(model, kinds, settings, held)
        title = f"building {model}"
        with console().status(title) if sys.stdout.isatty() else contextlib.nullcontext() as status:
            steady = rounds = 0
            while rounds < ROUNDS and steady < STEADY_ROUNDS and time.monotonic() < until:
                rounds += 1
                before = served.stats()["calls_per_tier"]
                for number, (call, times) in enumerate(zip(served.kinds, served.calls, strict=True), 1):
                    for _ in range(times):
                        _answered(call, number)
                served.wait(max(0.0, until - time.monotonic()))
                after = served.stats()["calls_per_tier"]
                compiled = sum(after[t] - before[t] for t in ("1", "2")) == sum(served.calls)
                steady = steady + 1 if compiled else 0
                if status is not None:
                    status.update(f"{title}: round {rounds}, {steady} of {STEADY_ROUNDS} in compiled plans")
            return list(served.sizes), served.stats()["calls_per_tier"]


def _answered(call: Callable[[], Any], number: int) -> None:
    """Call the model; what its own code raises is told as the caller's to mend, with the kind of call that it was."""
    try:
        call()
    except HotfuseError:
        raise
    except Exception as e:
        raise InputError(f"the model takes no call of kind {number}", because=error_text(e),
                         hint="the sizes and dtypes of its inputs: --traffic or --input") from e  # fmt: skip


def _onnx(model: str, kinds: Sequence[CallKind], settings: Settings, held: contextlib.ExitStack) -> Served:
    from hotfuse.session import InferenceSession

    session = held.enter_context(InferenceSession(model, settings=settings))
    if any(not isinstance(k.inputs, dict | None) for k in kinds):
        raise InputError("inputs of an ONNX model have names", hint='{"inputs": {"x": 0.5}}')
    feeds = [
        make_feeds(session.get_inputs(), {str(n): str(v) for n, v in (k.inputs or {}).items()}, k.dims, seed)
        for seed, k in enumerate(kinds)
    ]
    calls = [lambda f=f: session.run(None, f.arrays) for f in feeds]
    return Served(calls, [_sizes(f) for f in feeds], [k.calls for k in kinds], session.wait, session.stats)


def _sizes(feeds: Feeds) -> str:
    """The sizes of a call of a file, and which were made up: a bundle for other sizes is of little use."""
    said = ", ".join(f"{name} {'x'.join(map(str, a.shape))}" for name, a in feeds.arrays.items())
    chosen = ", ".join(f"{name}={feeds.dims[name]}" for name in sorted(feeds.chosen))
    return f"{said} (made up: {chosen}; --dim or --traffic gives them)" if chosen else said


def _torch(model: str, kinds: Sequence[CallKind], settings: Settings, held: contextlib.ExitStack) -> Served:
    import torch

    from hotfuse.api import jit

    torch.manual_seed(0)
    target, args, _ = load_torch(model, [str(i) for i in kinds[0].inputs or ()])
    given = [args, *(load_torch(model, [str(i) for i in k.inputs or ()])[1] for k in kinds[1:])]
    fast = held.enter_context(jit(target, settings=settings))
    sizes = [", ".join("x".join(map(str, x.shape)) for x in args if isinstance(x, torch.Tensor)) for args in given]
    return Served([lambda a=a: fast(*a) for a in given], sizes, [k.calls for k in kinds], fast.wait, fast.stats)


def _bundle(model: str, target: str, settings: Settings, folder: Folder, out: Path) -> dict[str, Any]:
    """Everything that was kept, as one file."""
    import torch

    from hotfuse.cache.address import machine_text, versions
    from hotfuse.cache.bundle import write_bundle
    from hotfuse.compile.kept import code_features

    entries = [(f.name, data) for f in folder.entries() if (data := folder.raw(f)) is not None]
    if not entries:
        raise InputError(f"nothing of {model} can be kept", because=folder.trouble or "it has no name that outlives a process")
    made = {
        "model": Path(model).name, "target": target, "machine": machine_text(code_features()), **versions(),
        "threads": str(settings.threads or torch.get_num_threads()), "host": platform.node(),
        "at": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }  # fmt: skip
    try:
        size = write_bundle(out, entries, made, folder.keys)
    except OSError as e:
        raise InputError(f"{out} cannot be written", because=e.strerror or str(e)) from e
    return {"bundle": str(out), "entries": len(entries), "bytes": size, "key": folder.keys.own.name, "target": target,
            "machine": made["machine"], "threads": made["threads"]}
