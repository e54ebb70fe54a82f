"""What a reader sees of a model on its way, as text: groups, tile programs, `explain()`. `pytest --update` writes what is expected.

Groups are those that access classes suggest, tile programs those for a core with stated vectors, so that no machine changes
them. Of `explain()` everything but what a clock or a memory tells.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.fusion.groups import group
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.lowering import lower
from hotfuse.tile.text import parse as parse_tile
from hotfuse.tile.text import show
from tests.races import slow_kernels, slow_library

HERE = Path(__file__).parent
MARK = "\n# ---- after\n"
CORES = {"8lanes": Core(lanes=8, registers=16), "16lanes": Core(lanes=16, registers=32)}
SLOW_S = 0.5
"""What the library sleeps for: a kernel in the interpreter takes a few hundredths of that."""
SLOWER_S = 0.2
"""What kernels sleep for: five rounds are lost, however busy the machine, since no other program holds a call up for so long."""


def cases(folder: str) -> list[Path]:
    return sorted((HERE / folder).glob("*.txt"))


def compared(path: Path, found: str, before: str = "", *, update: bool) -> None:
    if update:
        path.write_text(before + (MARK if before else "") + found, encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    assert found == (expected.partition(MARK)[2] if before else expected)


@pytest.mark.parametrize("path", cases("groups"), ids=lambda p: p.stem)
def test_groups(path: Path, update_golden: bool) -> None:
    before = path.read_text(encoding="utf-8").partition(MARK)[0]
    graph = verify(parse(before))
    groups = [f"{g.kind}: {' '.join(f'%{v.name}' for i in g.nodes for v in graph.nodes[i].outs)}\n" for g in group(graph)]
    compared(path, "".join(groups), before, update=update_golden)


@pytest.mark.parametrize("path", cases("tiles"), ids=lambda p: p.stem)
def test_tile_programs(path: Path, update_golden: bool) -> None:
    before = path.read_text(encoding="utf-8").partition(MARK)[0]
    core = CORES[path.stem.rpartition("_")[2]]
    text = show(lower(verify(parse(before)), core).kernel)
    assert show(parse_tile(text)) == text
    compared(path, text, before, update=update_golden)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(self.layer(x)), -1)


def without_measurements(text: str) -> str:
    """Lines about times and memory without their numbers."""
    measured = ("speed:", "in the way: tier", "holds:", "weights:")
    lines = [re.sub(r"\d[\d,.]*", "#", line) if line.startswith(measured) else line for line in text.splitlines()]
    return "\n".join(lines)


@pytest.mark.parametrize("outcome", ["deployed", "refused"])
def test_explain(outcome: str, update_golden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in the interpreter win against a library that sleeps, and lose where they do."""
    if outcome == "deployed":
        slow_library(monkeypatch, SLOW_S)
    else:
        slow_kernels(monkeypatch, SLOWER_S)
    settings = Settings(capture="inline", backend="interp", hot_calls=1, record=False, idle=False, watch=False)
    with torch.no_grad(), hotfuse.jit(Net().eval(), settings=settings) as fast:
        for _ in range(6):
            fast(torch.randn(3, 8))
        told = fast.explain()
    decisions = [f"{d['action']}: {d['why']}\n" for d in told.to_dict()["decisions"]]
    compared(HERE / "explain" / f"{outcome}.txt", without_measurements(str(told)) + "\n" + "".join(decisions), update=update_golden)
