"""Tutorial 3: shapes that change from call to call.

Calls of different lengths do not compile one version each. What was seen to change becomes a symbol of the captured graph, and one
plan with a guard serves every length that the guard allows. A length that no plan allows is answered by the model's own code, and
counted.
"""

from __future__ import annotations

import torch
from torch import nn

import hotfuse


class Scores(nn.Module):
    """A softmax over whatever length the text has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.inner(x) @ x.transpose(-1, -2), -1)


def main() -> None:
    torch.manual_seed(0)
    model = Scores().eval()
    lengths = [5, 9, 17, 3, 12, 31, 8, 24]
    with torch.inference_mode(), hotfuse.jit(model) as fast:
        for _ in range(2):
            for n in lengths:
                x = torch.randn(1, n, 32)
                torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
            fast.wait(60)
        stats = fast.stats()
        print(f"{stats['calls']} calls of {len(lengths)} lengths, {stats['graph_calls']} in {stats['plans']} captured graph(s)")
        for site in fast.explain().to_dict()["sites"]:
            for plan in site["plans"]:
                print("inputs:", ", ".join(plan["inputs"]), "| guards:", ", ".join(plan["guards"]) or "none")
        assert 0 < stats["plans"] < len(lengths), "not one graph per length"


if __name__ == "__main__":
    main()
