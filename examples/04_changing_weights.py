"""Tutorial 4: a model that changes while it is served.

Compiled code holds packed copies of weights, and still a change of the model shows in the very next call: every call checks that
the weights it was compiled for are those of now. What no longer holds falls back to the model's own code and is captured again.
"""

from __future__ import annotations

import torch

import hotfuse


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32).eval()
    x = torch.randn(4, 32)
    with torch.inference_mode(), hotfuse.jit(model) as fast:
        for _ in range(8):
            fast(x)
            fast.wait(60)
        print("calls by tier:", fast.stats()["calls_per_tier"])

        model.weight.mul_(2)  # in place
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        model.bias = torch.nn.Parameter(torch.zeros(32))  # another tensor altogether
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)

        fast.wait(60)
        changed = [d for d in fast.explain().to_dict()["decisions"] if "changed" in d["why"]]
        for decision in changed:
            print(f"{decision['action']}: {decision['why']}")
        assert changed, "the change was noticed, and is told"


if __name__ == "__main__":
    main()
