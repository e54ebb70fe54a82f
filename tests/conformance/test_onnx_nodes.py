"""Every node case of the `onnx` package, run at once and through the traced graph.

Cases run in a few tests each way: the shared generators take seconds, and a list of what changed reads better than a
thousand names. `python -m tests.conformance.suite -v <filter>` looks closer.
"""

from __future__ import annotations

import pytest

from tests.conformance import suite

SHARDS = 4
EACH = pytest.mark.parametrize("shard", range(SHARDS))
AT_LEAST = 1750
"""More than ONNX Runtime 1.31 passes (1,334)."""


def _judge(shard: int, run: suite.Runner) -> None:
    names = sorted(suite.cases())[shard::SHARDS]  # neighbours are alike: every shard has some of each operator
    known, outcomes = suite.known_failures(), {name: suite.outcome(suite.cases()[name], run) for name in names}
    broken = [f"{name}: {why}" for name, why in outcomes.items() if why and name not in known]
    mended = [name for name, why in outcomes.items() if not why and name in known and not known[name].may_pass]
    assert not broken, f"{len(broken)} cases fail:\n" + "\n".join(broken[:40])
    assert not mended, "cases that pass now, take them off known_failures.txt: " + ", ".join(mended)


def test_known_failures_name_real_cases_and_give_reasons() -> None:
    known = suite.known_failures()
    assert [name for name in known if name not in suite.cases()] == []
    assert [name for name, k in known.items() if len(k.reason) < 10] == []
    assert len(suite.cases()) - len(known) >= AT_LEAST, "every other case passes, or a test below fails"


@EACH
def test_every_node_case_at_once(shard: int) -> None:
    _judge(shard, suite.interpret)


@EACH
@pytest.mark.budget_s(6)
@pytest.mark.parametrize("run", [suite.recorded, suite.recorded_with_constants])
def test_every_node_case_by_the_calls_that_were_recorded(shard: int, run: suite.Runner) -> None:
    _judge(shard, run)


@EACH
@pytest.mark.budget_s(20)
@pytest.mark.timeout(600)
def test_every_node_case_through_the_traced_graph(shard: int) -> None:
    _judge(shard, suite.through_trace)


def test_a_wrong_result_is_noticed() -> None:
    case = suite.cases()["test_relu"]
    assert suite.outcome(case, lambda data, inputs: [x + 1 for x in inputs]) != ""
    assert suite.outcome(case, lambda data, inputs: [x.astype("float64") for x in suite.interpret(data, inputs)]) != ""
