"""The live view: on a terminal a picture that changes, elsewhere plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from benchmarks.show.run import Run

LIVE_S, PLAIN_S = 0.5, 5.0


class View:
    """Shows a run while it goes on; `due` keeps it from costing anything."""

    every_s = LIVE_S

    def __init__(self) -> None:
        self._next = 0.0

    def due(self, _run: Run) -> bool:
        if time.perf_counter() < self._next:
            return False
        self._next = time.perf_counter() + self.every_s
        return True

    def show(self, run: Run, text: str, read: str) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing to put back."""


class Plain(View):
    """A line now and then, and one for every swap and refusal."""

    every_s = PLAIN_S

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say, self._told = say, set[str]()

    def show(self, run: Run, text: str, read: str) -> None:
        for event in run.events(50):
            if event not in self._told:
                self._told.add(event)
                self._say(f"          {event}")
        begin, end = run.now()
        others = ", ".join(f"{r:.2f}x {b.name}" for b in run.baselines if (r := run.against(b, begin, end)) is not None)
        self._say(f"{end:6.1f} s  {run.per_s(begin, end):6.1f} lines/s ({others}); {run.tier()}; read {read!r}")


class Screen(View):
    """The same on a terminal, in place."""

    def __init__(self) -> None:
        super().__init__()
        self._live = Live(refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def show(self, run: Run, text: str, read: str) -> None:
        self._live.update(picture(run, text, read))


def picture(run: Run, text: str, read: str) -> Panel:
    """Everything on one panel."""
    begin, end = run.now()
    facts = Table.grid(padding=(0, 2))
    longer = "  (the lines are longer now)" if end > run.shift * run.seconds else ""
    facts.add_row("time", f"{end:.0f} of {run.seconds:g} s{longer}")
    facts.add_row("serving", Text(run.tier(), style="bold"))
    facts.add_row("speed", f"{run.per_s(begin, end):.1f} lines a second")
    for b in run.baselines:
        ratio = run.against(b, begin, end)
        if ratio is not None:
            bar = "█" * min(40, int(ratio * 20))
            facts.add_row(f"against {b.name}", Text(f"{ratio:.2f}x  {bar}", style="green" if ratio >= 1 else "yellow"))
    facts.add_row("the line says", text)
    facts.add_row("the model reads", read)
    events = Text("\n".join(run.events(8)) or "watching the first calls", style="dim")
    return Panel(Group(facts, Text(), Text("what was decided, and why", style="bold"), events), title="hotfuse")


def live_view() -> View:
    """For a terminal."""
    return Screen()
