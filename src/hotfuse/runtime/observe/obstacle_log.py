"""One line on the log for each obstacle between a model and tier 1: logger `hotfuse`, once a reason, with what to do about it.

`explain()` says the same and more, but only to those who ask. A model that is still being captured or compiled is no news; one that
will stay as it is, after some seconds of calls, is, and so is one whose plans come late because others have all cores.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from hotfuse.compile.workers.shortage import SHORT

logger = logging.getLogger("hotfuse")

AFTER_S = 5.0
"""Seconds of calls below tier 1 before anything is said, and between two looks; a longer pause without calls begins anew."""
MAX_TOLD = 16
"""Reasons that are told of one model."""
ADVICE = (
    ("cannot be sent", "keep locks, files and other things that cannot be pickled out of the module, or jit the part without them"),
    ("cannot be described", "pass tensors, numbers, strings, and lists, tuples or dicts of them"),
    ("dynamic control flow", "jit the parts around the branch, or write it with torch.where or torch.cond"),
    ("data-dependent", "jit the parts around it, or write it with torch.where or torch.cond"),
    ("in earlier processes", "nothing: it was measured; HOTFUSE_PROFILES names another store, in which it is tried again"),
    (", not decided", "nothing: it is measured again later"),
    ("us instead of", "nothing: the model's own code and library kernels measured as fast on these calls"),
    ("every round of its race", "nothing: it is measured again later"),
    ("gradients enabled", "call it under torch.inference_mode() or torch.no_grad() where nobody calls backward"),
    ("limit of captured graphs", "nothing where such calls are rare; Settings(max_captures=...) allows more graphs"),
    ("orders in memory", "pass contiguous tensors of one rank and dtype; Settings(max_entries=...) allows more kinds"),
    ("only so many are captured", "pass what varies from call to call as tensors, not as Python numbers or strings"),
    ("time and again after a few calls", "change the model less often, or keep several and serve each"),
    ("under torch.autocast", "convert the model instead (model.to(torch.bfloat16)), or Settings(precision='bf16')"),
    ("only values that return", "pass what varies from call to call as a tensor"),
    ("sparse", "pass dense tensors, or jit the parts around the sparse ones"),
    ("nested tensor", "pass padded tensors and a mask"),
    (SHORT, "leave it a core for some seconds, allow it more (Settings(compile_share=...)), or begin with a bundle: hotfuse build"),
    ("disagree", "report it, with the model: hotfuse explain --full --json"),
)
"""What a reason says, and what to do about it."""


def advice(reason: str) -> str:
    """What a user can do: what the error itself says, or what helps against such reasons."""
    for line in reason.splitlines():
        if line.strip().startswith("try:"):
            return line.strip().removeprefix("try:").strip()
    return next((what for text, what in ADVICE if text in reason), "explain() says more")


def headline(reason: str) -> str:
    """The first line of a reason, and why, where it says so."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    because = next((line.removeprefix("because:").strip() for line in lines if line.startswith("because:")), "")
    return ((lines[0] if lines else "no reason is known") + (f" ({because})" if because else ""))[:300]


class ObstacleLog:
    """Tells of one model."""

    def __init__(self, name: str, reasons: Callable[[], Iterable[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._reasons, self._clock = name, reasons, clock
        self._since = self._last = -AFTER_S
        self._next = 0.0
        self._told: set[str] = set()

    def below(self) -> None:
        """A call was answered below tier 1."""
        now = self._clock()
        if now - self._last > AFTER_S:
            self._since = now
        self._last = now
        if now - self._since < AFTER_S or now < self._next:
            return
        self._next = now + AFTER_S
        for reason in self._reasons():
            said = headline(reason)
            if said not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(said)
                logger.warning("%s stays below its fastest plans: %s; %s", self._name, said, advice(reason))
