"""Walking down trees in native code: a batch of some hundred candidates takes a fraction of a microsecond each.

One small function for every forest, compiled once in a process: trees are its data, and nothing that came out of a store is code.
Steps of one walk wait for each other, those of different rows do not: `TOGETHER` rows go down side by side. All rows go down one
tree before the next, which then lies in the nearest cache. Numbers are compared as integers of the same order (`ordered`): a
comparison and an addition with its carry are a step down.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.base.once import once
from hotfuse.hpm.compiled import columns as native

NODE = np.dtype([("threshold", "<u4"), ("place", "<u4")])
"""As the code reads it, 8 bytes at once: what to compare with; the first child's number above `FEATURE_BITS`, the column below."""
FEATURE_BITS = 8
MAX_FEATURES, MAX_NODES = 1 << FEATURE_BITS, 1 << (32 - FEATURE_BITS)
TOGETHER = 8


def ordered(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Integers in the order of single-precision numbers; both zeros are one, and what is no number lies below all."""
    bits = (np.fmax(x, _LOWEST) + _ZERO).view(np.int32)
    flip = bits >> 31
    flip |= _SIGN
    flip ^= bits
    return flip.view(np.uint32)


_LOWEST, _ZERO, _SIGN = np.float32(-np.inf), np.float32(0), np.int32(-(1 << 31))


def packed(
    feature: npt.NDArray[np.int64], threshold: npt.NDArray[np.float32], first: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """Nodes as the code reads them; raises ValueError where they are too many."""
    if len(feature) > MAX_NODES or feature.max() >= MAX_FEATURES:
        raise ValueError(f"a forest of {len(feature)} nodes over {feature.max() + 1} columns")
    made = np.empty(len(feature), NODE)
    made["threshold"], made["place"] = ordered(threshold), (first << FEATURE_BITS) | feature
    return made


def _code() -> str:
    """Rows beyond the last walk as the last one; their sums go to places that nobody reads."""

    def all_of(*lines: str) -> str:
        return "\n".join(f"  {line.replace('#', str(k))}" for line in lines for k in range(TOGETHER))

    def one_by_one(*lines: str) -> str:  # few numbers wait for each other, so that registers suffice
        return "\n".join(f"  {line.replace('#', str(k))}" for k in range(TOGETHER) for line in lines)

    rows = all_of(
        "%w# = add i64 %c, #",
        "%in# = icmp ult i64 %w#, %final",
        "%r# = select i1 %in#, i64 %w#, i64 %final",
        "%o# = mul i64 %r#, %width",
        "%own# = getelementptr i32, ptr %x, i64 %o#",
    )
    down = one_by_one(
        "%np# = getelementptr i64, ptr %nodes, i64 %at#",
        "%node# = load i64, ptr %np#",
        "%column# = lshr i64 %node#, 32",
        f"%f# = and i64 %column#, {MAX_FEATURES - 1}",
        "%xp# = getelementptr i32, ptr %own#, i64 %f#",
        "%v# = load i32, ptr %xp#",
        "%limit# = trunc i64 %node# to i32",
        "%more# = icmp ult i32 %limit#, %v#",
        "%right# = zext i1 %more# to i64",
        f"%first# = lshr i64 %node#, {32 + FEATURE_BITS}",
        "%next# = add i64 %first#, %right#",
    )
    added = all_of(
        "%vp# = getelementptr double, ptr %values, i64 %next#",
        "%value# = load double, ptr %vp#",
        "%op# = getelementptr double, ptr %out, i64 %w#",
        "%sum# = load double, ptr %op#",
        "%total# = fadd double %sum#, %value#",
        "store double %total#, ptr %op#",
    )
    return f"""
define void @walk(ptr %nodes, ptr %values, ptr %roots, i64 %trees, i64 %depth, ptr %x, i64 %n, i64 %width, ptr %out) {{
begin:
  %final = sub i64 %n, 1
  br label %tree
tree:
  %t = phi i64 [ 0, %begin ], [ %t1, %done ]
  %rp = getelementptr i32, ptr %roots, i64 %t
  %root32 = load i32, ptr %rp
  %root = zext i32 %root32 to i64
  br label %row
row:
  %c = phi i64 [ 0, %tree ], [ %c1, %leaf ]
{rows}
  br label %step
step:
  %d = phi i64 [ 0, %row ], [ %d1, %step ]
{all_of("%at# = phi i64 [ %root, %row ], [ %next#, %step ]")}
{down}
  %d1 = add i64 %d, 1
  %deeper = icmp ult i64 %d1, %depth
  br i1 %deeper, label %step, label %leaf
leaf:
{added}
  %c1 = add i64 %c, {TOGETHER}
  %rest = icmp ult i64 %c1, %n
  br i1 %rest, label %row, label %done
done:
  %t1 = add i64 %t, 1
  %others = icmp ult i64 %t1, %trees
  br i1 %others, label %tree, label %end
end:
  ret void
}}
"""


@once
def _compiled() -> native.NativeFunction:
    a, n = native.ARRAY, native.NUMBER
    return native.function(_code(), "walk", [a, a, a, n, n, a, n, n, a])


def sums(
    nodes: npt.NDArray[Any], values: npt.NDArray[np.float64], roots: npt.NDArray[np.int32], depth: int, x: npt.NDArray[np.uint32]
) -> npt.NDArray[np.float64]:  # fmt: skip
    """The sum over all trees of the leaf that each row ends at; nodes point at nodes, and ask for columns that are there."""
    out = np.zeros(len(x) + TOGETHER)
    if len(x):
        _compiled()(nodes, values, roots, len(roots), max(depth, 1), x, len(x), x.shape[1], out)
    return out[: len(x)]
