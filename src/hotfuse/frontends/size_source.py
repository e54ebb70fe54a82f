"""Where a size that stays open comes from, for torch's symbols: an input's dim, by a name of ours."""

from __future__ import annotations

import functools
from typing import Any

from torch._guards import GuardSource, Source

from hotfuse.base.lazy_dataclass import dataclass

_BY_TEMPLATE = hasattr(Source, "_name_template")
"""Whether this torch names a source by a template; before, `name` was a method."""


@dataclass(frozen=True)
class SizeSource(Source):
    """What `torch._dynamo.source.ConstantSource` is, which takes all of Dynamo to import."""

    size: str

    @functools.cached_property
    def guard_source(self) -> GuardSource:
        """No variable of anybody's."""
        return GuardSource.CONSTANT

    @property
    def _name_template(self) -> str:
        return self.size


def size_source(name: str) -> Any:
    """A source of that name."""
    if _BY_TEMPLATE:
        return SizeSource(name)
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)
