"""Kernels of halves are held to what halves are: rounding on the way shows in results of float32 as well."""

from __future__ import annotations

import pytest
import torch

from hotfuse.base.errors import InternalError
from hotfuse.compile.variants.trial import HALVES_RTOL, RTOL, agree, halves_rtol
from hotfuse.ir.text import parse

INSIDE = """graph g(%x: f32[4, 4]) {
  %h: f16[4, 4] = aten.to.dtype(%x, f16)
  %s: f16[4, 4] = aten.sigmoid.default(%h)
  %y: f32[4, 4] = aten.to.dtype(%s, f32)
  return %y
}"""


@pytest.mark.parametrize(("text", "allowed"), [(INSIDE, HALVES_RTOL), (INSIDE.replace("f16", "bf16"), HALVES_RTOL),
                                               (INSIDE.replace("f16", "f32"), 0.0)])  # fmt: skip
def test_what_results_may_differ_by(text: str, allowed: float) -> None:
    assert halves_rtol(parse(text)) == allowed


def test_agreement_is_as_narrow_as_allowed() -> None:
    want = torch.ones(8)
    agree(want * (1 + 1e-3), want, None, HALVES_RTOL)
    with pytest.raises(InternalError, match="differs"):
        agree(want * (1 + 1e-3), want, None, RTOL)
    with pytest.raises(InternalError, match="differs"):
        agree(want * 1.1, want, None, HALVES_RTOL)
