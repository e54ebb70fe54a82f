"""Cells of benchmark grids: kept under what they were measured with, measured in slices, never half written."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cells import Cell, Cells


class Grid:
    """Three cells, each of which takes ten seconds of a clock that is told."""

    def __init__(self, folder: Path, key: str = "k", seconds: float = 1e9, again: bool = False) -> None:
        self.now, self.measured = 0.0, list[str]()
        self.cells = Cells(folder, key, seconds, again, clock=lambda: self.now)
        for name in ("t1 a->b 1x1/2 @7", "t2 a->b 1x1/2 @7", "t1 other"):
            self.cells.measured(name, lambda name=name: self.measure(name))

    def measure(self, name: str) -> Cell:
        self.measured.append(name)
        self.now += 10
        return {"name": name, "ratio": 1.5}


def test_a_slice_ends_and_the_next_goes_on(tmp_path: Path) -> None:
    first = Grid(tmp_path, seconds=15)
    assert first.measured == ["t1 a->b 1x1/2 @7", "t2 a->b 1x1/2 @7"]
    assert first.cells.left == ["t1 other"] and "1 cells still" in first.cells.remaining()
    second = Grid(tmp_path, seconds=15)
    assert second.measured == ["t1 other"] and not second.cells.remaining()
    assert [c["name"] for c in second.cells.found] == ["t1 a->b 1x1/2 @7", "t2 a->b 1x1/2 @7", "t1 other"]
    assert not [p for p in tmp_path.iterdir() if p.suffix != ".json"]


def test_what_was_measured_with_something_else_is_measured_again(tmp_path: Path) -> None:
    assert len(Grid(tmp_path).measured) == 3
    assert Grid(tmp_path).measured == []
    assert len(Grid(tmp_path, key="other sources").measured) == 3
    assert len(Grid(tmp_path, key="other sources", again=True).measured) == 3
