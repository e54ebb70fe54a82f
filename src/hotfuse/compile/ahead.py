"""Work that tier 1 will ask workers for is begun while tier 0 is still built, compared and taken up. Workers were idle then.

Nobody waits for it, and nothing of it is used as it is. Workers keep how a graph is grouped, and its kernels, by content
(`compile.kept`); the compilation that is asked for behind tier 0 finds both there. It alone decides: it begins behind checksums of
the weights that it copies, with the sizes that calls have by then, and another graph finds nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from hotfuse.base.errors import HotfuseError
from hotfuse.base.settings import Settings
from hotfuse.compile.compilation import Compilation
from hotfuse.compile.fetch import begin
from hotfuse.compile.value import FIRST_PLAN_GAIN, Demand
from hotfuse.fusion.bandit import Bandit
from hotfuse.hpm.bottleneck import Ledger


class AheadCompilation:
    """The one of a model that nobody has asked for yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Compilation | None = None
        self._stopped = False

    def run(self, text: str, sizes: Mapping[str, int], settings: Settings, make: Callable[..., Compilation] = begin) -> None:
        """Work a graph off until it is left. What fails does so again where somebody asks, and is told there."""
        compilation = make(text, sizes, settings, Demand(gain=FIRST_PLAN_GAIN))
        compilation.trust, compilation.ledger, compilation.history = Bandit(), Ledger(), None  # promises are judged once
        with self._lock:
            if self._stopped:
                return
            self._running = compilation
        try:
            compilation.run()
        except HotfuseError:
            return
        finally:
            with self._lock:
                self._running = None if self._running is compilation else self._running

    def leave(self) -> int:
        """Somebody asks now: nothing more is begun, and what a worker is at goes on. How many kernels there are so far."""
        with self._lock:
            running, self._running = self._running, None
        return 0 if running is None else running.leave()

    def stop(self) -> None:
        """Nobody will ask."""
        with self._lock:
            running, self._running, self._stopped = self._running, None, True
        if running is not None:
            running.cancel()
