"""Packed plans on an accelerator: the library's kernels for any number of live rows, generated ones for the usual number.

How rows are counted and packed there is in `runtime.serve.device_packing`; what a packed graph is, in `specialize.packing`. Kernels
are generated for sizes that are numbers, so they are made for one capacity: one that the most ordinary kept call needs, and others
like it. Calls that need somewhat less take that bucket too; others run in the library's kernels, recorded as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.backends import registry
from hotfuse.backends.device_protocol import RecordedRun
from hotfuse.backends.protocol import Run
from hotfuse.base.errors import HotfuseError, InternalError
from hotfuse.compile.workers.service import in_background
from hotfuse.ir.graph import Graph
from hotfuse.machine.device_clock import DeviceTimer
from hotfuse.machine.device_stream import in_own_stream
from hotfuse.runtime.plan import BetCount, Plan
from hotfuse.runtime.serve.device_packing import (
    DevicePackedRun,
    DevicePacker,
    capacity,
    least_generated,
    usual_capacity,
)
from hotfuse.runtime.serve.packing import MaskPacker
from hotfuse.runtime.tierup.agreement import disagreement
from hotfuse.runtime.tierup.layers.layer import Call, Composer, Layer, composed
from hotfuse.runtime.tierup.packing_share import break_even_share
from hotfuse.specialize.recurring_sizes import at_sizes
from hotfuse.specialize.table import PADDING, AttemptKey

ROUNDS = 3
"""Times that each of the three runs is measured for the share up to which packing pays; the least counts."""


def device_packed_plan(
    graph: Graph, packer: MaskPacker, mean: float, calls: Sequence[Call], inner: tuple[Layer, ...], composer: Composer
) -> Plan:
    """Live rows alone up to the share of them that is measured to pay; `calls` can be packed, the most ordinary first."""
    asks, sample = DevicePacker(packer), calls[0]
    mask = sample[packer.mask]
    rows = mask.numel()
    bucket = usual_capacity([capacity(round(packer.share(c) * rows), rows) for c in calls])
    usual = torch.zeros(bucket, dtype=torch.uint8, device=mask.device)
    library = composer.plain(packer.packing.graph)
    by_bucket: dict[int, Run] = {}
    pieces, notes = [library], list[str]()
    if composer.generates:
        try:
            made = _generated(packer, asks, sample, usual, inner, composer)
        except HotfuseError as e:  # the library's kernels serve that capacity too
            notes.append(f"no kernels are generated for {bucket} rows: {e.because or e.what}")
        else:
            by_bucket[bucket] = _unrecorded(made.run)
            pieces.append(made)
            least = least_generated(bucket)
            notes.append(f"calls that need {least} to {bucket} rows run in generated kernels, others in the library's")
    other = composer.recording().plan(graph, calls, inner)

    def packed(*given: Any) -> tuple[Any, ...]:
        *inputs, space = given
        return by_bucket.get(space.shape[0], library.run)(*inputs, *asks.made(inputs[packer.mask], space))

    limit = _paying_share(packer, packed, other.run, sample, usual)
    run = DevicePackedRun(asks, limit, _recorded(asks.facts, mask.device), _recorded(packed, mask.device), other.run,
                          generated=bucket if by_bucket else 0, usual=bucket)  # fmt: skip
    return _plan(graph, packer, run, mean, [*pieces, other], notes)


def _generated(
    packer: MaskPacker, asks: DevicePacker, sample: Call, usual: torch.Tensor, inner: tuple[Layer, ...], composer: Composer
) -> Plan:
    given = [*sample, *asks.made(sample[packer.mask], usual)]
    sizes = bind(packer.packing.graph, [tuple(t.shape) for t in given])
    if isinstance(sizes, Mismatch):
        raise InternalError("a kept call does not fit the packed graph", because=str(sizes))
    return composer.plan(at_sizes(packer.packing.graph, dict(sizes)), [given], inner)


def _unrecorded(run: Run) -> Run:
    """What a plan records, so that it can be a part of another recording."""
    return getattr(run, "kernel_by_kernel", run)


def _recorded(run: Run, device: torch.device) -> RecordedRun:
    backend = registry.device(device.type)
    if backend is None:
        raise InternalError(f"nothing can be recorded on {device}", because="no back end is known for such devices")
    return backend.recorded(run, device, in_background, lambda got, want: disagreement(got, want, 0.0))


def _paying_share(packer: MaskPacker, packed: Run, padded: Run, call: Call, usual: torch.Tensor) -> float:
    """The share of live rows up to which packing pays, in the device's own time: nothing is recorded on this thread."""
    mask = call[packer.mask]
    everything = list(call)
    everything[packer.mask] = torch.full_like(mask, packer.packing.mask.live)
    all_rows = torch.zeros(mask.numel(), dtype=torch.uint8, device=mask.device)
    runs = (lambda: padded(*call), lambda: packed(*call, usual), lambda: packed(*everything, all_rows))
    with torch.no_grad(), in_own_stream(call):
        for run in runs:
            run()
        timers = [DeviceTimer(run, mask.device) for run in runs]
        rounds = [[t.seconds() for t in timers] for _ in range(ROUNDS)]
    least = [min(r[i] for r in rounds) for i in range(len(runs))]
    return break_even_share(least[0], least[1], least[2], packer.share(call))


def _plan(
    graph: Graph, packer: MaskPacker, run: DevicePackedRun, mean: float, pieces: Sequence[Plan], notes: Sequence[str]
) -> Plan:
    packing = packer.packing

    def counters() -> dict[str, int]:
        told = {f"padded_{why.name.lower()}": n for why, n in sorted(run.why_not.items())}
        kept = {f"packed_{k}": n for k, n in run.packed.counters().items()}
        return {"packed_calls": run.calls, "padded_calls": run.padded_calls, "padded_unread": run.unread, "packed_rows": run.live,
                "packed_computed": run.computed, "packed_early": run.guessed, "packed_early_in_vain": run.wrong,
                **kept, **told}  # fmt: skip

    about = (
        f"rows that {packing.mask.name} hides are not computed where at most {run.limit:.0%} live ({mean:.0%} do): "
        f"{packing.products} products and attentions on packed rows; else as before"
    )

    def counted() -> BetCount:
        return BetCount(run.calls, run.padded_calls, values=(packing.mask.name,))

    return composed(graph, run, "packed", about, pieces, notes=notes, counters=counters, begin=run.begin,
                    counts=(AttemptKey(PADDING), counted))
