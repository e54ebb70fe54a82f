"""Answers of workers are frozen values: each arrives whole, and what does not fit the question is refused by name, and counted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hotfuse.analysis.resources import CorePeaks, Work
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.faults import faults
from hotfuse.compile import answer_bodies as bodies
from hotfuse.compile import captured_answers, requests
from hotfuse.compile.answer_bodies import BODIES, UNIT, VERSION, AnswerBody, message, received, refusal
from hotfuse.compile.compilation import Compilation
from hotfuse.compile.compilation_graph import UnitState
from hotfuse.compile.request_bodies import UnitRequest
from hotfuse.compile.workers.checked_json import described, encoded
from hotfuse.frontends.captured import Asked, Captured, DeadDraw, TensorInfo, Warned
from hotfuse.ir.text import parse, show
from tests.runtime.test_units import Scripted, a_kernel, chain

GOLDEN = Path(__file__).parents[1] / "golden" / "answers.txt"
GROUP = bodies.GroupFacts(2, "rows", "k", "tanh", Work(2, 7, 8, None, 9), 1e-6, 2e-6, open=0.5)
KERNEL = bodies.MadeKernel("kernel k", "header k", ("add",), ({"is": "buffer"},), (("y", ("s0", "4")),), "tanh", 0.5, 1.5, 2.5,
                           use={"us": 1.5})  # fmt: skip
EXAMPLES: tuple[AnswerBody, ...] = (
    bodies.Refusal("what", "where", "because", "try", "TIMEOUT"), bodies.ReadyAnswer(),
    bodies.CaptureAnswer("graph g() {}", {"w": 0}, {"c": bodies.TensorHeader("float32", (2, 3), "cpu")}, True, ("note",), (1,),
                         ((0, 1),), (("rand", (2,), "float32"),), (("text", "m:C", "a.py", 3, "m"),), 2, (("log", 30),),
                         (("class", 0),)),
    bodies.PlanAnswer((bodies.GroupedBody("graph g() {}", "id", (GROUP,), {"0": (1,)}, ("choice",), 3.5),), CorePeaks(),
                      {"strategies": {"compute": (1.0, 2.0, 3.0)}}),
    bodies.UnitMissing(("g",)), bodies.UnitKernel(KERNEL, "t", (KERNEL,), ("note",), ("k", "l")),
    bodies.UnitCut(1, "why", ((GROUP, GROUP),)), bodies.UnitRefused("it loses"),
    bodies.RunsAnswer({"graph": "g", "runs": []}, (KERNEL,), 2, ("note",)), bodies.ProbesAnswer(("a", "b")),
    bodies.CountingAnswer((1,), ("kernel k",), ("no",)), bodies.DevicePlanAnswer("graph g() {}", ((2, "rows"),), True),
    bodies.DeviceUnitAnswer((bodies.MadeDeviceKernel({"kernel": "k"}, {"grid": 1}, "64x64", {"programs": 4.0}),), "", "count"),
    bodies.DeviceTimesAnswer(3, "", 4, {"mape": 0.1}, True), bodies.KernelAnswer({"kernel": "k"}, {"parse": 0.1}),
    bodies.LearnedAnswer({"strategies": {"compute": (1.0,)}}),
    bodies.IdleAnswer(3, True, 4, bodies.ModelFacts(50, 0.2, "forest"), {"late": 1}),
    bodies.ProfileAnswer((bodies.PartitionDiagnosis("compute", "b", 0.1, {"flops": 0.5}, "measured", True, 2e9, None),), 3),
)  # fmt: skip


def told() -> int:
    return sum(n for text, n in faults.counts().items() if text.startswith("a worker's answer"))


def changed(header: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The answer with one value another: `path` is names and numbers between dots."""
    copy = json.loads(json.dumps(header))
    *within, last = path.split(".")
    at: Any = copy
    for step in within:
        at = at[int(step) if isinstance(at, list) else step]
    at[last] = value
    return copy


@pytest.mark.parametrize("body", EXAMPLES[1:], ids=lambda b: b.kind)
def test_an_answer_arrives_whole(body: AnswerBody) -> None:
    header, blobs = message(body, [b"code"])
    arrived = json.loads(json.dumps({**header, "usage": {"cpu_s": 1.0}}))
    assert received((arrived, blobs), type(body)) == received((header, blobs), type(body)) == (body, [b"code"])


def test_every_kind_has_an_example_and_names_differ() -> None:
    assert [type(b) for b in EXAMPLES] == list(BODIES)
    assert len({b.kind for b in BODIES}) == len(BODIES)
    around = {"answer", "version", "usage", "sizes"}
    assert [(b.__name__, f.name) for b in BODIES for f in dataclasses.fields(b) if f.name in around] == []


def test_a_refusal_is_raised_with_its_reason_and_is_no_wrong_answer() -> None:
    before, e = told(), CaptureError("what", where="a.py:1", because="b", hint="h", why=Why.STATEFUL)
    with pytest.raises(CaptureError) as caught:
        received(refusal(e), bodies.PlanAnswer)
    assert caught.value.why is Why.STATEFUL and caught.value.where == "a.py:1" and str(caught.value) == str(e)
    assert told() == before


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("version", VERSION + 1, "an answer of version"),
        ("answer", "runs", "answered by plan"),
        ("bodies", None, "bodies is not"),
        ("bodies.0.groups.0.nodes", "2", "nodes is not int"),
        ("bodies.0.groups.0.work.flops", "7", "flops is not int"),
        ("bodies.0.groups.0.kindd", "rows", "that its format lacks"),
        ("peaks.l1", 1.5, "l1 is not int"),
        ("history.strategies.compute", ["1"], "is not float"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_counted(path: str, value: Any, says: str) -> None:
    before, plan = told(), EXAMPLES[3]
    with pytest.raises(CaptureError, match="an answer of") as caught:
        received((changed(message(plan)[0], path, value), []), bodies.PlanAnswer)
    assert says in str(caught.value) and caught.value.why is Why.WRONG_ANSWER and told() == before + 1


def test_a_refusal_for_a_reason_that_is_not_known_here_is_a_refusal() -> None:
    refusal = bodies.Refusal("it cannot be captured", "here", "of something new", "", "INVENTED_LATER")
    with pytest.raises(CaptureError, match="it cannot be captured") as caught:
        received(message(refusal), bodies.PlanAnswer)
    assert caught.value.why is Why.WRONG_ANSWER


def test_what_is_missing_is_named() -> None:
    header = message(EXAMPLES[3])[0]
    del header["peaks"]
    with pytest.raises(CaptureError, match="is not complete") as caught:
        received((header, []), bodies.PlanAnswer)
    assert "peaks" in str(caught.value)


def test_a_unit_is_answered_in_one_of_four_ways() -> None:
    for body in EXAMPLES:
        if isinstance(body, UNIT):
            assert received(message(body), *UNIT) == (body, [])
        elif body.kind != "refusal":
            with pytest.raises(CaptureError, match="an answer of kind"):
                received(message(body), *UNIT)


def test_a_wrong_answer_leaves_its_unit_to_the_library() -> None:
    class Wrong(Scripted):
        def submit(self, task: Any) -> Any:
            future = super().submit(task)
            if task.header["kind"] == "unit":
                future.result()[0]["text"] = 7
            return future

    before, done = told(), Compilation(Wrong(lambda _h: a_kernel("k")), chain(["aten.tanh.default({})"]), {"s0": 4})
    done.run()
    assert {u.state for u in done.graph.units.values()} == {UnitState.LIBRARY} and done.graph.counts["failed"] == 1
    assert any("text is not str" in n for n in done.graph.note_lines()) and told() == before + 1


def test_what_a_worker_says_is_one_of_the_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    header, _ = requests.answer({"kind": "unit", **encoded(UnitRequest("rows", {}, (("g", (0,)),)))}, [])
    assert (header["answer"], header["version"], header["missing"]) == ("unit: missing", VERSION, ["g"])
    header, _ = requests.answer({"kind": "unit"}, [])
    assert (header["answer"], header["why"]) == ("refusal", "NOT_CAPTURABLE")


def test_a_captured_graph_comes_back_as_it_was() -> None:
    import torch

    info = TensorInfo(torch.float32, (2,), (), "cpu", parameter=False, requires_grad=False, data=b"\0" * 8)
    graph = parse('graph g(%x: f32[2]) {\n  param %c: f32[2] = "c"\n  %y: f32[2] = aten.add.Tensor(%x, %c)\n  return %y\n}\n')
    done = Captured(graph, {"w": 1}, {"c": info}, True, ("n",), (0,), ((0, 0),), (DeadDraw("rand", (2, 3), torch.float32),),
                    (Warned("t", "m:C", "f.py", 3, "m"),), 2, (("log", 20),), (Asked("class", 0),))  # fmt: skip
    header, blobs = message(*captured_answers.answer_of(done))
    found = captured_answers.captured_from((json.loads(json.dumps(header)), blobs))
    assert show(found.graph) == show(graph) and dataclasses.replace(found, graph=graph) == done


def test_schemas_change_with_the_version(update_golden: bool) -> None:
    nested = (bodies.TensorHeader, bodies.MadeKernel, bodies.GroupFacts, Work, bodies.GroupedBody, CorePeaks,
              bodies.MadeDeviceKernel, bodies.ModelFacts, bodies.PartitionDiagnosis)  # fmt: skip
    lines = [f"version {VERSION}", *(f"{b.kind}: {described(b)}" for b in BODIES), *map(described, nested), ""]
    if update_golden:
        GOLDEN.write_text("\n".join(lines))
    text = "\n".join(lines)
    assert text == GOLDEN.read_text(), "count VERSION up in compile.answer_bodies, then `pytest --update` writes this file"
