"""Graphs for the fusion benchmark: one decision each, at several sizes, and small blocks of which every cut is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotfuse.fusion.layout import channels_last
from hotfuse.fusion.recomputed_operands import with_own_operands
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse

Step = str | tuple[str, str]
"""What a value is computed by, and its type where that is not the graph's."""
Sizes = list[dict[str, int]]


def _chain(*steps: Step, inputs: str = "%x: f32[R, C]", params: Sequence[str] = (), result: str = "f32[R, C]") -> str:
    told = [(s, result) if isinstance(s, str) else s for s in steps]
    body = [f"  %v{i}: {t} = {s}" for i, (s, t) in enumerate(told)]
    return "\n".join([f"graph main({inputs}) {{", *params, *body, f"  return %v{len(steps) - 1}", "}"])


_ROWS: Sizes = [{"R": r, "C": 768} for r in (8, 128, 1024, 4096)]
_TWO = "%x: f32[R, C], %y: f32[R, C]"
_VECTORS = ('  param %b: f32[C] = "b"', '  param %s: f32[C] = "s"')
_SQUARE = ('  param %w: f32[C, C] = "w"', '  param %b: f32[C] = "b"')
_PRODUCTS: Sizes = [{"R": 8, "C": 256}, {"R": 128, "C": 256}, {"R": 128, "C": 768}, {"R": 512, "C": 512}]
_CONV = ('  param %w: f32[C, C, 3, 3] = "w"', '  param %b: f32[C] = "b"')
_IMAGES: Sizes = [{"R": 14, "C": 64}, {"R": 28, "C": 64}, {"R": 56, "C": 32}]
_FILTER = "aten.conv2d.default({}, %w, %b, [1, 1], [1, 1], [1, 1], 1)"

FAMILIES: dict[str, tuple[tuple[str, Sizes], ...]] = {
    "pointwise": (
        (_chain("aten.relu.default(%x)", "aten.mul.Tensor(%v0, %y)", "aten.add.Tensor(%v1, %x)", inputs=_TWO),
         [{"R": r, "C": 1024} for r in (8, 128, 1024, 4096)]),
        (_chain("aten.gelu.default(%x)", "aten.tanh.default(%v0)", "aten.sigmoid.default(%v1)", "aten.exp.default(%v2)"),
         _ROWS[:3]),
    ),
    "broadcast": (
        (_chain("aten.add.Tensor(%x, %b)", "aten.tanh.default(%v0)", "aten.mul.Tensor(%v1, %s)", params=_VECTORS), _ROWS),
        # a function of one row, used by all: fused, it is computed again for each
        (_chain(("aten.gelu.default(%r)", "f32[1, C]"), "aten.mul.Tensor(%x, %v0)", inputs="%x: f32[R, C], %r: f32[1, C]"),
         _ROWS[:3]),
    ),
    "reduction": (
        (_chain("aten.add.Tensor(%x, %y)", "aten.layer_norm.default(%v0, [C], %w, %b, 1e-05)", "aten.relu.default(%v1)",
                inputs=_TWO, params=('  param %w: f32[C] = "w"', '  param %b: f32[C] = "b"')), _ROWS[:3]),
        # a function before a reduction that reads its input several times
        (_chain("aten.gelu.default(%x)", "aten.softmax.int(%v0, -1)"), _ROWS[:3]),
    ),
    "contraction": (
        (_chain("aten.linear.default(%x, %w, %b)", "aten.gelu.default(%v0)", "aten.add.Tensor(%v1, %x)", params=_SQUARE),
         _PRODUCTS),
        # a prologue: fused, it is computed again for each panel of columns
        (_chain("aten.gelu.default(%x)", "aten.linear.default(%v0, %w, %b)", params=_SQUARE), _PRODUCTS[1:]),
    ),
    "conv": (
        (_chain(_FILTER.format("%x"), "aten.relu.default(%v0)", "aten.add.Tensor(%v1, %x)", inputs="%x: f32[1, C, R, R]",
                result="f32[1, C, R, R]", params=_CONV), _IMAGES),
        (_chain("aten.silu.default(%x)", _FILTER.format("%v0"), "aten.silu.default(%v1)", inputs="%x: f32[1, C, R, R]",
                result="f32[1, C, R, R]", params=_CONV), _IMAGES[:2]),
    ),
}  # fmt: skip
"""One decision: all nodes as one kernel, or each by itself."""

_WEIGHTS = (
    '  param %w: f32[C, C] = "w"',
    '  param %u: f32[C, C] = "u"',
    '  param %g: f32[C] = "g"',
    '  param %b: f32[C] = "b"',
)
BLOCKS: dict[str, tuple[str, Sizes]] = {
    "mlp": (
        _chain("aten.linear.default(%x, %w, %b)", "aten.gelu.default(%v0)", "aten.linear.default(%v1, %u, None)",
               "aten.add.Tensor(%v2, %x)", "aten.layer_norm.default(%v3, [C], %g, %b, 1e-05)", params=_WEIGHTS),
        [{"R": 64, "C": 256}, {"R": 256, "C": 384}],
    ),
    "gate": (
        _chain("aten.linear.default(%x, %w, None)", "aten.linear.default(%x, %u, None)", "aten.silu.default(%v0)",
               "aten.mul.Tensor(%v2, %v1)", "aten.add.Tensor(%v3, %x)", params=_WEIGHTS),
        [{"R": 64, "C": 256}, {"R": 256, "C": 384}],
    ),
    "norms": (
        _chain("aten.add.Tensor(%x, %b)", "aten.softmax.int(%v0, -1)", "aten.mul.Tensor(%v1, %g)",
               "aten.layer_norm.default(%v2, [C], %g, %b, 1e-05)", "aten.tanh.default(%v3)", "aten.add.Tensor(%v4, %v0)",
               params=_WEIGHTS[2:]),
        [{"R": 64, "C": 512}, {"R": 1024, "C": 768}],
    ),
}  # fmt: skip
"""Small graphs of which every cut is measured."""

_WIDE = (
    '  param %w: f32[D, C] = "w"',
    '  param %u: f32[C, D] = "u"',
    '  param %g: f32[C] = "g"',
    '  param %b: f32[C] = "b"',
)
_HELD = 40
KINDS: dict[str, dict[str, tuple[str, Sizes]]] = {
    "tiling": {
        "mlp": (_chain(("aten.linear.default(%x, %w, None)", "f32[R, D]"), "aten.linear.default(%v0, %u, None)", params=_WIDE[:2]),
                [{"R": 2048, "C": 128, "D": 512}, {"R": 2048, "C": 64, "D": 512}, {"R": 4096, "C": 64, "D": 256}]),
        "norm, head": (_chain("aten.layer_norm.default(%x, [C], %g, %b, 1e-05)",
                              ("aten.linear.default(%v0, %w, None)", "f32[R, D]"), params=(_WIDE[0], *_WIDE[2:])),
                       [{"R": 1024, "C": 768, "D": 16}, {"R": 1280, "C": 768, "D": 64}]),
        "softmax, values": (_chain("aten.softmax.int(%x, -1)", ("aten.linear.default(%v0, %w, None)", "f32[R, D]"),
                                   params=_WIDE[:1]), [{"R": 1024, "C": 1024, "D": 64}]),
    },
    "split": {
        # a polynomial of many terms that are all needed at the end: more values at once than registers
        "many terms": (_chain(*(f"aten.mul.Tensor(%x, {i + 1}.5)" for i in range(_HELD)),
                              *(f"aten.mul.Tensor(%{f'v{_HELD + i - 1}' if i else 'x'}, %v{i})" for i in range(_HELD))),
                       [{"R": 64, "C": 512}, {"R": 1024, "C": 1024}]),
        "functions, norm": (_chain("aten.gelu.default(%x)", "aten.tanh.default(%v0)", "aten.mul.Tensor(%v1, %x)",
                                   "aten.layer_norm.default(%v2, [C], %g, %b, 1e-05)", "aten.sigmoid.default(%v3)",
                                   params=_WIDE[2:]), [{"R": 512, "C": 768}]),
    },
}  # fmt: skip
"""Graphs that call for blocks of rows, or for a kernel to be split (`benchmarks.fusion_kinds`)."""


def graph_of(text: str, sizes: Mapping[str, int]) -> Graph:
    """A graph of numbers, in the form that grouping sees."""
    for name, size in sizes.items():
        for end in (",", "]"):
            text = text.replace(f" {name}{end}", f" {size}{end}").replace(f"[{name}{end}", f"[{size}{end}")
    return with_own_operands(channels_last(parse(text)))
