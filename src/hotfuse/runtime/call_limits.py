"""Why calls stay in the model's own code or below tier 1, in sentences for `explain()` and the log."""

from __future__ import annotations

from collections.abc import Callable

from hotfuse.compile.workers.service import short_of_time
from hotfuse.compile.workers.shortage import SHORT
from hotfuse.runtime.capturing import Capturer
from hotfuse.runtime.plans import Plans
from hotfuse.runtime.serve.gradients import Gradients
from hotfuse.specialize.table import TIER1


class CallLimits:
    """The limits that one engine's calls meet."""

    def __init__(self, plans: Plans, capturer: Capturer, gradients: Gradients) -> None:
        self._plans, self._capturer, self._gradients = plans, capturer, gradients
        self.unsupported = self.changed_context = ""
        """Of the first call whose arguments cannot be described, and of the first under modes that change what operators mean."""
        self.undecided: Callable[[], bool] = lambda: False
        """Whether it is still being found out how the model can be served: then nothing is told of what it could not."""
        self.told: list[str] = []
        """What code that serves around this engine says of calls that stay in the model's own code."""

    def below_tier1(self) -> list[str]:
        """Why calls stay below tier 1 for good, as far as it is known."""
        if self._plans.settings.capture == "off" or self._plans.settings.tiers < 1 or self.undecided():
            return []  # the user's own choice
        sites = list(self._plans.sites.values())
        found = [g.refused for s in sites for g in list(s.groups.values()) if g.refused]
        low = [e for s in sites for e in s.entries if e.plan is e.baseline and TIER1 in e.refused]
        found += [f"tier 1: {e.refused[TIER1]}" for e in low]
        waits = [SHORT] if self.waits() else []
        return self.told + (found or self._plans.changes_itself(counted=False)) + self._kept_by_calls() + waits

    def waits(self) -> str:
        """Why what is being made for this model takes long, where others have the cores; empty where nothing is, or they do not."""
        sites = list(self._plans.sites.values())
        pending = any(g.pending for s in sites for g in list(s.groups.values())) or any(e.trying for s in sites for e in s.entries)
        return short_of_time() if pending else ""

    def _kept_by_calls(self) -> list[str]:
        """What calls bring that keeps them in the model's own code."""
        entries = [e for s in list(self._plans.sites.values()) for e in s.entries]
        kept = {link.kept for e in entries for link in list(e.links.values()) if link.kept}
        found = [f"calls with gradients enabled: {why}" for why in sorted(kept)]
        found += self._capturer.limits() + [f"a call cannot be described: {self.unsupported}"] * bool(self.unsupported)
        return found + [self.changed_context] * bool(self.changed_context)

    def texts(self) -> list[str]:
        """What keeps kinds of calls in the model's own code though nothing is wrong with them."""
        entries = [e for s in list(self._plans.sites.values()) for e in s.entries if e.balance is not None]
        strayed = [text for e in entries if e.balance is not None and (text := e.balance.text(e.calls))]
        trained = [text] if (text := self._gradients.training()) else []
        return self.told + self._kept_by_calls() + self._plans.changes_itself() + trained + strayed
