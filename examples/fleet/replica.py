"""One server of the fleet: a process that answers calls of given sizes and says what it took (one JSON line in, one out)."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings


class Block(nn.Module):
    """A norm and two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def traffic(fast: Any, model: nn.Module, width: int, rows: int, calls: int, seconds: float) -> dict[str, Any]:
    """Answer calls until compiled code has answered so many of them in a row, or time is up."""
    before = fast.stats()
    begin = time.monotonic()
    served, worst, tier1_s, answered = 0, 0.0, None, 0
    with torch.no_grad():
        while served < calls and time.monotonic() - begin < seconds:
            x = torch.randn(rows, width)
            tiers = fast.stats()["calls_per_tier"]
            worst = max(worst, float((fast(x) - model(x)).abs().max()))
            compiled = fast.stats()["calls_per_tier"]["1"] + fast.stats()["calls_per_tier"]["2"] > tiers["1"] + tiers["2"]
            served, answered = served + 1 if compiled else 0, answered + 1
            if compiled and tier1_s is None:
                tier1_s = round(time.monotonic() - begin, 2)
            time.sleep(0.002)
    fast.wait(seconds)
    after = fast.stats()
    return {
        "calls": answered, "worst": worst, "compiled_after_s": tier1_s,
        "units_compiled": after["compile"]["units_compiled"] - before["compile"]["units_compiled"],
        "from_shared": after["cache"]["from_shared"] - before["cache"]["from_shared"], "central": after["central"],
    }  # fmt: skip


def main() -> None:
    """Serve until there is no more to do."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = int(sys.argv[1])
    model = nn.Sequential(Block(width), Block(width)).eval()
    with hotfuse.jit(model, settings=Settings().with_(profiles_s=0.5, idle=False)) as fast:
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(traffic(fast, model, width, **asked)), flush=True)


if __name__ == "__main__":
    main()
