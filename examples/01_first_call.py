"""Tutorial 1: wrap a model, call it, see what serves.

`hotfuse.jit(model)` returns something that is called like the model. The first calls run the model's own code, so they cost what
they always cost; meanwhile another process captures the model and compiles it. Nothing ever waits for that, except a program that
asks to.
"""

from __future__ import annotations

import torch

import hotfuse


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).eval()
    x = torch.randn(8, 64)

    with torch.inference_mode(), hotfuse.jit(model) as fast:
        first = fast(x)
        print("the first call ran", calls(fast))
        torch.testing.assert_close(first, model(x))

        fast.wait(60)  # only programs like this one wait: a server just goes on
        for _ in range(3):
            for _ in range(8):
                fast(x)
            fast.wait(60)
        print("after some more:   ", calls(fast))
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        assert fast.stats()["graph_calls"] > 0, "a captured graph serves by now"


def calls(fast: hotfuse.Jit) -> str:
    """Who answered so far."""
    return ", ".join(f"{n} in {tier}" for tier, n in named(fast).items() if n)


def named(fast: hotfuse.Jit) -> dict[str, int]:
    """Calls by tier: the model's own code, library kernels, generated kernels, specialized ones."""
    names = {"module": "the model's own code", "0": "tier 0", "1": "tier 1", "2": "tier 2"}
    return {names[tier]: n for tier, n in fast.stats()["calls_per_tier"].items()}


if __name__ == "__main__":
    main()
