"""Every node case of the `onnx` package, run at once and through the traced graph.

All cases run in one test each way: the shared generators take seconds, and a list of what changed reads better than a
thousand names. `python -m tests.conformance.suite -v <filter>` looks closer.
"""

from __future__ import annotations

import pytest

from tests.conformance import suite

pytestmark = pytest.mark.xdist_group("onnx nodes")  # one process makes the cases
AT_LEAST = 1750
"""More than ONNX Runtime 1.31 passes (1,334)."""


def _judge(outcomes: dict[str, str]) -> None:
    known = suite.known_failures()
    broken = [f"{name}: {why}" for name, why in outcomes.items() if why and name not in known]
    mended = [name for name, why in outcomes.items() if not why and name in known and not known[name].may_pass]
    assert not broken, f"{len(broken)} cases fail:\n" + "\n".join(broken[:40])
    assert not mended, "cases that pass now, take them off known_failures.txt: " + ", ".join(mended)
    passed = sum(not why for why in outcomes.values())
    assert passed >= AT_LEAST, f"only {passed} cases pass"


def test_known_failures_name_real_cases_and_give_reasons() -> None:
    known = suite.known_failures()
    assert [name for name in known if name not in suite.cases()] == []
    assert [name for name, k in known.items() if len(k.reason) < 10] == []


def test_every_node_case_at_once() -> None:
    _judge({name: suite.outcome(case) for name, case in suite.cases().items()})


@pytest.mark.timeout(600)
def test_every_node_case_through_the_traced_graph() -> None:
    _judge({name: suite.outcome(case, suite.through_trace) for name, case in suite.cases().items()})


def test_a_wrong_result_is_noticed() -> None:
    case = suite.cases()["test_relu"]
    assert suite.outcome(case, lambda data, inputs: [x + 1 for x in inputs]) != ""
    assert suite.outcome(case, lambda data, inputs: [x.astype("float64") for x in suite.interpret(data, inputs)]) != ""
