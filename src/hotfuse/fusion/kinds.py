"""Kinds of groups and of changes to them, by name, for those too who need nothing of what finds or prices them: it imports much."""

from __future__ import annotations

from enum import StrEnum


class GroupKind(StrEnum):
    """What kind of kernel a group of nodes asks for, by the loop nest at its centre. The values are names on the
    wire and in the cache.
    """

    GEMM_WEIGHT = "contract"
    """A product with a weight, which is packed once."""
    GEMM_ACTIVATION = "product"
    """A product of two activations."""
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    EXPERTS = "experts"
    """Rows in the order of the experts they go to, or one product for each expert that has any."""
    NIBBLES = "nibbles"
    """Few rows times weights of four bits, which are made floats in registers."""
    ROWS = "rows"
    """Elements, reductions and movement: loops over rows."""
    LIBRARY = "library"
    """Nodes that are left to their operators."""


ANCHORS = frozenset(GroupKind) - {GroupKind.ROWS, GroupKind.LIBRARY}
"""Kinds with a loop nest that nothing else fits into."""
WHOLE_GROUPS = frozenset({GroupKind.ATTENTION, GroupKind.RECURRENT, GroupKind.EXPERTS, GroupKind.NIBBLES})
"""Kinds whose groups are found as a whole: nobody joins or divides them later."""


class CandidateKind(StrEnum):
    """Ways to change what is built."""

    VERTICAL = "vertical"
    EPILOGUE = "epilogue"
    PROLOGUE = "prologue"
    HORIZONTAL = "horizontal"
    TILING = "tiling"
    RECOMPUTE = "recompute"
    SPLIT = "split"
    LIBRARY = "library"
    LAYOUT = "layout"
