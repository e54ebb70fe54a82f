"""Calls that go straight to the model's own code before they are taken apart.

A site that rests says how many calls the model's own code answers before anything is looked up again. Of calls that are not plain
tensors, finding their site takes longer than many a small model: lists, dicts and objects are taken apart for it. So where all
sites of calls with so many arguments of such names rest, their rest is had without a look. The same goes for calls that never
have a site: what cannot be described, or never is captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotfuse.base.structure import Spec
from hotfuse.runtime.site import Site

Names = int | tuple[Any, ...]
"""How many arguments a call has by position, and the names of the others, where there are any."""
MAX_NAMES = 256
"""Combinations that have rests: names come in any order."""
CALLS_PER_REST, MAX_REST = 64, 255
"""A call without a site has one call behind it rest for so many before it, in a row, that had none, and at most so many."""


class Rests:
    """The rests of one engine. Takes no lock: a count that two threads take down at once is off by one."""

    def __init__(self, sites: Mapping[Spec, Site]) -> None:
        self._sites = sites
        self._left: dict[Names, int] = {}
        self._without_site: dict[Names, int] = {}
        """Calls in a row that had no site, those that rested among them."""
        self._granted: dict[Names, int] = {}
        """How many rested behind the last that was looked at."""

    def takes(self, names: Names) -> bool:
        """Whether a call is to go straight to the model's own code; counts it."""
        left = self._left.get(names, 0)
        if left <= 0:
            return False
        self._left[names] = left - 1
        return True

    def begin(self, names: Names, site: Site) -> None:
        """A call was found to be at a site that rests: if all that such calls may be at do, the next ones need not be looked at."""
        rest = min((s.resting for spec, s in list(self._sites.items()) if names_of(spec) == names), default=0)
        if rest > 0 and (names in self._left or len(self._left) < MAX_NAMES):
            site.resting -= rest
            self._left[names] = rest

    def without_site(self, names: Names) -> None:
        """A call had no site, and got none: the more of them come in a row, the fewer of the next ones are looked at. Sites that
        nobody comes to any more do not count: a graph that was made for a number which never returned is one."""
        if names not in self._without_site and len(self._without_site) >= MAX_NAMES:
            return
        met = self._without_site[names] = self._without_site.get(names, 0) + 1 + self._granted.get(names, 0)
        if (rest := min(met // CALLS_PER_REST, MAX_REST)) > 0:
            self._left[names] = self._granted[names] = rest

    def at_a_site(self, names: Names) -> None:
        """A call was found to be at a site: calls of such names are worth a look again."""
        if names in self._without_site:
            self._without_site.pop(names, None)
            self._granted.pop(names, None)


def names_of(spec: Spec) -> Names:
    """The argument names of a site's calls."""
    positional, named = spec.children
    return (len(positional.children), *named.detail) if named.detail else len(positional.children)
