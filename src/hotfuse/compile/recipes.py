"""Plans that outlive the process: how a graph is cut, its kernels and native runs as object code, and what the plan was worth.

    plan      at the graph's text and all that code rests on: what workers answered when it was compiled
    verdict   at the same: what its plan took on real calls against the one it replaced

A process that finds both links the code, packs its own weights, proves the plan on a real call and serves with it. A plan that was
made for other sizes is still right, and serves until one for the sizes of now has won; the reason is a note of the plan.
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
from hotfuse.compile.kept import code_basis, code_features
from hotfuse.compile.parts import RunParts, parts_from, runs_from
from hotfuse.compile.request_context import threads_for
from hotfuse.compile.value import Demand
from hotfuse.ir.text import parse
from hotfuse.partition.change import Diff, PartitionChange

Evidence = Mapping[str, EvidenceValue]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where a graph's plan is kept, and what is known of it."""

    folder: Folder
    address: Address
    verdict: Evidence | None = None
    """What it took in the process that made it, where it won there."""
    stale: str = ""
    """Why it is not quite what this process needs; it is made anew beside."""

    def judged(self, *, won: bool, evidence: Evidence) -> None:
        """What the plan was worth on real calls here: what the next process begins with."""
        self.folder.put(_verdict(self.address), {"won": won, "evidence": dict(evidence)})


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
    wanted = repr((demand.strategies, demand.focus))
    return Recipe(folder, Address("plan", digest(graph, wanted), basis))


def find(recipe: Recipe, demand: Demand, *, other_sizes: bool = False) -> Kept | None:
    """The plan that is kept; None where there is none that holds. `other_sizes`: one for calls of other sizes will do."""
    message, stale, address = recipe.folder.get(recipe.address), "", recipe.address
    if message is None and other_sizes and (near := recipe.folder.latest(recipe.address)) is not None:
        message, stale, address = near
    return None if message is None else _read(replace(recipe, address=address, stale=stale), message, demand)


def again(recipe: Recipe, demand: Demand) -> Kept | None:
    """The same after waiting for another process that made it."""
    message = recipe.folder.again(recipe.address)
    return None if message is None else _read(recipe, message, demand)


def _read(recipe: Recipe, message: Message, demand: Demand) -> Kept | None:
    body, blobs = message
    count = int(body["codes"])
    read = functools.cache(parse)  # a graph and the same one with its runs
    parts = runs_from(parts_from(body["parts"], blobs[:count], demand, read), body["runs"], blobs[count:], read)
    found = recipe.folder.get(_verdict(recipe.address))
    verdict = dict(found[0]["evidence"]) if found is not None and found[0]["won"] else None
    return Kept(replace(recipe, verdict=verdict), parts, _account_from(body["account"]))


def keep(recipe: Recipe, parts: RunParts, native: Message, account: Account) -> bool:
    """Keep a plan that workers made; not one that lacks what failed for a reason that may pass."""
    if parts.message is None or account.counts.get("failed", 0):
        return False
    header, codes = native
    runs, blobs = parts.message
    body: dict[str, Any] = {"parts": header, "codes": len(codes), "runs": runs, "account": account.to_dict()}
    return recipe.folder.put(recipe.address, body, [*codes, *blobs], code_features())


def _account_from(data: Mapping[str, Any]) -> Account:
    diffs = tuple(
        Diff(PartitionChange(d["change"]), tuple(d["gone"]), tuple(d["made"]), int(d["nodes"]), str(d["why"]), dict(d["evidence"]))
        for d in data["history"]
    )
    counts = {k: int(data["counts"].get(k, 0)) for k in COUNTED}
    return Account(diffs, tuple(str(u) for u in data["units"]), counts, data["predicted_us"])


def _verdict(address: Address) -> Address:
    return Address("verdict", address.subject, address.basis)
