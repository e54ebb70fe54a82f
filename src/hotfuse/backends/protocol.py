"""The seam: the types of a target and of a back end. Code outside `backends` uses a back end through these types alone.

A back end is a folder and a row in `backends.registry`. There are three interfaces, each of which extends the one before:

    Backend        a graph and its weights become something callable (`library`, `cuda`)
    KernelBackend  tile kernels become code that is compiled in any process and loaded in the one that serves (`interp`, `llvm`)
    HostBackend    the one for this machine's own cores: native runs, probes, measured peaks (`llvm`)

What accelerators need besides is in `backends.device_protocol`.

The order in which a kernel back end is asked:

    lower(graph, core) -> Lowered                a group of nodes as one tile kernel, and how that is called
    compile_kernel(kernel) -> CompiledKernel     in a worker; plain bytes
    load_kernel(compiled) -> LoadedKernel        in the process that runs it
    glue(graph, lowered, loaded, constants)      as a function of the group's inputs
    compile_run / load_run                       several kernels as one call, where `runs_unavailable()` is empty
    text(stage, kernel)                          for readers, one text per name in `stages`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hotfuse.base.lazy_dataclass import dataclass

if TYPE_CHECKING:  # a seam needs the names of what passes through it, and nothing else
    import torch

    from hotfuse.ir.graph import Graph
    from hotfuse.lower.common.lowered import Lowered
    from hotfuse.lower.cpu.tiling import Core
    from hotfuse.lower.run.constants import Constants
    from hotfuse.lower.run.description import Run as RunSteps
    from hotfuse.lower.run.description import RunCode
    from hotfuse.machine.peaks import MachinePeaks
    from hotfuse.machine.topology import MemoryLevel
    from hotfuse.profile.records import Batch, Subject
    from hotfuse.tile.program import Kernel

Run = Callable[..., tuple[Any, ...]]
"""Takes the graph's inputs in order, gives its outputs in order."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A runnable graph, with what a reader may want to see of it."""

    graph: Graph
    run: Run
    backend: str
    source: str
    predicted_us: float | None = None
    """What a model of this machine said it would take, where there is one."""
    bytes: int = 0
    """Memory of weights that it has in another form."""
    failures: Callable[[], tuple[str, ...]] = tuple[str, ...]
    """What has gone wrong in calls so far, and was done in another way instead."""


class Backend(Protocol):
    """Compiles a closed graph against its weights."""

    name: str

    def compile(self, graph: Graph, weights: Mapping[str, Any]) -> Artifact:
        """The graph as something that runs; weights by param key."""
        ...


# --- what code is made for ----------------------------------------------------------------------------------------------


class Target(Protocol):
    """What code is made for and what that can hold. Peaks are measured, and no property of it (`HostBackend.measure_peaks`)."""

    @property
    def name(self) -> str:
        """`avx512`, `sm_90`, …"""
        ...

    @property
    def device(self) -> str:
        """torch's name of the kind of device: `cpu`, `cuda`."""
        ...

    @property
    def features(self) -> tuple[str, ...]:
        """What code may use; all of it was seen to execute."""
        ...

    @property
    def lanes(self) -> int:
        """fp32 numbers that one instruction works on: lanes of a vector, threads of a warp."""
        ...

    @property
    def registers(self) -> int:
        """Such vectors that one thread (or warp) may hold at once."""
        ...

    @property
    def memory(self) -> tuple[MemoryLevel, ...]:
        """From the fastest to the largest."""
        ...

    def has(self, feature: str) -> bool:
        """Whether code may use a feature."""
        ...


# --- kernels ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Code of one kernel: plain data, made in any process for any target."""

    kernel: Kernel
    target: Target
    code: bytes
    seconds: Mapping[str, float]
    """Time per phase of compiling."""
    multiplies: str = ""
    """With which instructions its products are made, where it has some."""


class LoadedKernel(Protocol):
    """A kernel that can run in this process."""

    @property
    def kernel(self) -> Kernel:
        """What it was made of."""
        ...

    @property
    def address(self) -> int:
        """Where its native code is, for drivers of runs; 0 where no native code can call it."""
        ...

    @property
    def symbol(self) -> str:
        """What its code is called in there."""
        ...

    def release(self) -> None:
        """Free the code; no call may be in it, and none may follow."""
        ...


class BoundKernel(NamedTuple):
    """A kernel bound to its memory, to be timed."""

    call: Callable[[], object]
    results: Sequence[Any]
    keep: tuple[Any, ...]
    """What must live as long."""


class WatchedCall(NamedTuple):
    """What a watched call of a run told."""

    ns: tuple[int, ...]
    """Nanoseconds of every partition; none where it was not asked for or the fallback answered."""
    outcomes: tuple[int, ...]
    """By branch: 0 where it was not reached (or not asked for), 1 where it went to its second side, 2 where to its first."""
    counted: Mapping[str, tuple[int, ...]]
    """By value that a counting kernel stored: its counters (`tile.instrument`)."""


@dataclass(frozen=True, slots=True)
class TeamTimes:
    """What a run learned of calls of one size class; times in ns, 0 where there was none."""

    hot: int
    cold: int
    cold_alone: int
    hot_alone: int
    cold_calls: int
    hot_calls: int
    woken: int = 0
    """How often calls in a row on one thread lost so much that their team was woken."""

    @property
    def serial_after_a_pause(self) -> bool:
        """Whether calls after a pause stay on the calling thread."""
        return 0 < self.cold_alone < self.cold

    @property
    def serial_in_a_row(self) -> bool:
        """Whether calls that follow each other do."""
        return 0 < self.hot_alone < self.hot


class LoadedRun(Protocol):
    """A run of kernels that is entered once: `enter(tensor...)` gives its results."""

    code: RunCode
    enter: Callable[..., tuple[Any, ...]]
    body: int
    """Where the driver's code is."""
    symbol: str
    """What it is called in the run's code."""

    def timed(self, *args: torch.Tensor) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """A call with the nanoseconds of every partition; those of a call that fell back are all 0."""
        ...

    def watched(self, want: int, *args: torch.Tensor) -> tuple[tuple[Any, ...], WatchedCall]:
        """A call that tells what it is asked for (`lower.run.description`: CLOCK, COUNTS, …)."""
        ...

    def count_with(self, kernels: Mapping[int, int], keep: Sequence[Any]) -> None:
        """Where a call is asked for counts, enter these kernels instead: by number, where their code is."""
        ...

    @property
    def fell_back(self) -> int:
        """Calls that the fallback answered."""
        ...

    @property
    def grown(self) -> tuple[int, int]:
        """Caches that were appended to in place, and those that were copied into memory with room first."""
        ...

    @property
    def allocated(self) -> int:
        """Arenas allocated so far."""
        ...

    @property
    def arena_bytes(self) -> int:
        """Memory that is kept between calls now, at most."""
        ...

    @property
    def team_times(self) -> tuple[TeamTimes, ...]:
        """What it learned of calls with a team and on one thread, by size class."""
        ...

    def forget_team_times(self) -> None:
        """Have it learn that anew."""
        ...


class KernelBackend(Backend, Protocol):
    """Makes code of tile kernels."""

    stages: tuple[str, ...]
    """Names of the texts that a kernel has on its way, first to last; the first is `tile`."""
    competes: bool
    """Whether kernels have to be faster than the library to be kept. Those of a back end that exists to check others have not."""

    def target(self) -> Target:
        """What code is made for in this process."""
        ...

    def lower(self, graph: Graph, core: Core) -> Lowered:
        """A closed group of nodes as one kernel; raises CannotLower with the reason where there is none."""
        ...

    def compile_kernel(self, kernel: Kernel) -> CompiledKernel:
        """Code for this machine's target; from any process."""
        ...

    def load_kernel(self, compiled: CompiledKernel) -> LoadedKernel:
        """Link code into this process; raises an InternalError where it cannot run here."""
        ...

    def glue(self, graph: Graph, lowered: Lowered, kernel: LoadedKernel, constants: Constants) -> Run:
        """A group as a function of its inputs; `lowered` speaks of the graph's values by name."""
        ...

    def bound(
        self, graph: Graph, lowered: Lowered, kernel: LoadedKernel, weights: Mapping[str, torch.Tensor], inputs: Sequence[Any],
        threads: int, results: Sequence[Any] = (),
    ) -> BoundKernel:  # fmt: skip
        """A kernel on memory of its own, or on the results of another one, so that a call is its code and little else."""
        ...

    def awake(self, threads: int) -> AbstractContextManager[None]:
        """While a kernel is timed by itself: its threads as they are inside a run."""
        ...

    def serial_because(self) -> str:
        """Why kernels run on one thread; empty where they may have several."""
        ...

    def runs_unavailable(self) -> str:
        """Why several kernels cannot be one call in this process; empty if they can."""
        ...

    def compile_run(self, run: RunSteps) -> bytes:
        """The code that drives a run of kernels; in a worker."""
        ...

    def load_run(
        self, code: RunCode, table: Sequence[int], keep: Sequence[Any], fallback: Run, *, assumes: bool = False
    ) -> LoadedRun:
        """Link a run; `table` has the values of its words, `fallback` answers what native code does not; a fault of a run that
        `assumes` something says that the call is none for it, and is raised at once."""
        ...

    def text(self, stage: str, kernel: Kernel) -> str:
        """A kernel at one of the stages."""
        ...


# --- this machine's own cores -------------------------------------------------------------------------------------------


class LoadedProbes(Protocol):
    """Native passes over tensors that fill records of the profile."""

    publish: Callable[[int, int, int], None]
    copies: int
    """Values that had to be copied to be looked at."""
    refused: int
    """Values of kinds that have no probe."""

    def look(self, t: Any, batch: Batch, s: Subject, item: int, flags: int = 0, keep: int = 1) -> bool:
        """Add a value's record to a batch; False for what cannot be looked at."""
        ...


class SpeedProbe(Protocol):
    """A short look at how fast the machine is: seconds by what was probed."""

    def __call__(self) -> dict[str, float]:
        """Look now."""
        ...

    def baseline(self, peaks: MachinePeaks) -> dict[str, float]:
        """What it should take at measured peaks."""
        ...


class HostBackend(KernelBackend, Protocol):
    """The back end for the cores that Python runs on: it also looks at memory, and measures the machine."""

    def measure_peaks(self, threads: Sequence[int] | None = None) -> MachinePeaks:
        """The machine's peaks for these numbers of threads; seconds of work."""
        ...

    def speed_probe(self) -> SpeedProbe:
        """Looks at the machine's speed beside serving."""
        ...

    def compile_probes(self) -> dict[str, bytes]:
        """Code of every probe, by symbol; in a worker."""
        ...

    def load_probes(self, codes: Mapping[str, bytes]) -> LoadedProbes:
        """Link the probes."""
        ...
