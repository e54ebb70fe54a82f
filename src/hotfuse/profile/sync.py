"""The thread that takes rows to the fleet's database and brings others back, for as long as a process serves.

One a process and database. Whatever the database does happens to this thread alone: an error or a long wait is counted, told once
for as long as it lasts, and tried again with growing pauses; the rows wait in the file meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from hotfuse.base.errors import HotfuseError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.faults import is_begun
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.profile.exchange import Exchange
from hotfuse.profile.store import Store
from hotfuse.profile.store_place import AWAY

BackgroundContext = AbstractContextManager[None]
"""What keeps an exchange from holding calls up: it makes thousands of objects, as does an error of the database."""
MAX_S = 60.0
"""Longest pause after failures."""
LAST_S = 2.0
"""What the end of a process waits for its last rows to be sent; they are in the file in any case."""
ANSWERS_S = 15.0
"""An exchange that takes longer waits for a server that is there and says nothing: one that works ends its statements sooner."""
PRUNE_EVERY = 64
"""Exchanges between two looks at how large the file is."""


@dataclass(slots=True)
class SyncReport:
    """What came of it, for `explain()`."""

    place: str
    state: str = "not tried so far"
    exchanges: int = 0
    failures: int = 0
    sent: int = 0
    received: int = 0
    waiting: int = 0
    """Rows that were not sent when it was tried last."""
    last_s: float = 0.0
    """How long the last exchange took."""


class CentralSync:
    """Exchanges rows every so often."""

    def __init__(
        self, url: str, local: Store, log: EventLog, every_s: float, keep: int,
        around: Callable[[], BackgroundContext] = nullcontext,
    ) -> None:  # fmt: skip
        self._central = Store.open(url)
        self._exchange = Exchange(local, self._central)
        self._local, self._log, self._every_s, self._keep = local, log, every_s, keep
        self._around = around
        self.report = SyncReport(self._central.database.place)
        self._stop = threading.Event()
        self._now = threading.Event()
        self._turn = threading.Lock()
        self._begun: float | None = None
        """When the exchange began that is under way."""
        self._thread = threading.Thread(target=self._run, name="hotfuse-profiles", daemon=True)
        if not is_begun(self._thread):
            self.report.state = f"{AWAY}no thread could be started for it"

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.is_set():
            pause = self._every_s if self.once() else min(MAX_S, max(2 * pause, self._every_s))
            self._now.wait(pause)
            self._now.clear()
        self.once()
        self._central.close()

    def once(self) -> bool:
        """One exchange; whether the database could be used. Never raises."""
        with self._turn, self._around():
            self._begun = time.monotonic()
            try:
                return self._once(self._begun)
            finally:
                self._begun = None

    def _once(self, begin: float) -> bool:
        told = self.report
        try:
            self._exchange.push()
            self._exchange.pull(fingerprint())
            if told.exchanges % PRUNE_EVERY == 0:
                self._local.prune(self._keep)
        except Exception as e:  # whatever it is, serving goes on and the rows are in the file
            told.failures += 1
            because = (e.because if isinstance(e, HotfuseError) else None) or f"{type(e).__name__}: {e}"
            if not told.state.startswith(AWAY):
                self._log.decide(Action.FALLBACK, Why.DATABASE_AWAY, told.place, error=because[:200])
            told.state = AWAY + because
            return False
        finally:
            told.sent, told.received = self._exchange.sent, self._exchange.received
            told.waiting = self._exchange.waiting()
            told.last_s = round(time.monotonic() - begin, 3)
        told.exchanges += 1
        if told.state.startswith(AWAY):
            self._log.decide(Action.NOTICE, Why.DATABASE_BACK, told.place, sent=told.sent)
        told.state = "in use"
        return True

    def stop(self) -> None:
        """Send what is left if that takes no longer than a moment."""
        self._stop.set()
        self._now.set()
        if self._thread.ident is not None:
            self._thread.join(LAST_S)

    def stats(self) -> dict[str, Any]:
        """Counters."""
        told, begun = asdict(self.report), self._begun
        if begun is not None and (waited := time.monotonic() - begun) > ANSWERS_S:
            told["state"] = f"{AWAY}no answer for {waited:.0f} s"
        return told
