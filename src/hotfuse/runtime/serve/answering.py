"""Who answers a call that is looked at: the plan it was routed to, or one of two that are being compared."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine import team_size
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.samples import Signature
from hotfuse.runtime.site import Entry
from hotfuse.runtime.tierup.audit import Audit
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.tierup.turns import NEW, Key


@dataclass(frozen=True, slots=True)
class Turn:
    """A call that is half of a round."""

    of: PlanContest | Audit
    key: Key
    side: int
    answers: Plan | None
    """None: the model's own code."""


def alike(entry: Entry, signature: Signature) -> Signature:
    """Sizes of calls that make rounds together. Where a cache grows, or a count goes on, no call has the sizes of another one, so
    none would ever end a round: lengths that are as long but for a factor of two count as one."""
    grows = entry.counted or (entry.effects is not None and entry.effects.grown)
    return tuple(n.bit_length() for n in signature) if grows else signature


def turn_of(entry: Entry, plan: Plan, signature: Signature, leaves: Sequence[torch.Tensor], *, grad: bool) -> Turn | None:
    """The turn that a call is, if any, which may want gradients: a race on live calls goes before the audit of what serves. While
    background work computes beside, calls are no evidence of anything.
    """
    if team_size.computes_in_background():
        return None
    if (contest := entry.contest) is not None:
        if not contest.takes(plan, signature, leaves):
            return None
        key = (threading.get_ident(), alike(entry, signature), grad)
        side = contest.turn(key)
        return Turn(contest, key, side, contest.answers(side))
    audit = entry.audit_of(plan, signature)
    if audit is None or entry.calls < audit.at:
        return None
    key = (threading.get_ident(), alike(entry, signature), grad)
    if not audit.due(entry.calls, key):
        return None
    side = audit.turn(key)
    return Turn(audit, key, side, plan if side == NEW else entry.reference(audit.version))
