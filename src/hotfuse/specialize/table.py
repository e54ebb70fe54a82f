"""The table of specializations: for each, the evidence it needs, what it proposes, its guard, and the cost of a wrong bet.

A row is data. `runtime.tierup.proposals` has, for each row, the function that looks at an entry and proposes; the engine takes the
proposal with the highest expected value, and plans compose: `runtime.tierup.layers` builds the layers of a plan in the order of
this table, the outermost first. To add a specialization: a row here, a strategy in a file beside this one, a layer and a proposer.
"""

from __future__ import annotations

from hotfuse.base.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """What an attempt at a better plan is known by: what was refused under a key is not tried again."""

    row: str
    """A row of the table, `fused` (tier 1) or `against` (a strategy against a bottleneck)."""
    about: str = ""
    """Of what: sizes, a condition and its outcome, an input."""
    tier: int = 2

    def __str__(self) -> str:
        if self.row == FUSED:
            return self.about or "tier 1"
        if self.row == AGAINST:
            return f"{self.about}, tier 1"
        return f"{self.row}: {self.about}" if self.about else self.row


FUSED, AGAINST = "fused", "against"
TIER1 = AttemptKey(FUSED, tier=1)
PART_OF_TIER1 = AttemptKey(FUSED, "part of tier 1", 1)
REPLANNED = AttemptKey(FUSED, "tier 1 by measured weights", 1)
"""Tier 1 grouped anew by what its partitions took while they served."""
DEVICE_KERNELS = AttemptKey("device kernels")
"""Kernels generated for an accelerator, instead of the library's: the likeliest of each group."""
TUNED_KERNELS = AttemptKey("device kernels", "of every tiling")
"""The same of all that are worth a trial, chosen in the whole plan."""


PLACED = AttemptKey("device")
"""A model of the host on a device, between transfers, where the settings allow that."""


@dataclass(frozen=True, slots=True)
class Specialization:
    """A row."""

    name: str
    evidence: str
    """What calls must have shown, in `{share}` of something."""
    share: float
    """That part: proposers ask for no less."""
    proposes: str
    """What becomes of the graph."""
    guard: str
    """What is asked in every call, and where a call goes for which it does not hold."""
    when_wrong: str
    """What a wrong bet costs."""
    prior: float
    """How likely it is to win its race, before any race was run."""
    saves: float = 0.0
    """The part of a call's time that it saves where it pays and nothing else tells (of rows of zeros: of those left out); 0 where
    proposers always know."""

    @property
    def needs(self) -> str:
        """The evidence with its figure."""
        return self.evidence.format(share=f"{self.share:.0%}")


BRANCH, REPEATED, DUPLICATES, OPEN_MASK = "branch", "repeated inputs", "duplicate rows", "open mask"
PADDING, ZERO_ROWS, SIZES = "packed rows", "zero rows", "sizes"

ROWS: tuple[Specialization, ...] = (
    Specialization(
        BRANCH, "a condition went one way in {share} of sampled calls", 0.8, "the branch written out behind its condition",
        "the condition itself; other outcomes run the general code from there on", "the condition is asked in Python", 0.6, 0.25,
    ),
    Specialization(
        REPEATED, "inputs come again in {share} of the calls while others change", 0.4,
        "what depends on them alone is kept, not run again",
        "their bytes against those of up to four kept contents; others run the plan there was until they come a second time",
        "three calls that compute it apart, or 32 that took longer in all; then the plan there was, for up to 256 or 1,024", 0.7,
    ),
    Specialization(
        DUPLICATES, "{share} of the rows of kept batches are there twice", 0.25,
        "distinct rows alone, and results spread over the batch",
        "the bytes of all rows, up to a share of distinct ones that was measured; others run the plan there was",
        "one look at the rows, given up for up to 128 calls after eight in vain where it takes half a per cent of a call", 0.6,
    ),
    Specialization(
        OPEN_MASK, "a mask let everything through in {share} of sampled calls", 0.8, "the graph without the mask",
        "every element of the mask; other masks run the plan there was", "one read of the mask", 0.6, 0.15,
    ),
    Specialization(
        PADDING, "a mask hides {share} of the rows of kept calls", 0.1, "live rows alone, packed once",
        "the share of live rows in the call's mask, below one that was measured; others run the plan there was",
        "one read of the mask, given up for up to 128 calls after eight in vain where it takes half a per cent of a call", 0.5, 0.3,
    ),
    Specialization(
        ZERO_ROWS, "{share} of the rows of a product's input are zero, or of four rows' steps", 0.1, "products that leave them out",
        "decided by data inside the kernel", "one read of the rows, given up after 64 calls in vain", 0.5, 0.3,
    ),
    Specialization(
        SIZES, "{share} of the calls have the same sizes", 0.2, "kernels for these sizes alone",
        "the sizes, in the site's inline cache; others run the entry's plan", "nothing: the cache compares sizes anyway", 0.4, 0.08,
    ),
)  # fmt: skip
"""In the order of layers: the outermost first; sizes are routes of the site, around all of them."""
NAMES = frozenset(r.name for r in ROWS)
LAYERED = tuple(r.name for r in ROWS if r.name != SIZES)
"""Rows that are layers of an entry's plan; sizes are routes around it."""


def row(name: str) -> Specialization:
    """A row by its name."""
    return next(r for r in ROWS if r.name == name)


def sizes_key(sizes: tuple[int, ...]) -> AttemptKey:
    """What a try at a version for sizes is known by."""
    return AttemptKey(SIZES, "x".join(map(str, sizes)))


def branch_key(condition: str, *, outcome: bool) -> AttemptKey:
    """What a try at a bet on a condition is known by."""
    return AttemptKey(BRANCH, f"{condition} is {str(outcome).lower()}")
