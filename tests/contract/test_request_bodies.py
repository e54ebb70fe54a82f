"""Requests to workers are frozen values: each travels whole, with the settings that its kernels obey, or is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hotfuse.base.errors import CaptureError, InternalError
from hotfuse.base.settings import Settings
from hotfuse.compile import request_bodies as bodies
from hotfuse.compile import requests
from hotfuse.compile.answer_bodies import checked
from hotfuse.compile.request_bodies import BODIES, Request, body_of, request_of
from hotfuse.compile.request_context import VERSION, RequestContext, RequestSettings
from hotfuse.compile.workers.checked_json import described
from hotfuse.lower.cpu.tiling import Core
from hotfuse.profile.traffic import DataSize, MaskShare, MeasuredPiece, SizesShare, TrafficSeen, data_size

GOLDEN = Path(__file__).parents[1] / "golden" / "requests.txt"
TIMES = bodies.PartitionTimes("graph g() {}", {"s0": 3}, library=True, us=1.5, n=4, noise=0.25, balance=0.5, flops=7, bytes=-1)
EXAMPLES: tuple[Any, ...] = (
    bodies.ReadyRequest("torch"), bodies.TorchCapture({"inputs": []}), bodies.OnnxCapture({"inputs": []}),
    bodies.PresentCapture(3, {"inputs": []}), bodies.PlanRequest("graph g() {}", {"s0": 3}, TrafficSeen(
        (data_size("u0", (3, 4)),), (MaskShare("m", 0.5, 0.1, 4),), (SizesShare({"s0": 3}, 1.0),),
        (MeasuredPiece("graph g() {}", {}, False, 2.0, 0.1, 4, 8, None, 1.0),))),
    bodies.UnitRequest("rows", {"s0": 3}, (("g", (0, 1)), ("h", ())), ("g",), False, True, 2.5, True),
    bodies.RunsRequest({"graph": "g", "parts": [[0, 1, -1]]}, {}, ({"kernel": "k", "variants": None},), 1.5),
    bodies.ProbesRequest(), bodies.CountingRequest((1, 2), ("a", "b")), bodies.DevicePlanRequest("graph g() {}"),
    bodies.DeviceUnitRequest("graph g() {}", {"x": (4, 1)}, ("cuda", "90", 32), True, (0, 2), "NVIDIA H200", wanted="64x64"),
    bodies.DeviceTimesRequest("NVIDIA H200", "cuda 90", {"processors": 132},
                              (bodies.DeviceKernelTime("p", {"programs": 4.0}, 1e-6),), calibrated=True),
    bodies.KernelRequest("graph g() {}", Core(8, 16, 1 << 15, 1 << 20, "bf16", tiles=True, dots_bytes=False, lean=True, threads=3)),
    bodies.LearnedRequest({"strategies": {"compute": (1.0, 2.0, 3.0)}}), bodies.IdleRequest(2.0), bodies.ProfileRequest((TIMES,)),
)  # fmt: skip
ASKED = RequestSettings("bf16", "memory", 7, "interp", ("library",), "*")


def ids(body: Any) -> str:
    return body.kind


@pytest.mark.parametrize("body", EXAMPLES, ids=ids)
def test_a_request_arrives_whole(body: Any) -> None:
    header = Request(body, ASKED, RequestContext("p.sqlite")).header()
    arrived = json.loads(json.dumps(header))
    assert body_of(arrived) == body_of(header) == body
    assert RequestSettings.from_header(arrived) == ASKED
    assert arrived["profiles"] == "p.sqlite" and arrived["version"] == VERSION


def test_every_kind_has_an_example_and_a_handler() -> None:
    assert [type(b) for b in EXAMPLES] == list(BODIES)
    assert set(requests._HANDLERS) == set(BODIES)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("body", EXAMPLES, ids=ids)
def test_whatever_is_asked_the_settings_come_along(body: Any) -> None:
    asked = RequestSettings.from_header(request_of(body, Settings(precision="bf16", objective="memory", threads=7)).header())
    assert (asked.precision, asked.objective, asked.threads) == ("bf16", "memory", 7)


def test_no_field_hides_a_setting() -> None:
    around = {"kind", "version", "profiles", "record", "cache", "sizes"} | {f.name for f in dataclasses.fields(RequestSettings)}
    assert [(b.__name__, f.name) for b in BODIES for f in dataclasses.fields(b) if f.name in around] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dims": None}, "is not Mapping"),
        ({"dims": {"s0": "3"}}, "is not int"),
        ({"dims": {"s0": True}}, "is not int"),
        ({"graph": 5}, "is not str"),
        ({"objektive": "memory"}, "that its format lacks"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    header = {**Request(bodies.PlanRequest("graph g() {}", {"s0": 3}), ASKED).header(), **change}
    with pytest.raises(InternalError, match="a request of kind 'plan'") as e:
        body_of(header)
    assert says in str(e.value)
    with pytest.raises(CaptureError, match="a request of kind 'plan'"):
        checked(requests.answer(header, []))


def test_what_is_missing_is_named() -> None:
    header = Request(bodies.PlanRequest("graph g() {}", {}), ASKED).header()
    del header["dims"]
    with pytest.raises(InternalError, match="is not complete") as e:
        body_of(header)
    assert "dims" in str(e.value)


def test_schemas_change_with_the_version(update_golden: bool) -> None:
    seen = (TrafficSeen, DataSize, MaskShare, SizesShare, MeasuredPiece)
    nested = [described(kind) for kind in (bodies.PartitionTimes, Core, RequestSettings, *seen)]
    text = "\n".join([f"version {VERSION}", *(f"{b.kind}: {described(b)}" for b in BODIES), *nested, ""])
    if update_golden:
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "count VERSION up in compile.request_context, then `pytest --update` writes this file"
