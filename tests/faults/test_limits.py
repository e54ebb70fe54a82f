"""Numbers in a file that ask for terabytes or for ages end in an error that states the limit, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import ModelProto

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx import limits
from hotfuse.frontends.onnx.model_file import OnnxNode
from hotfuse.ops import control
from hotfuse.session import InferenceSession
from tests.faults import make_models as mk
from tests.faults.make_models import I64, F, node, raw, value
from tests.faults.test_model_mutations import run_cases

HUGE = 2**40
IMAGE = [1, 1, 4, 4]


def one(
    op: str, *constants: Any, shape: list[int] | None = None, opset: int = 17, out: int = F, **attrs: Any
) -> ModelProto:
    """A model of one node: an input when a shape is given, then constants (None for an absent input)."""
    names = [f"c{i}" if c is not None else "" for i, c in enumerate(constants)]
    given = [raw(n, c) for n, c in zip(names, constants, strict=True) if n]
    inputs = [] if shape is None else [value("x", F, shape)]
    nodes = [node(op, [*(["x"] if shape is not None else []), *names], ["y"], **attrs)]
    return mk.model(nodes, inputs, [value("y", out, None)], given, opset=opset)


ABSURD: dict[str, ModelProto] = {
    "ConstantOfShape": one("ConstantOfShape", np.int64([HUGE])),
    "ConstantOfShape, many sizes": one("ConstantOfShape", np.int64([2**20, 2**20, 2**20])),
    "Expand": one("Expand", np.int64([HUGE, 1, 1, 4]), shape=IMAGE),
    "Tile": one("Tile", np.int64([HUGE, 1, 1, 1]), shape=IMAGE),
    "Range": one("Range", np.int64(0), np.int64(2**62), np.int64(1), out=I64),
    "Pad": one("Pad", np.int64([0, 0, HUGE, 0, 0, 0, 0, 0]), shape=IMAGE),
    "Pad by attribute": one("Pad", shape=IMAGE, opset=10, pads=[0, 0, 0, 0, 0, 0, 0, HUGE]),
    "Pad, two axes": one("Pad", np.int64([2**20, 2**20, 1, 1]), None, np.int64([2, 3]), shape=IMAGE, opset=18),
    "Resize to sizes": one("Resize", None, None, np.int64([1, 1, 2**20, 2**20]), shape=IMAGE),
    "Resize by scales": one("Resize", None, np.float32([1, 1, 1e6, 1e6]), shape=IMAGE),
    "Upsample": one("Upsample", np.float32([1, 1, 1e6, 1e6]), shape=IMAGE, opset=9),
    "OneHot": one("OneHot", np.int64([0, 1]), np.int64(HUGE), np.float32([0, 1])),
    "Conv": one("Conv", np.ones((1, 1, 1, 1), np.float32), shape=IMAGE, pads=[2**20] * 4),
    "ConvTranspose": one("ConvTranspose", np.ones((1, 1, 1, 1), np.float32), shape=IMAGE, strides=[2**20] * 2),
    "RandomNormal": one("RandomNormal", shape=None, opset=17, dtype=1),
    "HannWindow": one("HannWindow", np.int64(HUGE)),
}  # fmt: skip
ABSURD["RandomNormal"].graph.node[0].attribute.append(mk.helper.make_attribute("shape", [HUGE]))
LOOP = mk.loop(2**62)


def test_absurd_sizes_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    """In a worker with little memory: a guard that is missing shows up as another error, a crash or a hang."""
    models = [*ABSURD.values(), LOOP]
    for k, made in enumerate(models):
        (tmp_path / f"{k}.onnx").write_bytes(made.SerializeToString())
    results, peak = run_cases("hotfuse", tmp_path, len(models))
    for k, name in enumerate(ABSURD):
        assert results[k]["outcome"] == "refused", f"{name}: {results[k]}"
        assert "would make a result of" in results[k]["text"], f"{name}: {results[k]['text']}"
        assert f"{limits.max_result_bytes():.3g} bytes" in results[k]["text"]
    assert results[len(ABSURD)]["outcome"] == "refused"
    assert f"trip count is {2**62}" in results[len(ABSURD)]["text"]
    assert peak < 1 << 20


def test_convolutions_that_take_in_what_follows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their channels too: 64 of them make 4 KiB of an image of 64 bytes."""
    made = one("Conv", np.ones((64, 1, 3, 3), np.float32), shape=IMAGE, pads=[1] * 4)
    feed = {"x": np.ones(IMAGE, np.float32)}
    monkeypatch.setattr(limits, "max_result_bytes", lambda: 1 << 16)
    assert InferenceSession(made.SerializeToString()).run(None, feed)[0].shape == (1, 64, 4, 4)
    monkeypatch.setattr(limits, "max_result_bytes", lambda: 1 << 11)
    with pytest.raises(ModelError, match="would make a result of"):
        InferenceSession(made.SerializeToString()).run(None, feed)


def test_loops_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop without a count, whose condition never turns false, is stopped; one within the limit is not."""
    monkeypatch.setattr(control, "MAX_TRIPS", 1000)
    x = {"x": np.array(0, np.float32)}
    endless = InferenceSession(mk.loop(2**63 - 1).SerializeToString())
    with pytest.raises(ModelError, match="after 1000 iterations"):
        endless.run(None, x)
    assert InferenceSession(mk.loop(1000).SerializeToString()).run(None, x)[0] == 1000
    with pytest.raises(ModelError, match="trip count is 1001"):
        InferenceSession(mk.loop(1001).SerializeToString()).run(None, x)


@pytest.mark.parametrize("name", sorted(ABSURD))
def test_the_guard_reads_the_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is the size the file asks for, not something else about the model."""
    reached: list[float] = []
    monkeypatch.setattr(limits, "max_result_bytes", lambda: 0)

    def seen(args: Any, attrs: Any) -> float:
        need = original(args, attrs)
        reached.append(need)
        return need

    op = ABSURD[name].graph.node[0].op_type
    original = limits.PREDICT[op]
    monkeypatch.setitem(limits.PREDICT, op, seen)
    session = InferenceSession(ABSURD[name].SerializeToString())
    feed = {a.name: np.ones(a.shape, np.float32) for a in session.get_inputs()}
    with pytest.raises(ModelError, match="would make a result of"):
        session.run(None, feed)
    assert reached and reached[0] >= HUGE


@pytest.mark.parametrize(
    ("made", "want"),
    [
        (one("ConstantOfShape", np.int64([2, 3])), [2, 3]),
        (one("Expand", np.int64([3, 1, 1]), shape=[1, 4]), [3, 1, 4]),
        (one("Tile", np.int64([2, 3]), shape=[1, 4]), [2, 12]),
        (one("Range", np.float32(0), np.float32(5), np.float32(2)), [3]),
        (one("Pad", np.int64([0, 1, 0, 2]), shape=[1, 4]), [1, 7]),
        (one("Pad", np.int64([-1, 0]), None, np.int64([-1]), shape=[1, 4], opset=18), [1, 3]),
        (one("Resize", None, np.float32([1, 1, 2, 2]), shape=IMAGE), [1, 1, 8, 8]),
        (one("OneHot", np.int64([0, 1]), np.int64(3), np.float32([0, 1])), [2, 3]),
        (one("Conv", np.ones((2, 1, 3, 3), np.float32), shape=IMAGE, pads=[1, 1, 1, 1]), [1, 2, 4, 4]),
        (one("Conv", np.ones((2, 1, 33, 33), np.float32), shape=IMAGE, pads=[16, 16, 16, 16]), [1, 2, 4, 4]),
        (one("Conv", np.ones((2, 1, 5, 5), np.float32), shape=IMAGE, pads=[32] * 4, dilations=[16, 16]), [1, 2, 4, 4]),
        (one("ConvTranspose", np.ones((1, 2, 1, 1), np.float32), shape=IMAGE, strides=[2, 2]), [1, 2, 7, 7]),
        (one("MaxPool", shape=IMAGE, kernel_shape=[2, 2], strides=[2, 2]), [1, 1, 2, 2]),
        (one("CenterCropPad", np.int64([2, 6]), shape=IMAGE, opset=18, axes=[2, 3]), [1, 1, 2, 6]),
    ],
)
def test_reckoned_sizes_cover_real_ones(made: ModelProto, want: list[int]) -> None:
    """The reckoning may be generous, never too small, and ordinary models run."""
    proto = made.graph.node[0]
    session = InferenceSession(made.SerializeToString())
    feed = {a.name: np.ones(a.shape, np.float32) for a in session.get_inputs()}
    y = session.run(None, feed)[0]
    assert list(y.shape) == want
    constants = {t.name: mk.numpy_helper.to_array(t) for t in made.graph.initializer}
    args = [feed.get(n, constants.get(n)) for n in proto.input]
    attrs = {a.name: mk.helper.get_attribute_value(a) for a in proto.attribute}
    reckoned = limits.PREDICT[proto.op_type](args, attrs)
    assert y.size - 1 < reckoned <= 4 * max(y.size, 16)


def test_a_size_that_fits_lets_no_larger_one_through() -> None:
    """Sizes are reckoned anew when they change; nothing is allocated here."""
    calls: list[Any] = []
    pooled = limits.guard(OnnxNode("MaxPool", "", ("x",), ("y",)), {}, lambda x: calls.append(x.shape))
    small, large = torch.empty(1, 3, 8, 8), torch.empty(1, 3, 2**22, 2**22, device="meta")
    pooled(small)
    for _ in range(2):
        with pytest.raises(ModelError, match="would make a result"):
            pooled(large)
    pooled(small)
    assert len(calls) == 2
