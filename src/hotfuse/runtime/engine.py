"""The engine: serves a model while its plans are made and exchanged in the background.

A call never waits. It runs in a captured plan whose guard holds (`plans`), or in the model's own code (`capturing`). The engine
samples some calls (`call_looks`): it times them, keeps their inputs, and decides whether their plan has earned a better one
(`improve`). It imports no compiler and no front end: both come in as functions, so tests drive it with fakes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from hotfuse.base.errors import CallFault, InputError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.faults import error_text
from hotfuse.base.known_structure import KnownStructures
from hotfuse.base.living import Living
from hotfuse.base.settings import Settings
from hotfuse.base.structure import Spec, take_call
from hotfuse.cache.place import folder_of
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.machine import team_size
from hotfuse.machine.heap import heap
from hotfuse.native.call_context import ContextReader, context_in_python, context_in_words, native_context_reader
from hotfuse.native.toolchain import keep_in
from hotfuse.runtime.background import Background, Job, Submit
from hotfuse.runtime.call_learner import CallLearner
from hotfuse.runtime.call_limits import CallLimits
from hotfuse.runtime.call_looks import CallLooks
from hotfuse.runtime.capture_turn import CaptureTurn
from hotfuse.runtime.capturing import Capturer
from hotfuse.runtime.crowded_teams import CrowdedTeams
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.observe.obstacle_log import ObstacleLog
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.plans import Plans, Servable
from hotfuse.runtime.rests import Names, Rests
from hotfuse.runtime.serve.gradients import PLAIN, Gradients, joined
from hotfuse.runtime.serve.own_recordings import recorded_own_code
from hotfuse.runtime.site import Entry, Route, Site
from hotfuse.runtime.tally import Everyone, Rest, Tally, ThreadCounts
from hotfuse.runtime.tierup.attempt import Compile, Improve
from hotfuse.runtime.tierup.improve import Improver
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange

_TENSORS = {torch.Tensor, nn.Parameter}
MAX_PLAIN = 256
"""Combinations of argument names that are looked up in one step: names come in any order."""
MAX_NUMBERED = 4096
"""Structures that have code whose sites are found by their numbers; code that is thrown away and made again has a new one."""
_read_context: ContextReader = context_in_python
"""The context of a call (`native.call_context`); one native question for the whole process as soon as a model is hot."""
_NOT_BEGUN = object()
_hardening: list[str] = []
"""Whether that has been tried, and why it cannot be."""


def _harden() -> None:
    """For the background: compiles."""
    global _read_context
    try:
        found = native_context_reader()
    except Exception as e:
        _hardening.append(error_text(e))
        raise
    if isinstance(found, str):
        _hardening.append(found)
    else:
        _read_context = found


class Engine:
    """Serves one model."""

    def __init__(
        self, model: Servable, compile: Compile, submit: Submit, settings: Settings, log: EventLog,
        improve: Improve | None = None, captures: Submit | None = None, counted: Everyone | None = None,
        beside: Submit | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.log = log
        keep_in(lambda: folder_of(settings))
        self.everyone = counted or Everyone()
        """The counters of all threads; those of another engine go on being counted in."""
        self._tally = Tally(self.everyone)
        inline = settings.capture == "inline"
        self._background = Background(submit, inline=inline, failed=self._failed, captures=captures, beside=beside)
        self._in_background = self._background.start
        self.plans = Plans(model, settings, log, self._tally, self._in_background)
        self.sites = self.plans.sites
        self.call_sampler = self.plans.call_sampler
        self.recorder = self.plans.recorder
        self.gradients = Gradients(model.call, model.name, log)
        self.own_recordings = recorded_own_code(model, settings, log, self._in_background)
        """Recordings of the model's own kernels, where torch has a device that can be recorded."""
        self.own_code = self.own_recordings or model.call
        """What answers where no plan does, and nobody looks at the call."""
        self.teams = CrowdedTeams(self.own_code, self._answer_by)
        self._answers_rests = counted is None
        """Whether what rests for all calls is answered by this engine's own code."""
        if counted is None:
            self.everyone.rest.own_code = self.own_code
        self._capturer = Capturer(self.plans, compile, self._background, self.gradients, self.teams.own_code)
        self._improver = Improver(self.plans, compile, improve) if improve is not None and settings.tiers >= 1 else None
        if self._improver is not None:
            graphs, improver = self._capturer.graphs, self._improver
            graphs.admitted, graphs.take_up = improver.admitted, improver.take_up
            graphs.remembered, graphs.ahead = improver.remembered, improver.ahead
            if captures is not None:
                self._capturer.turn = CaptureTurn(improver.calls_before_first_plans)
        self._known = KnownStructures()
        self._known_sites: dict[int, Site] = {}
        """Sites of structures that have code, by their numbers: hashing all parts of a structure takes longer than that code."""
        self._rests = Rests(self.sites)
        self._plain: dict[Names, Site] = {}
        """Sites of calls whose arguments are tensors and nothing around them, by how many and by what names."""
        self.limits = CallLimits(self.plans, self._capturer, self.gradients)
        self._teller = ObstacleLog(model.name, self.limits.below_tier1)
        self._capturer.own_answers = self._teller.below
        self._threads = settings.threads
        self._clock = itertools.count(1)
        self._learner = CallLearner(self.plans, self.gradients, self._improver, self._teller, lambda: _read_context, self._harden,
                                    self.serve, self._tally)  # fmt: skip
        self._looks = CallLooks(self.plans, self.own_code, self.teams, self._capturer, self._improver, self._learner,
                                self.everyone, self._answered_instead,
                                lambda: _read_context is not context_in_python or any(_hardening))  # fmt: skip
        self.concurrency = self._learner.concurrency
        if settings.capture == "off":
            log.decide(Action.KEEP, Why.TURNED_OFF, model.name)
        _ENGINES.add(self)

    # --- the call path ---------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call."""
        return self.serve(args, kwargs)

    def serve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, counted: bool = False,
        met: tuple[Site, Sequence[Any], Sequence[Any]] | None = None, began: float = 0.0,
    ) -> Any:
        """The same, for callers that have the arguments as they are kept; `counted` says that the threads are as they can be.
        `began` is when the call came, where that is asked (`CallLooks.rare`).

        A call whose arguments are tensors and nothing around them is at its site with one look-up; of others `met` is their site,
        their tensors, and the lists, dicts and objects that hold them. All of it is one function because every call between
        functions is a twentieth of what this may take.
        """
        if met is not None:
            site, leaves, holders = met
            plain = True  # all leaves are known to be tensors; otherwise a native decision finds out by itself
        else:
            if self._looks.rare:
                began = time.perf_counter()
            if is_compiling() or forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage] - tangents ride on inputs
                return self.model.call(*args, **kwargs)
            if self._threads is not None and not counted and torch.get_num_threads() != self._threads:
                return self._with_threads(self._threads, args, kwargs)
            if background_priority.jobs and not counted and team_size.has_every_core():
                return self._beside_jobs(args, kwargs)
            if kwargs:
                leaves, key = (*args, *kwargs.values()), (len(args), *kwargs)
            else:
                leaves, key = args, len(args)
            holders: Sequence[Any] = ()
            site = self._plain.get(key)
            if site is None:
                return self._first_at(key, leaves, args, kwargs)
            plain = False
        counts, slot = self._tally.here
        if (rest := site.rest).left > 0:
            rest.left -= 1
            counts.module_calls += 1
            return self.own_code(*args, **kwargs)
        around = _read_context()
        if around < 0:
            if not plain and not _TENSORS.issuperset(map(type, leaves)):
                return self._serve_nested(args, kwargs)
            return self._under_modes(args, kwargs, counts)
        cache = site.caches.get(around & site.mask)
        outer = slot.epoch
        slot.epoch = outer or epochs.now  # from here on nothing this call may find is freed
        try:
            table = cache.table if cache is not None else None
            if not plain and (table is None or not table.native) and not _TENSORS.issuperset(map(type, leaves)):
                return self._serve_nested(args, kwargs)
            if table is not None:
                found = table.select(*leaves)
                route = table.routes[found] if found >= 0 else None
                if route is None:
                    if not plain and not _TENSORS.issuperset(map(type, leaves)):
                        return self._serve_nested(args, kwargs)
                    counts.guard_misses += 1
                elif (route.version or route.entry.plan).ahead is not None and (
                    (done := self._begun(route, leaves, around, counts)) is not _NOT_BEGUN
                ):
                    return done
                elif (
                    (watch := self.plans.watch) is None or watch.unchanged() or self._still(watch)
                ) and (
                    (((effects := (entry := route.entry).effects) is None or effects.fits(leaves))
                    and (entry.asked is None or entry.asked(leaves)))
                    or self._unlike()
                ):
                    link = self.gradients.link(entry.links, watch, leaves) if around & 1 else PLAIN
                    if link is None or around not in entry.around:
                        return self._capturer.meet((site, entry, around), leaves, args, kwargs, counts)
                    if link.places and (link.kept or self.gradients.own_turn()):
                        counts.module_calls += 1
                        if link.kept:
                            self._teller.below()
                        return self.own_code(*args, **kwargs)
                    plan, sizes = route.version, route.signature
                    if plan is None or sizes is None or entry.versions.get(sizes) is not plan:  # it may just have been withdrawn
                        plan = entry.plan
                    number = entry.calls = entry.calls + 1
                    entry.last_used = next(self._clock)
                    if number >= entry.next_look:
                        return self._looks.answer((site, entry, plan, link), leaves, holders, args, kwargs, counts, began)
                    if entry.own and plan is entry.baseline:
                        counts.module_calls += 1
                        return self.own_code(*args, **kwargs)
                    try:
                        outs = plan.run(*leaves) if link is PLAIN else joined(link, plan.run, leaves)
                    except Exception as e:
                        return self._answered_instead((site, entry, plan, e), leaves, args, kwargs, counts)
                    if plan.tier == 1:
                        counts.tier1_calls += 1
                    elif plan.tier:
                        counts.tier2_calls += 1
                    else:
                        counts.tier0_calls += 1
                    if effects is not None:
                        return effects.finish(outs, leaves, holders)
                    return outs[0] if entry.bare else entry.rebuild(outs)
            if site.unlooked > 0:
                site.unlooked -= 1
                counts.module_calls += 1
                return self.own_code(*args, **kwargs)
            return self._capturer.own_code(site.spec, leaves, args, kwargs, counts)
        finally:
            slot.epoch = outer

    def _unlike(self) -> bool:
        """A call does to the world, or is, what no guard of its graph tells (`Effects.fits`): counted, and never in a plan."""
        self.log.count("calls_unlike_captured")
        return False

    def _begun(self, route: Route, leaves: Sequence[Any], around: int, counts: ThreadCounts) -> Any:
        """Answer a call on a device by a replay that is launched first; whether the model is still the same is looked at while the
        device works. Of a large model that look takes longer than all else on the host: behind other work its thousands of objects
        are in no cache. Where the model has changed, the results are dropped, and the call goes the ordinary way."""
        entry, watch, plan = route.entry, self.plans.watch, route.version
        if plan is None or route.signature is None or entry.versions.get(route.signature) is not plan:
            plan = entry.plan
        usual = watch is not None and entry.effects is None and not around & 1 and around in entry.around
        usual = usual and (entry.asked is None or entry.asked(leaves))
        if plan.ahead is None or not usual or entry.calls + 1 >= entry.next_look or (entry.own and plan is entry.baseline):
            return _NOT_BEGUN
        try:
            outs = plan.ahead(*leaves)
        except Exception:  # the ordinary way tells of it if it fails too
            self.log.count("begun_and_failed")
            return _NOT_BEGUN
        if outs is None:
            return _NOT_BEGUN
        if watch is None or not (watch.unchanged() or watch.check() is WeightChange.NONE):
            self.log.count("begun_in_vain")
            return _NOT_BEGUN
        entry.calls += 1
        entry.last_used = next(self._clock)
        counts.answered(plan.tier)
        return outs[0] if entry.bare else entry.rebuild(outs)

    def _first_at(
        self, key: Names, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call that is at no site yet, by how many arguments it has and by what names."""
        if not _TENSORS.issuperset(map(type, leaves)):
            return self._serve_nested(args, kwargs)
        if self._rests.takes(key):
            self._tally.mine.module_calls += 1
            return self.own_code(*args, **kwargs)
        spec = take_call(args, kwargs).spec
        if (site := self.sites.get(spec)) is None:
            return self._unmet(key, spec, leaves, args, kwargs)
        if len(self._plain) < MAX_PLAIN:
            self._plain[key] = site
        return self.serve(args, kwargs, counted=True, met=(site, leaves, ()))

    def _with_threads(self, threads: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call with as many threads as the settings say, and give the caller's number back."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            if background_priority.jobs and team_size.has_every_core():
                return self._beside_jobs(args, kwargs)
            return self.serve(args, kwargs, counted=True)
        finally:
            torch.set_num_threads(before)

    def _beside_jobs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call whose team has every core, while background work needs some."""
        self.log.count("calls_that_spared_a_core")
        return team_size.leaving_cores(self.serve, args, kwargs, counted=True)

    def _serve_nested(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        began = time.perf_counter() if self._looks.rare else 0.0
        counts, names = self._tally.mine, (len(args), *kwargs) if kwargs else len(args)
        if self._rests.takes(names):
            counts.module_calls += 1
            return self.own_code(*args, **kwargs)
        try:
            taken, known = self._known.take(args, kwargs)
            leaves, spec = taken.leaves, taken.spec
            site = self._known_sites.get(known.number) if known is not None else None
            if site is None:
                hash(spec)
        except (InputError, TypeError) as e:
            self.log.count("unsupported_calls")
            if not self.limits.unsupported:
                self.limits.unsupported = str(e)
                self.log.decide(Action.KEEP, Why.UNSUPPORTED_CALL, self.model.name, because=str(e).splitlines()[0])
            counts.module_calls += 1
            self._teller.below()
            self._rests.without_site(names)
            return self.own_code(*args, **kwargs)
        if not _TENSORS.issuperset(map(type, leaves)):
            counts.module_calls += 1
            self._rests.without_site(names)
            return self.own_code(*args, **kwargs)
        if site is None:
            if (site := self.sites.get(spec)) is None:
                return self._unmet(names, spec, leaves, args, kwargs)
            if known is not None:
                if len(self._known_sites) >= MAX_NUMBERED:  # of structures whose code was thrown away for others'
                    self._known_sites.clear()
                self._known_sites[known.number] = site
        self._rests.at_a_site(names)
        if site.resting > 0:
            self._rests.begin(names, site)
        return self.serve(args, kwargs, counted=True, met=(site, leaves, taken.holders), began=began)

    def _unmet(
        self, names: Names, spec: Spec, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        """Answer a call whose structure is new."""
        counts = self._tally.mine
        if _read_context() < 0:
            self._rests.without_site(names)
            return self._under_modes(args, kwargs, counts)
        result = self._capturer.own_code(spec, leaves, args, kwargs, counts)
        if spec not in self.sites:
            self._rests.without_site(names)
        return result

    def _under_modes(self, args: tuple[Any, ...], kwargs: dict[str, Any], counts: ThreadCounts) -> Any:
        """A call whose caller changed what torch's operators mean: the model's own code answers it."""
        counts.module_calls += 1
        if not self.limits.changed_context:
            self.limits.changed_context = f"calls under {context_in_words()} run the model's own code"
            self.log.decide(Action.KEEP, Why.UNSUPPORTED_CALL, self.model.name, because=self.limits.changed_context)
        self._teller.below()
        return self.own_code(*args, **kwargs)

    def _answered_instead(
        self, failed: tuple[Site, Entry, Plan, Exception], leaves: Sequence[Any], args: tuple[Any, ...],
        kwargs: dict[str, Any], counts: ThreadCounts,
    ) -> Any:
        """A plan raised: the model's own code answers. Where that raises too, or an index pointed nowhere, the call is to blame."""
        site, entry, plan, error = failed
        try:
            if entry.balance is not None:
                result, strayed = self._capturer.other_path(failed, entry.balance, leaves, args, kwargs, counts)
                if strayed:
                    return result
            else:
                result = self._capturer.own_code(site.spec, leaves, args, kwargs, counts)
        except Exception:
            self.log.count("call_faults")
            raise
        if isinstance(error, CallFault):
            self.log.count("call_faults")
        elif (contest := entry.contest) is not None and plan is contest.new and plan is not contest.serving:
            contest.failed()  # it never served, and will not
            text = f"{type(error).__name__}: {error}"[:200]
            self.log.decide(Action.REFUSE, Why.RUN_FAILED, self.model.name, tier=plan.tier, error=text)
        else:
            self.plans.withdraw(site, entry, plan, error)
        return result

    def _answer_by(self, own_code: Callable[..., Any]) -> None:
        """What answers where no plan does is another function from here on."""
        self.own_code = own_code
        if self._answers_rests:
            self.everyone.rest.own_code = own_code

    def _still(self, watch: ModelGuard) -> bool:
        """Whether a model that may have changed is still the one its plans were made of, whatever its weights are."""
        change = watch.check()
        if change is not WeightChange.NONE:
            self.plans.changed(change, watch)
        return change is not WeightChange.MODEL

    def _harden(self, jobs: Sequence[Job]) -> None:
        """What every call asks is asked natively from now on: of the model by this engine, and of what is around a call by all.

        Beside other jobs: behind a capture or a first plan, whose workers wait for processor time, they came seconds later, and
        until then Python looked through the model in every call.
        """
        for job in jobs:
            self._background.start_beside(job)
        if not _hardening:
            _hardening.append("")
            self._background.start_beside(_harden)

    # --- control ---------------------------------------------------------------------------------

    def plain_rest(self, count: int) -> Rest | None:
        """The rest of calls with so many tensors and nothing else, once there is a site and they need nothing but an answer."""
        site = self._plain.get(count) if self._threads is None else None
        return None if site is None else site.rest

    def only_site(self) -> Site | None:
        """The site of all calls so far, where they had one structure and need nothing but an answer."""
        return next(iter(self.sites.values())) if len(self.sites) == 1 and self._threads is None else None

    def share_rest(self, seen: Callable[..., Any] | None = None) -> None:
        """Have calls ask for the rest of the only site before they come here; where there are others, or `seen` has to answer every
        call, each site keeps its own. A call that took a part of the common rest in that moment is seen, too."""
        rest, only = self.everyone.rest, self.only_site() if seen is None else None
        self._answers_rests, rest.own_code = seen is None, seen or self.own_code
        for site in list(self.sites.values()):
            if site.rest is rest and site is not only:
                site.rest, rest.left = Rest(rest.left), 0
        if only is not None and only.rest is not rest:
            rest.left, only.rest = only.resting, rest

    def around_plans(self, seconds: Callable[[], float]) -> None:
        """Tell what the code around this engine adds to calls in plans, and not to calls that it answers itself."""
        self._learner.outside_s = seconds

    def wait(self, timeout: float | None = None) -> bool:
        """Until no background work is pending; True if drained in time."""
        return self._background.wait(timeout)

    def _failed(self, error: Exception) -> None:
        """A job of the background raised; what it was for is not there, and serving goes on."""
        self.log.count("background_failures")
        self.log.decide(Action.NOTICE, Why.BACKGROUND_FAILED, self.model.name, error=error_text(error))

    def counts(self) -> dict[str, int]:
        """Call counters over all threads."""
        return self.everyone.total()

    def watch_stats(self) -> dict[str, Any]:
        """How calls make sure that the model is the one that was captured."""
        watch = self.plans.watch
        asked = "native" if _read_context is not context_in_python else "".join(_hardening) or "Python"
        return {**watch.stats(), "around": asked, "memory": self.plans.originals.stats()} if watch is not None else {}

    def let_go_of_changed(self) -> None:
        """Where nobody calls: plans of a model that has changed go now, and with them the memory of its weights that they hold."""
        watch = self.plans.watch
        entries = [e for s in list(self.sites.values()) for e in s.entries]
        if watch is None or not any(p.holds for e in entries for p in (e.plan, *e.versions.values())):
            return
        if (change := watch.check()) is not WeightChange.NONE:
            self.plans.changed(change, watch)

    def close(self) -> None:
        """Drop every plan and call off what is being made; later calls run the model's own code.

        What was seen is kept in the profile store.
        """
        self.plans.close()
        self.gradients.close()
        if self.own_recordings is not None:
            self.own_recordings.close()
        if self._improver is not None:
            self._improver.close()

    def after_fork(self) -> None:
        """In a forked child: what was pending belongs to the parent."""
        self._background.after_fork()
        self._capturer.after_fork()
        self.plans.after_fork()
        if self._improver is not None:
            self._improver.after_fork()


_ENGINES: Living[Engine] = Living()


def _after_fork() -> None:
    for engine in _ENGINES:
        engine.after_fork()


def _when_idle() -> int:
    for engine in _ENGINES:
        engine.let_go_of_changed()
    return 0


heap.spares(_when_idle)
os.register_at_fork(after_in_child=_after_fork)
