"""A FastAPI application in front of a served model: its endpoints run in a pool of threads, and all of them call one model.

The changed line is `model = hotfuse.jit(model)`. Needs `fastapi`, and what its test client needs.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import hotfuse
from examples.recipes.common import Outcome, compared

NEEDS = ("fastapi",)


def application(model: Any) -> Any:
    """One endpoint: rows of numbers in, the model's out."""
    from fastapi import FastAPI

    app = FastAPI()

    @app.post("/rows")
    def rows(numbers: list[list[float]]) -> list[list[float]]:
        with torch.inference_mode():
            return model(torch.tensor(numbers)).tolist()

    return app


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    from fastapi.testclient import TestClient

    torch.manual_seed(0)
    width = 32 if tiny else 768
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)).eval()
    fast = hotfuse.jit(model)
    numbers = torch.randn(8, width).tolist()
    with TestClient(application(model)) as before, TestClient(application(fast)) as after, ThreadPoolExecutor(4) as pool:

        def ask(client: Any) -> torch.Tensor:
            return torch.tensor(list(pool.map(lambda _: client.post("/rows", json=numbers).json(), range(8))))

        return compared("FastAPI, 8 requests on 4 threads", lambda: ask(before), lambda: ask(after), fast,
                        lambda a, b: torch.allclose(a, b, rtol=1e-3, atol=1e-4), 0.0 if tiny else 15.0)  # fmt: skip


if __name__ == "__main__":
    main("--tiny" in sys.argv)
