"""Formulas as one native loop: the same numbers as formulas over arrays, row by row; what symbols cannot do is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotfuse.base.errors import InternalError
from hotfuse.hpm.compiled import columns as native
from hotfuse.hpm.features import NAMES, columns, derive
from hotfuse.hpm.fitted import TERMS
from hotfuse.hpm.roofline import Roofline
from hotfuse.hpm.work import COLUMN
from hotfuse.hpm.work import NAMES as ROW

AT = Roofline(2, 2e11, (25e3, 8e5, 1.6e7, 6.4e7), (2e11, 1e11, 3e10, 1e10), 1e-7, 2e-6, True, 3e9)


def _rows(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Rows of plausible and of odd counts: many zeros, single ones, large numbers."""
    r = np.random.default_rng(seed)
    made = np.floor(np.exp(r.uniform(0, 16, (count, len(ROW)))))
    made[r.random(made.shape) < 0.4] = 0
    made[r.random(made.shape) < 0.1] = 1
    for name, high in (("tile_height", 16), ("tile_vectors", 4), ("tile_sets", 4), ("lanes", 16), ("threads", 4)):
        made[:, COLUMN[name]] = r.integers(1, high + 1, count)
    made[:, COLUMN["library"]] = r.integers(0, 2, count)
    made[:, COLUMN["kept_products"]] = r.choice([0.25, 1 / 3, 1.0], count)
    made[:, COLUMN["tile_padding"]] = r.uniform(0, 0.3, count)
    return made


@pytest.mark.parametrize("count", [0, 1, 7, 400])
def test_native_formulas_say_what_arrays_say(count: int) -> None:
    table = _rows(count, count)
    found = derive(table, AT)
    with np.errstate(all="ignore"):
        want = columns({n: table[:, i].copy() for n, i in COLUMN.items()}, AT)
    assert found.x.shape == (count, len(NAMES)) and found.amounts.shape == (count, len(TERMS))
    for i, name in enumerate(NAMES):
        np.testing.assert_allclose(found.x[:, i], want.x[i].astype(np.float32), rtol=2e-7, atol=1e-6, err_msg=name)
    for i, name in enumerate(TERMS):
        np.testing.assert_allclose(found.amounts[:, i], want.amounts[i], rtol=1e-12, atol=1e-30, err_msg=name)
    for name in ("seconds", "compute", "memory", "bound", "level", "products"):
        np.testing.assert_allclose(getattr(found.roofline, name), getattr(want.roofline, name), rtol=1e-12, err_msg=name)
    assert np.array_equal(found.family, want.family)


def test_rows_that_do_not_lie_in_order_are_read_as_they_are() -> None:
    table = _rows(20)
    assert np.array_equal(derive(table[::2], AT).x, derive(table, AT).x[::2])
    assert np.array_equal(derive(np.asfortranarray(table), AT).x, derive(table, AT).x)


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(InternalError, match="columns"):
        derive(np.zeros((3, 5)), AT)


def test_what_symbols_cannot_do_is_said() -> None:
    s: Any = native.ColumnTrace().read("%row", 0)
    refused: list[Any] = [lambda: np.sin(s), lambda: np.interp(s, [0, 1], [0, 1]), lambda: ~s, lambda: s & (s > 0)]
    for use in refused:
        with pytest.raises(InternalError):
            use()


def test_what_was_computed_is_not_computed_again() -> None:
    t = native.ColumnTrace()
    s = t.read("%row", 3)
    before = (s + 1.0) * (s > 0)
    lines = len(t.lines)
    assert ((s + 1.0) * (s > 0)).name == before.name and len(t.lines) == lines
