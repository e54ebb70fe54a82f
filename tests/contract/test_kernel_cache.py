"""What a worker has at hand: which of it a request sees follows from that request alone."""

from __future__ import annotations

import pytest

from hotfuse.compile.unit import units
from hotfuse.compile.unit.kernel_cache import allowed_by, kernel_cache

GRAPH = """graph main(%x: f32[4, 8]) {
  %y: f32[4, 8] = aten.relu.default(%x)
  return %y
}
"""


@pytest.mark.parametrize("asked", [{"precision": "bf16"}, {"objective": "memory"}], ids=str)
def test_a_request_decides_for_itself_alone(asked: dict[str, str]) -> None:
    """In a process that answers its own requests, what comes next would otherwise be lowered as the last one wanted it."""
    plain = kernel_cache()
    with allowed_by(asked):
        assert kernel_cache() is not plain
        with allowed_by({}):
            assert kernel_cache() is plain
    assert kernel_cache() is plain
    units.plan({"graph": GRAPH, "dims": {}, **asked}, [])
    assert kernel_cache() is plain


def test_a_request_that_fails_leaves_nothing_either() -> None:
    plain = kernel_cache()
    with pytest.raises(ValueError, match="of no use"), allowed_by({"precision": "bf16"}):
        raise ValueError("of no use")
    assert kernel_cache() is plain
