"""The dynamic compilation graph: a graph's units, which are cut, fused and decided while others compile.

A worker groups the graph. Each distinct group is a unit, however often it is used. The answer to a unit is a kernel, a cut, or a
refusal. The partition manager holds the partitioning, so every change is checked and recorded. Any intermediate partitioning can
become a plan: groups without a kernel run in the library. `compile.compilation` decides the order of compiling, and
`compile.unit_pairs` which neighbours are worth a common kernel.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from typing import Any

from hotfuse.analysis.resources import Bound, ResourceUse, Work
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.account import RUNS_A_CALL
from hotfuse.compile.answer_bodies import GroupedBody, GroupFacts, UnitKernel
from hotfuse.compile.frequency import ControlBodies, Outcomes, frequencies, sides
from hotfuse.compile.request_context import text_id
from hotfuse.compile.value import Facts
from hotfuse.compile.variants.variant_table import VariantTable
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.checked_json import encoded
from hotfuse.ir.control_bodies import control_name, inside
from hotfuse.ir.graph import Node
from hotfuse.ir.text import parse, show
from hotfuse.partition.change import Diff
from hotfuse.partition.manager import Partitioned, partitioned, partitioning, split
from hotfuse.profile.snapshot import ControlSeen

UseSite = tuple[int, int]
"""A use of a unit: the level it is in, and the number of its partition there."""


class UnitState(StrEnum):
    """Where a unit stands."""

    WAITING = "waiting"
    RUNNING = "compiling"
    HELD = "waiting for what it may become part of"
    DONE = "has a kernel"
    LIBRARY = "stays with the library"
    CUT = "was cut"
    FUSED = "became part of another"


OVER = frozenset({UnitState.CUT, UnitState.FUSED})


@dataclass(slots=True, eq=False)
class Unit:
    """A group of nodes and all places where the same group stands."""

    key: str
    kind: str
    ops: str
    facts: Facts
    uses: list[UseSite] = field(default_factory=list[UseSite])
    state: UnitState = UnitState.WAITING
    why: str = ""
    kernel: int = -1
    use: ResourceUse | None = None
    library_us: float = 0.0
    of: tuple[Unit, Unit] | None = None
    """The neighbours it would replace, for one put together from two; its uses are the places of the first."""
    promised_us: float = 0.0
    """What it is thought to save over the two kernels it would replace."""
    version: int = 0
    """Which sizes it was asked for with."""

    @property
    def apart_us(self) -> float | None:
        """What the kernels of the two take, where both are known."""
        if self.of is None or self.of[0].use is None or self.of[1].use is None:
            return None
        return self.of[0].use.us + self.of[1].use.us


@dataclass(slots=True)
class GraphLevel:
    """A graph: the main one, or that of a branch."""

    ident: str
    text: str
    parts: Partitioned
    units: dict[int, str]
    """Per partition, by number, its unit's key; library nodes have none."""
    branches: dict[int, list[int]]
    """Per partition that is a control node, the levels of its branches."""

    def control(self, number: int) -> Node:
        """The control node that a partition is."""
        return self.parts.graph.nodes[self.parts.part(number).nodes[0]]


def grouping_name(bodies: Sequence[GroupedBody]) -> str:
    """A name for the groups that a worker answered with: equal for the same groups of the same graph."""
    return text_id(repr([(b.id, [(g.nodes, g.kind) for g in b.groups]) for b in bodies]))


@dataclass(frozen=True, slots=True)
class FusionRefusal:
    """Two neighbours that stay two kernels, and why."""

    first: str
    second: str
    because: str

    def __str__(self) -> str:
        return f"{self.first} and {self.second} stay two kernels: {self.because}"


@dataclass(slots=True)
class CompileGraph:
    """All levels of a graph and all their units."""

    levels: list[GraphLevel] = field(default_factory=list[GraphLevel])
    units: dict[str, Unit] = field(default_factory=dict[str, Unit])
    kernels: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    codes: list[bytes] = field(default_factory=list[bytes])
    notes: Counter[str] = field(default_factory=Counter[str])
    refusals: list[FusionRefusal] = field(default_factory=list[FusionRefusal])
    choices: list[str] = field(default_factory=list[str])
    """What the fusion engine decided before anything was compiled."""
    variant_notes: list[str] = field(default_factory=list[str])
    """Units with several kernels for several sizes, and why others have one."""
    counts: Counter[str] = field(default_factory=Counter[str])
    predicted_us: float | None = None
    """What the whole graph was predicted to take, before anything was compiled."""
    level_runs: tuple[float, ...] = ()
    """How often each level is expected to run in a call."""
    outcomes: Outcomes = field(default_factory=dict[str, ControlSeen])
    """What that rests on."""
    _scale: float = 1.0
    """By how much the library's times were misjudged, as the whole graph's shows."""
    _numbers: dict[str, int] = field(default_factory=dict[str, int])

    # --- growing ---------------------------------------------------------------------------------

    def begin(
        self, bodies: Sequence[GroupedBody], library_us: float | None, outcomes: Outcomes, sizes: Mapping[str, int]
    ) -> None:
        """Take over the worker's grouping; a measured time of the whole graph corrects what its parts are thought to take."""
        self.predicted_us = bodies[0].predicted_us if bodies else None
        for body in bodies:
            starts = list(itertools.accumulate((g.nodes for g in body.groups), initial=0))
            groups = [range(a, b) for a, b in itertools.pairwise(starts)]
            parts = partitioned(parse(body.graph), groups, "grouped by access class")
            self.choices += body.choices
            nested = {int(i): list(within) for i, within in body.branches.items()}
            self.levels.append(GraphLevel(body.id, body.graph, parts, {}, nested))
        self.weigh(outcomes, sizes)
        each = (sum(g.library_s or 0.0 for g in b.groups) for b in bodies)
        guessed = sum(seconds * runs for seconds, runs in zip(each, self.level_runs, strict=True))
        self._scale = library_us * 1e-6 / guessed if library_us and guessed else 1.0
        for place, body in enumerate(bodies):
            for number, about in enumerate(body.groups):
                self._use(about, (place, number))
        self.counts["deduplicated"] = sum(len(u.uses) - 1 for u in self.units.values())

    def weigh(self, outcomes: Outcomes, sizes: Mapping[str, int]) -> None:
        """Calls showed which ways they go: how often levels run follows from that."""
        nest = [[ControlBodies(level.control(n), bodies) for n, bodies in level.branches.items()] for level in self.levels]
        self.outcomes, self.level_runs = outcomes, frequencies(nest, outcomes, sizes)

    def runs_of(self, unit: Unit) -> float:
        """How often a unit's kernel is expected to run in a call: its uses, each as often as its level runs."""
        return sum(self.level_runs[level] for level, _ in unit.uses)

    def _use(self, about: GroupFacts, place: UseSite) -> Unit | None:
        """A group stands at a place: one more use of its unit, which may be new."""
        key = about.key
        if key is None or about.work is None:
            return None
        self.levels[place[0]].units[place[1]] = key
        if key not in self.units:
            seconds = about.library_s
            library = None if seconds is None else seconds * (1.0 if about.library_measured else self._scale)
            facts = Facts(about.kind, about.work, library, about.roofline_s, about.ops, about.kernel_s, about.high_s)
            self.units[key] = Unit(key, about.kind, about.ops, facts)
        self.units[key].uses.append(place)
        return self.units[key]

    def add_kernel(self, unit: Unit, answer: UnitKernel, codes: Sequence[bytes]) -> None:
        """A unit has a kernel, which another of the same text may have brought already, and perhaps others for other sizes."""
        about = answer.kernel
        if answer.text not in self._numbers:
            first = self._numbers[answer.text] = len(self.codes)
            variants = VariantTable.from_json(about.variants)
            numbered = None if variants is None else variants.numbered(lambda k: first + k).to_json()
            self.kernels += [encoded(k) for k in (replace(about, variants=numbered), *answer.also)]
            self.codes += codes
            self.counts["dispatched"] += variants is not None
            if variants is not None:
                self.variant_notes.append(f"{unit.ops} is several kernels: {variants}")
            self.variant_notes += [f"{unit.ops}: {note}" for note in answer.notes]
        unit.kernel = self._numbers[answer.text]
        unit.state, unit.library_us = UnitState.DONE, about.library_us or 0.0
        unit.use = None if about.use is None else _use_from(about.use)
        self.counts["compiled"] += 1

    def cut(self, unit: Unit, at: int, why: str, pieces: Sequence[Sequence[GroupFacts]]) -> list[Unit]:
        """A unit in two, wherever it stands; the units that its first use became."""
        unit.state, unit.why = UnitState.CUT, why
        self.notes[why] += 1
        self.counts["splits"] += 1
        found: list[Unit] = []
        for i, (body, number) in enumerate(unit.uses):
            level = self.levels[body]
            level.parts = split(level.parts, number, at, why)
            del level.units[number]
            halves = pieces[i] if i < len(pieces) else pieces[0]  # a use that came while it was compiled
            for piece, made in zip(halves, level.parts.history.diffs[-1].added, strict=True):
                if (new := self._use(piece, (body, made))) is not None and i == 0:
                    found.append(new)
        unit.uses = []
        return found

    def leave_to_library(self, unit: Unit, why: str) -> None:
        """No kernel: the library; or for two that were tried as one, what they were before."""
        unit.state, unit.why = UnitState.LIBRARY, why
        if unit.of is None:
            self.notes[why] += 1
            self.counts["refused"] += 1
            return
        first, second = unit.of
        for u in (first, second):
            if u.state is UnitState.HELD:
                u.state = UnitState.WAITING
        self.refuse(first, second, why.partition(": ")[2] or why)

    def refuse(self, first: Unit, second: Unit, because: str) -> None:
        """Two neighbours stay apart."""
        self.refusals.append(FusionRefusal(first.ops, second.ops, because))
        self.counts["fusions_refused"] += 1

    # --- what there is ---------------------------------------------------------------------------

    def message(self) -> wire.Message:
        """What there is so far, in the form of an answer: the body, its kernels and their code."""
        return {**self._body(0), "kernels": list(self.kernels), "notes": self.note_lines()}, list(self.codes)

    def note_lines(self) -> list[str]:
        """Every decision against a kernel, with how often it was taken."""
        return [f"{n} ({k} times)" if k > 1 else n for n, k in self.notes.items()]

    def _body(self, place: int) -> dict[str, Any]:
        """[first node, end, kernel or -1] per part, and the bodies of parts that branch."""
        level = self.levels[place]
        made = partitioning(level.parts)
        parts: list[list[int]] = []
        bodies: dict[str, list[dict[str, Any]]] = {}
        for part, run in zip(level.parts.parts, made.parts, strict=True):
            unit = self.units.get(level.units.get(part.number, ""))
            kernel = unit.kernel if unit is not None and unit.state is UnitState.DONE else -1
            entered = self._entered(level, part.number)
            if parts and kernel < 0 and parts[-1][2] < 0 and not entered and str(len(parts) - 1) not in bodies:
                parts[-1][1] = run.last
            else:
                parts.append([run.first, run.last, kernel])
            if entered:
                bodies[str(len(parts) - 1)] = entered
        text = level.text if made.graph is level.parts.graph else show(made.graph)
        return {"graph": text, "parts": parts, "branches": bodies}

    def _entered(self, level: GraphLevel, number: int) -> list[dict[str, Any]]:
        """The branches of a control node, each a body of its own; none where no branch has a kernel.

        A loop's one body counts in any case: what is too small for a kernel of its own may be worth one inside a run.
        """
        made = [self._body(b) for b in level.branches.get(number, ())]
        return made if len(made) == 1 or any(b["branches"] or any(kernel >= 0 for _, _, kernel in b["parts"]) for b in made) else []

    def history(self) -> tuple[Diff, ...]:
        """How the main graph came to be partitioned as it is."""
        return self.levels[0].parts.history.diffs if self.levels else ()

    def describe(self) -> list[str]:
        """Every unit with where it stands, the most used first, and the pairs that stay apart."""
        shown = [u for u in self.units.values() if u.of is None or u.state is UnitState.DONE]
        lines = [_line(u, self.runs_of(u)) for u in sorted(shown, key=lambda u: -self.runs_of(u))]
        return self._frequencies() + lines + self.variant_notes + [str(r) for r in dict.fromkeys(self.refusals)] + self.choices


    def _frequencies(self) -> list[str]:
        """How often nested graphs run, and what that rests on: one line a control node of the main graph, then of those in it."""
        lines: list[str] = []

        def enter(place: int, path: str) -> None:
            level = self.levels[place]
            for number, bodies in level.branches.items():
                node = level.control(number)
                name = control_name(node, path)
                seen = self.outcomes.get(name)
                runs = ", ".join(f"{side} {self.level_runs[b]:.3g}" for side, b in zip(sides(node), bodies, strict=True))
                lines.append(f"{RUNS_A_CALL} {name}: {runs} ({f'{seen.n} seen' if seen is not None else 'assumed'})")
                for i, body in enumerate(bodies):
                    enter(body, inside(name, i))

        if self.levels:
            enter(0, "")
        return lines


def _line(unit: Unit, runs: float) -> str:
    often = "" if runs == len(unit.uses) else f", {runs:.3g} runs a call"
    text = f"{unit.ops} x{len(unit.uses)}{often}: {unit.state.value}"
    if unit.use is None:
        return text
    bound = f"{unit.use.bound.value}-bound at {unit.use.utilization:.0%}"
    return f"{text}, {unit.use.us:.1f} us, the library {unit.library_us:.1f}, {bound}"


def _use_from(data: Mapping[str, Any]) -> ResourceUse:
    return ResourceUse(
        Work.from_dict(data),
        float(data["us"]),
        Bound(data["bound"]),
        float(data["utilization"]),
        int(data["scratch"]),
        int(data["vectors"]),
        int(data["parallel"]),
    )
