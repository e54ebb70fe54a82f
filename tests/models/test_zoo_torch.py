"""Torch models through `hotfuse.jit` give eager's outputs, over several shapes: at first, captured, and in kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import hotfuse
from benchmarks import zoo
from hotfuse.base.settings import Settings
from tests.races import new_plans_win_by

pytestmark = pytest.mark.zoo

RTOL = 1e-4
FULL = ("bert-base",)
"""Run with all their layers once; the others with two, which is the same architecture."""

LEARNING = 2
"""Passes until every shape is in a captured graph: each may show that one more dim varies."""
OWN_CODE: dict[str, str] = {}
"""Models that cannot be captured, and what `explain()` must say about it."""


@pytest.fixture(autouse=True)
def kernels_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tier serves must not depend on how busy the machine is: in races, what serves takes four times as long."""
    new_plans_win_by(monkeypatch, 4.0)


def load(name: str) -> zoo.ZooModel:
    try:
        return zoo.load(name, reduced=name not in FULL)
    except zoo.ZooUnavailable as e:
        pytest.skip(str(e))


def agree(got: Any, want: Any, where: str) -> None:
    """The same structure, dtypes and shapes, and no element further off than RTOL of the largest one."""
    assert type(got) is type(want), where
    flat_got, spec_got = pytree.tree_flatten(got)
    flat_want, spec_want = pytree.tree_flatten(want)
    assert spec_got == spec_want, where
    for i, (g, w) in enumerate(zip(flat_got, flat_want, strict=True)):
        assert (g.dtype, g.shape) == (w.dtype, w.shape), f"{where}, leaf {i}"
        error = float((g.double() - w.double()).abs().max() / w.double().abs().max())
        assert error <= RTOL, f"{where}, leaf {i}: relative error {error:.2e}"


@pytest.mark.parametrize("name", zoo.names("torch"))
def test_outputs_equal_eager(name: str) -> None:
    model = load(name)
    module = model.module
    assert module is not None
    cases = [model.inputs(seed=1, variant=v) for v in range(model.variants)]
    assert len(cases) >= 3
    with torch.inference_mode():
        wanted = [module(**case) for case in cases]
        with hotfuse.jit(module, settings=Settings().with_(hot_calls=1)) as fast:

            def serve(when: str) -> int:
                """Every case once; how many ran in a captured graph."""
                before = fast.stats()["graph_calls"]
                for v, (case, want) in enumerate(zip(cases, wanted, strict=True)):
                    agree(fast(**case), want, f"{name} variant {v}, {when}")
                return fast.stats()["graph_calls"] - before

            assert serve("at first") <= len(cases)
            for _ in range(LEARNING):
                assert fast.wait(timeout=240)
                serve("while learning")
            assert fast.wait(timeout=240)
            missed = fast.stats()["guard_misses"]
            in_graph = serve("at last")
            if name in OWN_CODE:
                assert in_graph == 0 and OWN_CODE[name] in str(fast.explain(full=True)), str(fast.explain(full=True))
            else:
                assert in_graph > 0 and fast.stats()["guard_misses"] == missed, str(fast.explain(full=True))  # some may be audited
                assert fast.wait(timeout=240)
                serve("in kernels")
                plans = [p for s in fast.explain().to_dict()["sites"] for p in s["plans"]]
                assert plans and all(p["tier"] >= 1 for p in plans), str(fast.explain(full=True))
                assert not {"refuse.mismatch", "drop.run_failed"} & set(fast.stats()["events"]), str(fast.explain(full=True))
