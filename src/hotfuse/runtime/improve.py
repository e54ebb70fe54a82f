# pyright: reportPrivateUsage=false
# A tensor's version has no public name.
"""Better plans for hot ones: compiled beside inference, proven on real calls, raced, and swapped in only if they win.

Every attempt ends in a decision. What lost is remembered with both times and not tried again until something it rested on
changed: the weights, the number of threads, or the traffic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch

from hotfuse.backends.protocol import Run
from hotfuse.base.errors import HotfuseError
from hotfuse.base.events import Action, EventLog, EvidenceValue, Why
from hotfuse.base.settings import Settings
from hotfuse.ir.graph import Graph
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.proof import prove
from hotfuse.runtime.race import Trial, race
from hotfuse.runtime.samples import Signature
from hotfuse.runtime.site import Entry, Site
from hotfuse.runtime.tiers import is_hot, recurring
from hotfuse.specialize.shapes import at_sizes

PROVEN_ON = 4
"""Kinds of calls a plan is proven on."""

Weights = Mapping[str, torch.Tensor]
Compile = Callable[[Graph, Weights], Plan]
"""A graph as a tier-0 plan, at once."""
Improve = Callable[[Graph, Weights, Sequence[torch.Tensor]], Plan]
"""A graph as a plan of a higher tier; may take seconds; raises a HotfuseError where there is none."""


class Named(Protocol):
    """A model, as far as it is spoken of."""

    name: str


class Serving(Protocol):
    """What improving needs of the engine."""

    @property
    def model(self) -> Named: ...  # noqa: D102
    @property
    def settings(self) -> Settings: ...  # noqa: D102
    @property
    def log(self) -> EventLog: ...  # noqa: D102
    @property
    def generation(self) -> int: ...  # noqa: D102
    @property
    def closed(self) -> bool: ...  # noqa: D102

    def beside(self, job: Callable[[], None]) -> None: ...  # noqa: D102
    def exchanging(self, generation: int) -> AbstractContextManager[bool]: ...  # noqa: D102
    def demote(self, site: Site, entry: Entry) -> None: ...  # noqa: D102


class Improver:
    """Decides what to try for the plans of one engine, and tries it."""

    def __init__(self, engine: Serving, compile: Compile, improve: Improve) -> None:
        self._engine = engine
        self._compile = compile
        self._improve = improve
        self._log = engine.log

    def consider(self, site: Site, entry: Entry, plan: Plan, signature: Signature, seconds: float) -> None:
        """After a call that was looked at; at most starts something."""
        settings = self._engine.settings
        stamp = (self._engine.generation, torch.get_num_threads())
        if entry.stamp != stamp:  # what lost under other circumstances may win now
            entry.stamp = stamp
            entry.refused.clear()
        if entry.improving or self._engine.closed:
            return
        if entry.grad_mode:
            if "tier 1" not in entry.refused and is_hot(entry.heat, entry.seconds, settings.hot_calls, 0):
                entry.refused["tier 1"] = "gradients are enabled"
                self._decide(Action.KEEP, Why.GRAD_NEEDED, tier=0, hint="call it under torch.no_grad()")
            return
        if plan is entry.baseline:
            nodes = len(plan.graph.nodes)
            if "tier 1" not in entry.refused and is_hot(entry.heat, entry.seconds, settings.hot_calls, nodes):
                self._start(entry, "tier 1", lambda: self._fuse(entry))
                return
        elif (slower := entry.pace.note(signature, seconds)) is not None:
            self._start(entry, "check", lambda: self._recheck(site, entry, *slower))
            return
        if settings.tiers >= 2 and entry.symbols and entry.plan is not entry.baseline:
            bets = recurring(entry.samples.shares(), entry.samples.taken, settings.max_versions)
            new = [b for b in bets if b.value not in entry.versions and _named(b.value) not in entry.refused]
            if new:
                sizes = new[0].value
                self._decide(Action.SPECIALIZE, Why.RECURS, sizes=_sizes(entry, sizes), share=round(new[0].share, 3),
                             samples=new[0].samples)
                self._start(entry, _named(sizes), lambda: self._specialize(site, entry, sizes))

    def _start(self, entry: Entry, what: str, work: Callable[[], None]) -> None:
        entry.improving = True

        def job() -> None:
            begin = self._log.now()
            try:
                work()
            finally:
                entry.improving = False
                self._log.span("beside", what, begin)

        self._engine.beside(job)

    def _fuse(self, entry: Entry) -> None:
        """Tier 1: generated kernels, generic in the graph's sizes."""
        inputs = entry.samples.inputs()
        if inputs is None:
            return

        def deploy(better: Plan) -> None:
            old, entry.plan = entry.plan, better
            if old is not entry.baseline:
                epochs.retire(old)
            entry.cool()

        self._try(entry, "tier 1", lambda: self._improve(entry.baseline.graph, entry.weights, inputs), entry.baseline,
                  entry.samples.several(PROVEN_ON), deploy)

    def _specialize(self, site: Site, entry: Entry, signature: Signature) -> None:
        """Tier 2: the same for sizes that recur."""
        inputs = entry.samples.inputs(signature)
        if inputs is None:
            entry.refused[_named(signature)] = "no inputs of this kind are kept"
            return

        def make() -> Plan:
            fixed = at_sizes(entry.baseline.graph, dict(zip(entry.symbols, signature, strict=True)))
            return replace(self._improve(fixed, entry.weights, inputs), tier=2)

        def deploy(better: Plan) -> None:
            if len(entry.versions) >= self._engine.settings.max_versions:
                shares = entry.samples.shares()
                rarest = min(entry.versions, key=lambda s: shares.get(s, 0.0))
                epochs.retire(entry.versions[rarest])
                site.remove_version(entry, rarest)
                self._decide(Action.DROP, Why.RARE, tier=2, sizes=_sizes(entry, rarest), share=round(shares.get(rarest, 0), 3))
            if not site.admit_version(entry, signature, better):
                self._refuse(entry, _named(signature), Why.TOO_MANY, "the site serves too many kinds of calls", tier=2,
                             sizes=_sizes(entry, signature))

        self._try(entry, _named(signature), make, entry.plan, [inputs], deploy, sizes=_sizes(entry, signature))

    def _recheck(self, site: Site, entry: Entry, reference_us: float, now_us: float) -> None:
        """A plan that became slower is raced again: it is withdrawn if what it replaced is faster now."""
        inputs = entry.samples.inputs()
        plan = entry.plan
        if inputs is None or plan is entry.baseline:
            return
        trial = self._race(entry.baseline.run, plan.run, inputs)
        entry.pace.forget()  # whatever follows, this is the pace now
        evidence: dict[str, EvidenceValue] = {
            "tier": plan.tier, "us_once": round(reference_us, 1), "us_now": round(now_us, 1),
            "us_plan": round(trial.new_us, 1), "us_baseline": round(trial.old_us, 1),
        }
        if trial.new_us <= trial.old_us:
            self._decide(Action.KEEP, Why.KEPT_PACE, **evidence)
            return
        self._decide(Action.DROP, Why.REGRESSED, **evidence)
        self._engine.demote(site, entry)
        entry.refused["tier 1"] = "it became slower than the library"

    def _try(
        self, entry: Entry, what: str, make: Callable[[], Plan], rival: Plan, calls: Sequence[Sequence[torch.Tensor]],
        deploy: Callable[[Plan], None], **about: EvidenceValue,
    ) -> None:
        """Compile, prove, measure; swap only what won. Whatever happens is a decision."""
        generation = self._engine.generation
        versions = _versions(entry.weights)
        tier = 1 if what == "tier 1" else 2
        begin = self._log.now()
        try:
            better = make()
            self._log.span("compile", what, begin, nodes=len(better.graph.nodes))
            begin = self._log.now()
            proof = prove(better.run, entry.baseline.run, calls, self._engine.settings.rtol, lambda: self._wide(entry))
            self._log.span("proof", what, begin, inputs=proof.inputs, judge=proof.judge)
        except Exception as e:
            text = f"{e.what}: {e.because}" if isinstance(e, HotfuseError) else f"{type(e).__name__}: {e}"
            reason = text.strip(": ").splitlines()[0][:500]
            self._refuse(entry, what, Why.NOT_COMPILED, reason, tier=tier, what=reason, **about)
            return
        if proof.difference:
            self._refuse(entry, what, Why.MISMATCH, proof.difference, tier=tier, because=proof.difference, judge=proof.judge,
                         **about)
            return
        trial = self._race(rival.run, better.run, calls[0])
        evidence: dict[str, EvidenceValue] = {
            "tier": tier, "us_before": round(trial.old_us, 1), "us_after": round(trial.new_us, 1), "rounds": trial.rounds,
            "proven_on": proof.inputs, "judge": proof.judge, **about,
        }
        if not trial.won:
            self._refuse(entry, what, Why.NOT_FASTER, f"{trial.new_us:.1f} us instead of {trial.old_us:.1f}", **evidence)
            return
        with self._engine.exchanging(generation) as same:
            if not same or versions != _versions(entry.weights):
                self._decide(Action.REFUSE, Why.WEIGHTS_CHANGED, tier=tier, **about)
                return
            deploy(better)
        self._decide(Action.DEPLOY, Why.FASTER, **evidence)

    def _wide(self, entry: Entry) -> Run:
        """The baseline on weights in float64."""
        weights = {k: w.double() if w.is_floating_point() else w for k, w in entry.weights.items()}
        return self._compile(entry.baseline.graph, weights).run

    def _race(self, old: Run, new: Run, inputs: Sequence[torch.Tensor]) -> Trial:
        begin = self._log.now()
        trial = race(old, new, inputs, self._engine.settings.race_s, pause=self._pause)
        self._log.span("race", "race", begin, rounds=trial.rounds, won=trial.won)
        return trial

    def _pause(self, spent: float) -> None:
        """Leave the machine to inference for as long as a round took, so that calls beside are slowed half as often."""
        if self._engine.settings.capture != "inline":
            time.sleep(min(spent, 0.05))

    def _refuse(self, entry: Entry, attempt: str, why: Why, reason: str, **evidence: EvidenceValue) -> None:
        entry.refused[attempt] = reason
        self._decide(Action.REFUSE, why, **evidence)

    def _decide(self, action: Action, why: Why, **evidence: EvidenceValue) -> None:
        self._log.decide(action, why, self._engine.model.name, **evidence)


def _named(signature: Signature) -> str:
    return "sizes " + "x".join(map(str, signature))


def _sizes(entry: Entry, signature: Signature) -> str:
    return ", ".join(f"{s}={n}" for s, n in zip(entry.symbols, signature, strict=True))


def _versions(weights: Weights) -> list[int]:
    return [t._version for t in weights.values() if not t.is_inference()]
