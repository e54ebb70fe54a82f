"""Decisions and events are values: `explain()`, the command line and the tests read the same objects."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import field
from enum import StrEnum

from hotfuse.base.debug import DECISIONS, say
from hotfuse.base.lazy_dataclass import dataclass

EvidenceValue = str | int | float | bool | None


class Action(StrEnum):
    """What was done."""

    CAPTURE = "capture"
    SPECIALIZE = "specialize"
    DEPLOY = "deploy"
    KEEP = "keep"
    REFUSE = "refuse"
    DROP = "drop"
    FALLBACK = "fallback"
    NOTICE = "notice"


class Why(StrEnum):
    """Every reason a decision can have; a new reason is a new member, never free text."""

    FIRST_CALL = "first call of this structure"
    NEW_SHAPE = "shapes outside every captured guard"
    VERIFIED = "outputs agreed with the model's own"
    MISMATCH = "outputs disagreed with the model's own"
    NOT_CAPTURABLE = "the model cannot be captured"
    NOT_SENDABLE = "the model cannot be sent to a worker process"
    WORKER_DIED = "the capture worker died"
    TIMEOUT = "the capture took too long"
    WRONG_ANSWER = "a worker's answer does not fit its request"
    RANDOM = "the model draws random numbers"
    STATEFUL = "the model changes its own state"
    READS_DATA = "its code reads tensor data; the paths that calls take are recorded and followed"
    OTHER_PATH = "calls take another path through code that reads their data"
    SIDE_EFFECT = "the model's code does more than compute, which a graph would leave out"
    WEIGHTS_CHANGED = "a parameter or buffer changed"
    WEIGHTS_WRITTEN_UNSEEN = "a weight was written in a way that torch does not show, which is noticed late"
    MODEL_CHANGED = "a module attribute, hook or mode changed"
    GRAD_NEEDED = "gradients were asked for"
    GRAD_MODE = "the model's code behaves differently when gradients are enabled"
    DIFFERENTIATED = "backward passes follow its calls"
    TOO_MANY = "the limit of captured graphs was reached"
    FASTER = "it measured faster on a real call"
    NOT_FASTER = "it did not measure faster on a real call"
    NOT_MEASURED = "calls interrupted every round of its race; it will be tried again"
    BETTER = "it measured better by the chosen objective on a real call"
    NOT_BETTER = "it did not measure better by the chosen objective on a real call"
    NOT_COMPILED = "no kernels could be made for it"
    RUN_FAILED = "the captured graph raised an error"
    LEARNING_FAILED = "what a call showed could not be recorded"
    BACKGROUND_FAILED = "background work raised an error"
    NO_DEVICE = "there is no device to run on"
    NO_MAPPING = "the operator has no mapping of its own"
    RECURS = "it recurs in enough calls to be compiled for"
    REGRESSED = "it is slower than what it replaced"
    CIRCUMSTANCES = "threads, cores, their speed or the number of callers changed; decisions are open again"
    RARE = "calls of its kind have become rare"
    NOT_PACKED = "padded rows cannot be left out, or there are too few"
    NOT_ROW_BY_ROW = "rows of a batch come twice, but cannot be computed once"
    NO_ZERO_ROWS = "no rows of zeros worth leaving out were found"
    TOO_MUCH_MEMORY = "compiled plans took more memory than is allowed"
    DRIFT = "what flows through the graph changed"
    UNSUPPORTED_CALL = "the call's arguments cannot be described"
    IDLE = "idle time was used to measure kernels"
    RETRAINED = "the performance model was trained again in idle time"
    WON_BEFORE = "it won in an earlier process, and was proven again"
    LOST_BEFORE = "it clearly lost in earlier processes, and nothing that mattered then has changed"
    BOTTLENECK = "a strategy addresses what limits it"
    WEIGHTS_MOVED = "its partitions take other shares of the time than the plan assumed"
    SAME_PLAN = "planning again gave the plan that serves"
    UNPROMISING = "such a strategy did not help against this bottleneck before"
    SPEED_CHANGED = "the machine runs at another speed than before"
    STORE_DAMAGED = "the profile store was damaged; a new one was begun"
    STORE_UNUSABLE = "the profile store cannot be used; nothing is kept"
    DATABASE_AWAY = "the fleet's database cannot be used; rows wait in a file of this machine"
    DATABASE_BACK = "the fleet's database can be used again"
    PACKED = "plans read packed copies; the originals come from a file when they are needed"
    NOT_RELEASED = "memory of weights could not be given back"
    TURNED_OFF = "switched off by the settings"
    CANCELLED = "cancelled: nothing needs it any more"
    NO_EFFECT = "accepted for compatibility, without effect"


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision with its reason and the evidence it rested on."""

    action: Action
    why: Why
    subject: str = ""
    evidence: Mapping[str, EvidenceValue] = field(default_factory=dict[str, EvidenceValue])
    at: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """A plain dict for JSON."""
        return {"action": self.action.value, "why": self.why.value, "subject": self.subject,
                "evidence": dict(self.evidence), "at": self.at}

    def __str__(self) -> str:
        detail = ", ".join(f"{k}={v}" for k, v in self.evidence.items())
        return f"{self.action.value} {self.subject}: {self.why.value}" + (f" ({detail})" if detail else "")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, on the axis that decisions are on."""

    track: str
    """`calls`, `compile`, ...: what is drawn in one row."""
    name: str
    begin: float
    end: float
    thread: int
    evidence: Mapping[str, EvidenceValue] = field(default_factory=dict[str, EvidenceValue])

    def to_dict(self) -> dict[str, object]:
        """A plain dict for JSON."""
        return {"track": self.track, "name": self.name, "begin": round(self.begin, 6), "end": round(self.end, 6),
                "thread": self.thread, "evidence": dict(self.evidence)}


class EventLog:
    """Bounded, thread-safe lists of decisions and of what took time, and counters that never lose a count."""

    def __init__(self, limit: int = 4096, debug: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._decisions: deque[Decision] = deque(maxlen=limit)
        self._spans: deque[Span] = deque(maxlen=4 * limit)
        self._counts: Counter[str] = Counter()
        self._clock = clock
        self._start = clock()
        self._debug = debug

    def decide(self, action: Action, why: Why, subject: str = "", **evidence: EvidenceValue) -> Decision:
        """Record a decision and return it."""
        decision = Decision(action, why, subject, evidence, round(self._clock() - self._start, 6))
        with self._lock:
            self._decisions.append(decision)
            self._counts[f"{action.name.lower()}.{why.name.lower()}"] += 1
        say(self._debug, DECISIONS, lambda: str(decision))
        return decision

    def now(self) -> float:
        """Seconds since the log began."""
        return self._clock() - self._start

    def span(self, track: str, name: str, begin: float, **evidence: EvidenceValue) -> None:
        """Record what began at `begin` (see `now`) and ends here."""
        self._spans.append(Span(track, name, begin, self.now(), threading.get_ident(), evidence))

    @property
    def spans(self) -> tuple[Span, ...]:
        """Everything that took time so far, oldest first (bounded)."""
        return tuple(self._spans)  # appending takes no lock: both are one step of the interpreter

    def count(self, name: str, by: int = 1) -> None:
        """Bump a named counter."""
        with self._lock:
            self._counts[name] += by

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Everything decided so far, oldest first (bounded)."""
        with self._lock:
            return tuple(self._decisions)

    @property
    def counts(self) -> dict[str, int]:
        """All counters, one per (action, reason) and per named count."""
        with self._lock:
            return dict(self._counts)
