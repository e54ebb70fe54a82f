"""One row per op: what the graph's vocabulary means, how it touches memory, what it costs.

Importing the package fills the table; a family of ops is one file.
"""

from hotfuse.ops import (
    attention,
    contract,
    conv,
    index,
    misc,
    movement,
    norm,
    packed,
    pointwise,
    recurrent,
    reduce,
    sym,
)
from hotfuse.ops.own import assume, experts, nibbles

__all__ = [
    "assume",
    "attention",
    "contract",
    "conv",
    "experts",
    "index",
    "misc",
    "movement",
    "nibbles",
    "norm",
    "packed",
    "pointwise",
    "recurrent",
    "reduce",
    "sym",
]
