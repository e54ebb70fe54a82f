"""Tutorial 5: why does it run the way it runs?

Every decision is a value with a reason and its evidence, refusals included. `explain()` is a snapshot of all of them: as text, as
plain data, as a page. docs/how-to-read-explain.md goes through it line by line.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import torch

import hotfuse


def main() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 384), torch.nn.GELU(), torch.nn.Linear(384, 96), torch.nn.LayerNorm(96)]
    model = torch.nn.Sequential(*layers).eval()
    with torch.inference_mode(), hotfuse.jit(model) as fast:
        for _ in range(10):
            fast(torch.randn(16, 96))
            fast.wait(60)
        explanation = fast.explain()

    print(explanation)  # for people
    print("\n" + explanation.text(full=True))  # for those who want to know it all; explain(full=True) prints the same
    found = explanation.to_dict()  # for programs
    print("\nactions:", dict(Counter(d["action"] for d in found["decisions"])))
    assert any(d["action"] == "capture" for d in found["decisions"]) and all(d["why"] for d in found["decisions"])
    with tempfile.TemporaryDirectory() as folder:
        page = explanation.to_html(Path(folder) / "explain.html")  # for a browser
        print(f"the same as a page: {page.stat().st_size} bytes")


if __name__ == "__main__":
    main()
