"""Real ONNX models give ONNX Runtime's outputs, over several shapes: at first, captured, and in generated kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest

import hotfuse
from benchmarks import zoo
from hotfuse.base.settings import Settings
from tests.races import new_plans_win_by

pytestmark = pytest.mark.zoo

RTOL = 1e-4
LEARNING = 3
"""Passes until every shape is in a captured graph, each of which may show that one more dim varies, and hot there."""


@pytest.fixture(autouse=True)
def kernels_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tier serves must not depend on how busy the machine is: in races, what serves takes four times as long."""
    new_plans_win_by(monkeypatch, 4.0)


def load(name: str) -> zoo.ZooModel:
    try:
        return zoo.load(name)
    except zoo.ZooUnavailable as e:
        pytest.skip(str(e))


def agree(got: Sequence[Any], want: Sequence[Any], where: str) -> None:
    """Same dtypes and shapes, and no element further off than RTOL of the largest one."""
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.dtype, g.shape) == (w.dtype, w.shape), f"{where}, output {i}"
        error = float(np.abs(g.astype(np.float64) - w).max() / np.abs(w).max())
        assert error <= RTOL, f"{where}, output {i}: relative error {error:.2e}"


def reference(model: zoo.ZooModel) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.path, options)


@pytest.mark.parametrize("name", zoo.names("onnx"))
def test_outputs_equal_onnx_runtime(name: str) -> None:
    model = load(name)
    peer = reference(model)
    cases = [model.inputs(seed=1, variant=v) for v in range(model.variants)]
    wanted = [peer.run(None, case) for case in cases]
    assert len(cases) >= 3
    with hotfuse.InferenceSession(model.path, settings=Settings().with_(hot_calls=1)) as session:
        assert [i.name for i in session.get_inputs()] == [i.name for i in peer.get_inputs()]
        assert [o.name for o in session.get_outputs()] == [o.name for o in peer.get_outputs()]

        def serve(when: str) -> int:
            """Every case once; how many ran in a captured graph."""
            before = session.stats()["graph_calls"]
            for v, (case, want) in enumerate(zip(cases, wanted, strict=True)):
                agree(session.run(None, case), want, f"{name} variant {v}, {when}")
            return session.stats()["graph_calls"] - before

        assert serve("at first") <= len(cases)
        for _ in range(LEARNING):
            assert session.wait(timeout=240)
            serve("while learning")
        assert session.wait(timeout=240)
        missed = session.stats()["guard_misses"]
        assert serve("at last") > 0, str(session.explain(full=True))
        assert session.stats()["guard_misses"] == missed, str(session.explain(full=True))  # some calls may be audited
        assert session.wait(timeout=240)
        serve("in kernels")
        plans = [p for s in session.explain().to_dict()["sites"] for p in s["plans"]]
        assert plans and all(p["tier"] >= 1 for p in plans), str(session.explain(full=True))
        assert not {"refuse.mismatch", "drop.run_failed"} & set(session.stats()["events"]), str(session.explain(full=True))
        assert session.explain().to_dict()["fallbacks"] == {}, "every operator has a mapping of its own"
