"""A plan on a device with generated kernels, in the serving process: groups are compiled by workers, tried here, and put together.

    device plan    a worker groups the graph
    strides        one run of the library's kernels shows how intermediate tensors lie
    device unit    workers compile each distinct group in several tilings (for a first plan in the likeliest alone); one without a
                   kernel is asked for again in two halves
    trial          each kernel against the library's on the device, with the data of a real call (`compile.device.trial`)
    tuning         kernels exchanged one at a time, and the whole plan measured (`compile.device.tuning`); what came of it is kept
    folding        the same once more with layer norms taken in by products (`compile.device.folding`), where there are such; the
                   faster of both plans is taken
    outline        one function of generated kernels and library operators, in order

Everything here runs on a background thread. Time for it is bounded; what was not tried by then stays with the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from hotfuse.base.errors import HotfuseError
from hotfuse.base.settings import Settings
from hotfuse.compile.device.channels_last import channels_last, faster
from hotfuse.compile.device.generation import FOLDED, MARGIN, NORMS, DeviceJob, Generation, before_calls
from hotfuse.compile.device.remembered import STAYS
from hotfuse.compile.device.trial import Differ
from hotfuse.compile.device.tuning import MIN_GAIN, ROUNDS
from hotfuse.compile.parts import GeneratedPlan
from hotfuse.ir.graph import Graph
from hotfuse.machine.device_clock import DeviceTimer


def generate(
    graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor], settings: Settings, device: torch.device,
    differ: Differ, stop: Callable[[], bool] = lambda: False, *, few: bool = False,
) -> GeneratedPlan:  # fmt: skip
    """The graph with generated kernels where they won; raises InternalError where none did. `few`: a plan that is there soon, of
    the likeliest kernels alone; where an earlier process has chosen, that choice is there as soon."""
    graph, said = _in_order(graph, weights, device)
    made = _generated(DeviceJob(graph, weights, sample, settings, device, differ, stop, few))
    return _noted(made, said) if said else made


def _in_order(graph: Graph, weights: Mapping[str, torch.Tensor], device: torch.device) -> tuple[Graph, str]:
    """The graph with channels last where the library's convolutions are faster so, and what was found, in words."""
    last = channels_last(graph)
    if last is graph:
        return graph, ""

    def seconds(run: Callable[[], object]) -> float:
        timer = DeviceTimer(run, device)
        return min(timer.seconds() for _ in range(ROUNDS))

    with torch.no_grad(), before_calls(device):
        planes_us, last_us = faster(graph, weights, device, seconds)
    said = f"convolutions: {last_us:.1f} us with channels last, {planes_us:.1f} with planes"
    return (last, said) if last_us < MARGIN * planes_us else (graph, said)


def _generated(job: DeviceJob) -> GeneratedPlan:
    stop = job.stop
    plain = Generation(job)
    if plain.few:
        return plain.plan()
    known = plain.kept.tiling(NORMS) if plain.foldable else STAYS
    if known == FOLDED:
        return Generation(job, folded=True).plan()
    made = plain.plan()
    if known == STAYS:
        plain.keep({})
        return made
    try:
        other = Generation(job, folded=True, before=plain.units)
        other.compile_and_try()
        if (alone := other.alone_us()) >= (own := plain.alone_us()):  # nothing as a whole would make up for that
            plain.keep({NORMS: STAYS})
            said = f"{alone:.1f} us of kernels by themselves where products take them in, {own:.1f} with kernels of their own"
            return _noted(made, f"layer norms: {said}")
        return _faster(made, plain, other.assembled(), other)
    except HotfuseError as e:
        if stop():
            raise
        plain.keep({})
        return _noted(made, f"layer norms have kernels of their own: {(e.because or e.what)[:200]}")


def _faster(made: GeneratedPlan, plain: Generation, folded: GeneratedPlan, other: Generation) -> GeneratedPlan:
    """The faster of two plans as a whole, on the device; that of products that take norms in must save as much as an exchange."""
    with torch.no_grad(), plain.before_calls():
        timers = [plain.timer(run) for run in (made.run, folded.run)]
        rounds = [[plain.pace(t.seconds) for t in timers] for _ in range(ROUNDS)]
        least = [min(r[i] for r in rounds) for i in range(2)]
    said = f"layer norms: {least[1] * 1e6:.1f} us taken in by products around them, {least[0] * 1e6:.1f} in kernels of their own"
    if least[1] < (1 - MIN_GAIN) * least[0]:
        plain.keep({**other.chosen(), NORMS: FOLDED})
        return _noted(folded, said)
    plain.keep({NORMS: STAYS})
    return _noted(made, f"{said} ({folded.notes[0]})")


def _noted(made: GeneratedPlan, note: str) -> GeneratedPlan:
    head, *others = made.notes
    return replace(made, notes=(head, note, *others))
