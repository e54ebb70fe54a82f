"""Each mechanism of the adaptive runtime is seen to work, and seen to be missing when it is switched off.

The rows are the list: `pytest tests/mechanisms --collect-only -q` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.mechanisms import compiling, deciding, serving, showing, watching
from tests.mechanisms.table import PARTS, Row, World

ROWS = (*watching.ROWS, *deciding.ROWS, *compiling.ROWS, *serving.ROWS, *showing.ROWS)
EACH = pytest.mark.parametrize("row", ROWS, ids=str)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_every_part_has_rows_and_every_row_a_name_of_its_own() -> None:
    assert {r.item for r in ROWS} == set(PARTS)
    assert len({str(r) for r in ROWS}) == len(ROWS)


@EACH
@pytest.mark.budget_s(20)
def test_on(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    assert row.probe(World(monkeypatch)) > 0


@EACH
@pytest.mark.budget_s(20)
def test_off(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, turned=row.off)
    row.off(world)
    assert row.probe(world) == 0
