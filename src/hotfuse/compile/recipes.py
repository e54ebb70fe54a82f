"""Plans that outlive the process: how a graph is cut, its kernels and native runs as object code, and what the plan was worth.

    plan      at the graph's text and all that code rests on: what workers answered when it was compiled
    verdict   at the same: what its plan took on real calls against the one it replaced

A process that finds both links the code, packs its own weights, proves the plan on a real call and serves with it. One that finds
a plan that was proven and no more (the process that made it ended before its race did, or the race decided nothing) races it at
once. A plan that was made for other sizes or another number of threads, or that lacks kernels, is still right, and serves until a
better one has won; the reason is a note of the plan. What a plan was worth with another number of threads says nothing here: it is
raced (decision 391).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hotfuse.base.events import EvidenceValue
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.cache.address import Address, digest
from hotfuse.cache.entry import Message
from hotfuse.cache.folder import Folder
from hotfuse.cache.place import folder_of
from hotfuse.compile.account import COUNTED, Account
from hotfuse.compile.answer_bodies import RunsAnswer
from hotfuse.compile.kept import code_basis, code_features
from hotfuse.compile.parts import RunParts, parts_from, runs_from
from hotfuse.compile.request_context import threads_for
from hotfuse.compile.value import Demand
from hotfuse.compile.workers.checked_json import decoded, encoded
from hotfuse.ir.text import parse
from hotfuse.partition.change import Diff, PartitionChange
from hotfuse.profile.traffic import TrafficSeen

Evidence = Mapping[str, EvidenceValue]
UNFINISHED = "it was kept before all of its kernels were made"
FAILED = "some of its kernels could not be made then"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where a graph's plan is kept, and what is known of it."""

    folder: Folder
    address: Address
    verdict: Evidence | None = None
    """What it took in the process that made it, where it won there."""
    lost: bool = False
    """Whether it lost there. With no verdict nobody knows."""
    proven: bool = False
    """Whether it was proven there, though nothing was decided of what it is worth."""
    stale: str = ""
    """Why it is not quite what this process needs; it is made anew beside."""
    other_threads: bool = False
    """Whether it was made for another number of threads."""

    def judged(self, *, won: bool | None, evidence: Evidence) -> None:
        """What the plan was worth on real calls here, None while it is proven and no more: what the next process begins with."""
        if self.other_threads:  # whose processes shall not begin with what is true of these
            return
        self.folder.put(_verdict(self.address), {"won": won, "evidence": dict(evidence)})

    def beat(self, other: Recipe, evidence: Evidence) -> bool:
        """This plan, made for other sizes, beat the one that was made for those of calls here: it is what is kept for them. False
        where it lacks kernels, or cannot be kept.
        """
        found = self.folder.peek(self.address) if other.address != self.address else None
        if found is None or found[0]["lacks"] or not self.folder.put(other.address, *found, code_features()):
            return False
        other.judged(won=True, evidence=evidence)
        return True

    def unfinished(self) -> Recipe:
        """Where a plan that lacks kernels is kept: apart, since a whole plan is neither replaced by it nor judged as it was."""
        at = self.address
        return replace(self, address=Address(at.kind, digest(at.subject, "unfinished"), at.basis))


@dataclass(frozen=True, slots=True)
class Kept:
    """A plan as it was found."""

    recipe: Recipe
    parts: RunParts
    account: Account


def recipe_of(graph: str, sizes: Mapping[str, int], settings: Settings, demand: Demand) -> Recipe | None:
    """Where the plan of a graph (as text) for such calls is kept; None where nothing is."""
    folder = folder_of(settings)
    if folder is None:
        return None
    basis = code_basis(settings, threads_for(settings), sizes)
    wanted = repr((demand.strategies, demand.focus, *([demand.replanned] if demand.replanned else [])))
    return Recipe(folder, Address("plan", digest(graph, wanted), basis))


def find(recipe: Recipe, demand: Demand) -> Kept | None:
    """The whole plan for these sizes that is kept; None where there is none that holds."""
    message = recipe.folder.get(recipe.address)
    return None if message is None else _read(_known(recipe), message, demand)


def recall(recipe: Recipe, demand: Demand) -> Kept | None:
    """A plan to begin with: one that won before one that nobody has judged, a whole one before one that lacks kernels. One for
    calls of other sizes will do. None where there is none, or only what lost.
    """
    best = _nearest(recipe, recipe.folder.get(recipe.address))
    if best is None or best[0].verdict is None:
        at = recipe.unfinished()
        part = _nearest(at, at.folder.peek(at.address))
        if part is not None and (best is None or best[0].lost or part[0].verdict is not None):
            best = part
    return None if best is None or best[0].lost else _read(*best, demand)


def _nearest(recipe: Recipe, message: Message | None) -> tuple[Recipe, Message] | None:
    """What is kept for these sizes and threads, or else for others."""
    stale, address = "", recipe.address
    if message is None and (near := recipe.folder.latest(recipe.address)) is not None:
        message, stale, address = near
    if message is None:
        return None
    found = _known(replace(recipe, address=address, stale=stale or str(message[0]["lacks"])))
    if address.basis.get("threads") == recipe.address.basis.get("threads"):
        return found, message
    proven = found.proven or found.verdict is not None
    return replace(found, verdict=None, proven=proven, other_threads=True), message


def _known(recipe: Recipe) -> Recipe:
    """With what is known of its plan's worth."""
    found = recipe.folder.peek(_verdict(recipe.address))
    if found is None:
        return recipe
    won = found[0]["won"]
    return replace(recipe, verdict=dict(found[0]["evidence"]) if won else None, lost=won is False, proven=won is None)


def again(recipe: Recipe, demand: Demand) -> Kept | None:
    """Like `recall`, after waiting for another process that made the plan."""
    message = recipe.folder.again(recipe.address)
    return None if message is None else _read(_known(recipe), message, demand)


def _read(recipe: Recipe, message: Message, demand: Demand) -> Kept | None:
    body, blobs = message
    count = int(body["codes"])
    read = functools.cache(parse)  # a graph and the same one with its runs
    runs = decoded(RunsAnswer, body["runs"], "kept runs")
    parts = runs_from(parts_from(body["parts"], blobs[:count], demand, read), runs, blobs[count:], read)
    return Kept(recipe, parts, _account_from(body["account"]))


def keep(recipe: Recipe, parts: RunParts, native: Message, account: Account, *, unfinished: bool = False) -> Recipe | None:
    """Keep a plan that workers made, and where: apart if kernels are still being made, or failed for a reason that may pass."""
    if parts.answer is None:
        return None
    lacks = UNFINISHED if unfinished else FAILED if account.counts.get("failed", 0) else ""
    at = recipe.unfinished() if lacks else recipe
    header, codes = native
    runs = encoded(parts.answer)
    body: dict[str, Any] = {"parts": header, "codes": len(codes), "runs": runs, "account": account.to_dict(), "lacks": lacks}
    return at if at.folder.put(at.address, body, [*codes, *parts.blobs], code_features()) else None


def _account_from(data: Mapping[str, Any]) -> Account:
    diffs = tuple(
        Diff(PartitionChange(d["change"]), tuple(d["gone"]), tuple(d["made"]), int(d["nodes"]), str(d["why"]), dict(d["evidence"]))
        for d in data["history"]
    )
    counts = {k: int(data["counts"].get(k, 0)) for k in COUNTED}
    return Account(diffs, tuple(str(u) for u in data["units"]), counts, data["predicted_us"],
                   decoded(TrafficSeen, data.get("seen", {}), "a kept plan"), str(data.get("grouping", "")))  # fmt: skip


def _verdict(address: Address) -> Address:
    return Address("verdict", address.subject, address.basis)
