"""What a model does with constants alone is done once: the same results, nothing stale, nothing that must vary kept."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import hotfuse
from hotfuse.base.errors import ModelError
from hotfuse.base.settings import Settings
from hotfuse.frontends.onnx import constant_folding, packed_lstm
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.native.float_layers.layer_code import background_layers
from hotfuse.ops import one_step

Arrays = dict[str, np.ndarray[Any, Any]]
F32 = TensorProto.FLOAT
INLINE = Settings(capture="inline", tiers=0, record=False)


@pytest.fixture(autouse=True)
def libraries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code of small layers, which another test of this process may have begun, packs weights its own way."""
    monkeypatch.setattr(background_layers, "layers", None)
    monkeypatch.setattr(background_layers, "begin", lambda: None)


def built(
    nodes: list[onnx.NodeProto], inputs: Arrays, outputs: list[str], constants: Arrays, *, overridable: tuple[str, ...] = ()
) -> bytes:
    """A model of these nodes whose outputs have any shape."""
    def port(name: str, array: np.ndarray[Any, Any]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    graph = helper.make_graph(
        nodes, "g", [port(k, v) for k, v in inputs.items()] + [port(k, constants[k]) for k in overridable],
        [helper.make_tensor_value_info(o, F32, None) for o in outputs],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def module_of(data: bytes) -> OnnxModule:
    return OnnxModule(load(data))


def run(module: OnnxModule, *arrays: np.ndarray[Any, Any]) -> list[torch.Tensor]:
    return [t for t in module.forward(*[torch.from_numpy(a) for a in arrays]) if isinstance(t, torch.Tensor)]


def calls(module: OnnxModule) -> list[str]:
    return [c[-1].op for c in module.program.ready().calls]


GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("RNN", {}, True),
    ("RNN", {"activations": ["Relu"]}, False),
    ("GRU", {"linear_before_reset": 1}, True),
    ("GRU", {}, False),
    ("LSTM", {}, True),
    ("LSTM", {"clip": 0.5}, False),
    ("LSTM", {"input_forget": 1}, False),
    ("LSTM", {"peepholes": 1}, False),
    ("LSTM", {"lengths": 1}, True),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("op", "attrs", "prepared"), CASES)
def test_constant_weights_of_recurrent_layers(
    op: str, attrs: dict[str, Any], prepared: bool, direction: str, steps: int, bias: bool
) -> None:
    """Weights that are constants give what the same weights give as inputs, which nothing can prepare."""
    rng, d, n, batch = np.random.default_rng(3), 2 if direction == "bidirectional" else 1, GATES[op], 2
    attrs = dict(attrs)
    peepholes, lengths = attrs.pop("peepholes", 0), attrs.pop("lengths", 0)
    if "activations" in attrs:
        attrs["activations"] = attrs["activations"] * d
    x = {"x": rng.standard_normal((steps, batch, 6)).astype(np.float32)}
    w = {"w": rng.standard_normal((d, n * 5, 6)), "r": rng.standard_normal((d, n * 5, 5))}
    w |= {"b": rng.standard_normal((d, 2 * n * 5))} if bias else {}
    w |= {"p": rng.standard_normal((d, 15))} if peepholes else {}
    weights: Arrays = {k: v.astype(np.float32) for k, v in w.items()}
    lens: Arrays = {"lens": np.array([steps, 1], np.int32)} if lengths else {}
    names = ["x", "w", "r", "b" if bias else "", "lens" if lengths else "", "", "", "p" if peepholes else ""]
    outs = ["y", "h", "c"][: 2 if op != "LSTM" or lengths else 3]
    node = helper.make_node(op, names if op == "LSTM" else names[:6], outs, direction=direction, hidden_size=5, **attrs)
    constant = module_of(built([node], x | lens, outs, weights))
    given = module_of(built([node], x | lens | weights, outs, {}))
    got = run(constant, *x.values(), *lens.values())
    want = run(given, *x.values(), *lens.values(), *weights.values())
    again = run(constant, *x.values(), *lens.values())
    for g, w_, a in zip(got, want, again, strict=True):
        torch.testing.assert_close(g, w_, rtol=1e-5, atol=1e-6)
        assert torch.equal(g, a)
    assert given.prepared_bytes == 0
    zeros = 8 * n * 5 * d if op == "LSTM" and not bias else 0  # the library's own order has biases
    assert constant.prepared_bytes == (sum(weights[k].nbytes for k in weights) + zeros if prepared else 0)


@pytest.mark.parametrize(("bits", "zero"), [(4, ""), (4, "bytes"), (4, "floats"), (8, "bytes")])
@pytest.mark.parametrize("ordered", [True, False])
def test_constant_weights_in_blocks_are_expanded_once(bits: int, zero: str, ordered: bool) -> None:
    """What every call would do with 4 or 8 bits a weight is done once; a last block that is not full included."""
    rng, k, n, size = np.random.default_rng(4), 40, 6, 16
    blocks = -(-k // size)
    weights: Arrays = {
        "b": rng.integers(0, 256, (n, blocks, size * bits // 8), dtype=np.uint8), "s": rng.random((n, blocks), np.float32),
        "bias": rng.standard_normal(n).astype(np.float32),
    }  # fmt: skip
    if zero == "bytes":
        weights["z"] = rng.integers(0, 256, (n, -(-blocks * bits // 8)), dtype=np.uint8)
    elif zero:
        weights["z"] = (rng.random((n, blocks)) * 8).astype(np.float32)
    if not ordered:
        weights["g"] = rng.integers(0, blocks, k).astype(np.int32)
    names = ["x", "b", "s", "z" if zero else "", "" if ordered else "g", "bias"]
    node = helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", K=k, N=n, block_size=size, bits=bits)
    x: Arrays = {"x": rng.standard_normal((2, 3, k)).astype(np.float32)}
    constant, given = module_of(built([node], x, ["y"], weights)), module_of(built([node], x | weights, ["y"], {}))
    want = run(given, *x.values(), *weights.values())[0]
    for _ in range(2):
        torch.testing.assert_close(run(constant, x["x"])[0], want, rtol=1e-5, atol=1e-5)
    assert (constant.prepared_bytes, given.prepared_bytes) == (4 * n * k, 0)


def weaving() -> tuple[list[onnx.NodeProto], Arrays]:
    """A product with a weight that is put together of halves."""
    rng = np.random.default_rng(0)
    constants: Arrays = {
        "a": rng.standard_normal((3, 4)).astype(np.float32), "b": rng.standard_normal((3, 4)).astype(np.float32),
    }  # fmt: skip
    nodes = [helper.make_node("Concat", ["b", "a"], ["ab"], axis=1), helper.make_node("MatMul", ["x", "ab"], ["y"])]
    return nodes, constants


X: Arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}


def test_what_follows_from_constants_is_computed_once() -> None:
    nodes, constants = weaving()
    module = module_of(built(nodes, X, ["y"], constants))
    want = X["x"] @ np.concatenate([constants["b"], constants["a"]], 1)
    np.testing.assert_allclose(run(module, X["x"])[0], want, rtol=1e-6)
    assert calls(module) == ["MatMul"]
    assert module.prepared_bytes == 96


def test_a_preparation_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    data = built([helper.make_node("Add", ["a", "a"], ["b"]), helper.make_node("MatMul", ["x", "b"], ["y"])],
                 {"x": X["x"]}, ["y"], {"a": np.eye(X["x"].shape[1], dtype=np.float32)})  # fmt: skip

    def fails(*_a: object, **_k: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(constant_folding, "_prepared", fails)
    with hotfuse.InferenceSession(data, settings=INLINE) as session:
        module = session._module  # pyright: ignore[reportPrivateUsage]
        np.testing.assert_allclose(run(module, X["x"])[0], 2 * X["x"], rtol=1e-6)
        assert session.stats()["unprepared"] == ["g: RuntimeError: no room"]
        explained = session.explain(full=True)
        assert explained.to_dict()["unprepared"] == ["g: RuntimeError: no room"]
        assert "constants not prepared: g: RuntimeError: no room" in str(explained)


def test_other_values_for_initializers_are_not_stale() -> None:
    """A call that brings its own weights, between calls that do not."""
    nodes, constants = weaving()
    with hotfuse.InferenceSession(built(nodes, X, ["y"], constants, overridable=("a",)), settings=INLINE) as session:
        for a in (None, np.ones((3, 4), np.float32), None, np.zeros((3, 4), np.float32)):
            got = session.run(None, X if a is None else {**X, "a": a})[0]
            want = X["x"] @ np.concatenate([constants["b"], constants["a"] if a is None else a], 1)
            np.testing.assert_allclose(got, want, rtol=1e-6)


def branch(name: str, nodes: list[onnx.NodeProto]) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info("y", F32, None)])


def test_inside_branches_what_comes_from_outside_may_be_constant() -> None:
    """Also one that fails: nobody notices before its branch is taken, and then the node is named."""
    nodes, constants = weaving()
    constants["no"] = np.array([7], np.int64)
    bad = [helper.make_node("Reshape", ["a", "no"], ["r"], name="wrong"), helper.make_node("MatMul", ["x", "r"], ["y"])]
    choose = helper.make_node("If", ["c"], ["y"], then_branch=branch("then", nodes), else_branch=branch("else", bad))
    module = module_of(built([choose], {**X, "c": np.array(True)}, ["y"], constants))
    want = X["x"] @ np.concatenate([constants["b"], constants["a"]], 1)
    for _ in range(2):
        np.testing.assert_allclose(run(module, X["x"], np.array(True))[0], want, rtol=1e-6)
    then = module.program.ready().nested[0]
    assert [c[-1].op for c in then.ready().calls] == ["MatMul"]
    assert module.prepared_bytes == 96
    for _ in range(2):
        with pytest.raises(ModelError, match="'wrong'"):
            run(module, X["x"], np.array(False))


def test_random_numbers_stay_random() -> None:
    noise = helper.make_node("RandomNormalLike", ["a"], ["n"])
    module = module_of(built([noise, helper.make_node("Add", ["x", "n"], ["y"])], X, ["y"], {"a": np.zeros((2, 3), np.float32)}))
    assert not torch.equal(run(module, X["x"])[0], run(module, X["x"])[0])


def test_weights_do_not_grow() -> None:
    """Half-precision weights that are widened in every call stay halves."""
    wide = np.random.default_rng(0).standard_normal((3, 1 << 19)).astype(np.float16)
    cast = helper.make_node("Cast", ["w"], ["f"], to=F32)
    module = module_of(built([cast, helper.make_node("MatMul", ["x", "f"], ["y"])], X, ["y"], {"w": wide}))
    np.testing.assert_allclose(run(module, X["x"])[0], X["x"] @ wide.astype(np.float32), rtol=1e-4, atol=1e-3)
    assert calls(module) == ["Cast", "MatMul"]
    assert module.prepared_bytes == 0


@pytest.mark.parametrize("capture", ["off", "inline"])
def test_results_are_the_callers_own(capture: Any) -> None:
    """A result that is a view of what was prepared, overwritten by the caller."""
    nodes, constants = weaving()
    constants["to"] = np.array([24], np.int64)
    nodes = [nodes[0], helper.make_node("Reshape", ["ab", "to"], ["y"]), helper.make_node("MatMul", ["x", "ab"], ["z"])]
    with hotfuse.InferenceSession(built(nodes, X, ["y", "z"], constants), settings=INLINE.with_(capture=capture)) as session:
        for _ in range(4):
            y, z = session.run(None, X)
            np.testing.assert_array_equal(y, np.concatenate([constants["b"], constants["a"]], 1).reshape(-1))
            np.testing.assert_allclose(z, X["x"] @ y.reshape(3, 8), rtol=1e-6)
            y[...] = 0


def test_captured_graphs_have_it_too_and_it_is_counted() -> None:
    nodes, constants = weaving()
    with hotfuse.InferenceSession(built(nodes, X, ["y"], constants), settings=INLINE) as session:
        for _ in range(4):
            got = session.run(None, X)[0]
            np.testing.assert_allclose(got, X["x"] @ np.concatenate([constants["b"], constants["a"]], 1), rtol=1e-6)
        entry = next(e for site in session._engine.sites.values() for e in site.entries)  # pyright: ignore[reportPrivateUsage]
        assert [n.op for n in entry.baseline.graph.nodes] == ["aten.matmul.default"]
        memory = session.stats()["memory"]
    assert memory["weights"] == 48 + 48 + 96  # two halves, and what they make
    assert memory["prepared"] == 96


# --- instance norms as group norms -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1, 8, 1024), (2, 3, 5, 7), (3, 4, 1), (1, 1, 2, 3, 4), (2, 6, 1, 1), (0, 3, 4), (2, 3, 0), (4, 5, 17)]
)
@pytest.mark.parametrize("how", ["plain", "far", "specials", "strided"])
def test_an_instance_norm_of_the_interpreter(shape: tuple[int, ...], how: str) -> None:
    rng = np.random.default_rng(len(shape))
    x = rng.standard_normal(shape).astype(np.float32)
    x = x + np.float32(30) if how == "far" else x
    if how == "specials" and x.size:
        x[0, 0].flat[0], x[-1, -1].flat[-1] = np.nan, np.inf
    weights: Arrays = {k: rng.standard_normal(shape[1]).astype(np.float32) for k in "sb"}
    node = helper.make_node("InstanceNormalization", ["x", "s", "b"], ["y"], epsilon=1e-3)
    module = module_of(built([node], {"x": x}, ["y"], weights))
    given = torch.from_numpy(x)
    given = torch.stack([given, given], -1)[..., 0] if how == "strided" else given
    (got,) = (t for t in module.forward(given) if isinstance(t, torch.Tensor))
    wide = given.double().flatten(2)
    centred = wide - wide.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    s, b = (torch.from_numpy(weights[k]).double()[None, :, None] for k in "sb")
    want = (normal * s + b).reshape(shape)
    assert got.dtype is torch.float32 and got.shape == want.shape
    beside = 2e-4 if how == "far" else 2e-5  # one element over the deviation of none: 30 / sqrt(1e-3) times the rounding of 1
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=beside, equal_nan=True)


def test_an_instance_norm_that_no_group_norm_takes_is_the_librarys() -> None:
    rng = np.random.default_rng(3)
    weights: Arrays = {k: rng.standard_normal(3) for k in "sb"}
    x = rng.standard_normal((2, 3, 4))
    node = helper.make_node("InstanceNormalization", ["x", "s", "b"], ["y"])
    module = module_of(built([node], {"x": x}, ["y"], weights))
    scale, b = (torch.from_numpy(weights[k]) for k in "sb")
    want = torch.instance_norm(torch.from_numpy(x), scale, b, None, None, True, 0.0, 1e-5, False)
    assert torch.equal(run(module, x)[0], want)


# --- an LSTM whose weights are packed once ------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (3, 7), (5, 1)])
def test_a_packed_lstm_is_torchs(batch: int, steps: int, bias: bool) -> None:
    torch.manual_seed(1)
    x, h, c = torch.randn(2 * steps, batch, 7)[::2], torch.randn(batch, 18)[:, ::2], torch.randn(batch, 9)
    params = [torch.randn(36, 7), torch.randn(36, 9), *([torch.randn(36), torch.randn(36)] if bias else [])]
    made = packed_lstm.packed(params)
    assert made is not None and made.takes(x) and made.nbytes >= sum(p.nbytes for p in params)
    got = made(x, h, c)
    rest: tuple[Any, ...] = (bias, 1, 0.0, False, False, False)
    want = torch.lstm(x.double(), [h[None].double(), c[None].double()], [p.double() for p in params], *rest)
    for g, w in zip(got, (want[0], want[1][0], want[2][0]), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=2e-6)
    odd = x.clone()
    odd[0, 0, 0] = torch.nan
    assert torch.equal(made(odd, h, c)[0].isnan(), torch.lstm(odd, [h[None], c[None]], params, *rest)[0].isnan())


def test_which_calls_a_packed_lstm_takes() -> None:
    made = packed_lstm.packed([torch.randn(36, 7), torch.randn(36, 9)])
    assert made is not None and not made.takes(torch.randn(0, 2, 7)) and not made.takes(torch.randn(3, 0, 7))
    assert not made.takes(torch.randn(3, 2, 7, dtype=torch.float64))
    with torch.backends.mkldnn.flags(enabled=False):
        assert not made.takes(torch.randn(3, 2, 7))
    assert packed_lstm.packed([torch.randn(36, 7).double(), torch.randn(36, 9).double()]) is None
    assert packed_lstm.packed([torch.randn(36, 0), torch.randn(36, 9)]) is None


def test_a_session_without_the_library_computes_the_same() -> None:
    rng = np.random.default_rng(5)
    weights: Arrays = {k: rng.standard_normal(s).astype(np.float32) for k, s in (("w", (1, 20, 6)), ("r", (1, 20, 5)))}
    x = rng.standard_normal((4, 2, 6)).astype(np.float32)
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y", "h", "c"], hidden_size=5)
    module = module_of(built([node], {"x": x}, ["y", "h", "c"], weights))
    got = run(module, x)
    with torch.backends.mkldnn.flags(enabled=False):
        for a, b in zip(got, run(module, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, got, run(copy.deepcopy(module), x)))
    assert [tuple(t.shape) for t in run(module, x[:, :0])] == [(4, 1, 0, 5), (1, 0, 5), (1, 0, 5)]


@pytest.mark.parametrize("available", [True, False])
def test_explain_says_whether_weights_are_packed_once(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    monkeypatch.setattr(packed_lstm, "_available", lambda: available)
    rng = np.random.default_rng(6)
    weights: Arrays = {k: rng.standard_normal(s).astype(np.float32) for k, s in (("w", (1, 20, 5)), ("r", (1, 20, 5)))}
    x = rng.standard_normal((4, 2, 5)).astype(np.float32)
    nodes = [helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=5), helper.make_node("Squeeze", ["y", "one"], ["z"]),
             helper.make_node("LSTM", ["z", "w", "r"], ["out"], hidden_size=5)]  # fmt: skip
    session = hotfuse.InferenceSession(built(nodes, {"x": x}, ["out"], {**weights, "one": np.array([1])}), settings=INLINE)
    session.run(None, {"x": x})
    said = [line for line in str(session.explain(full=True)).splitlines() if "oneDNN" in line]
    want = packed_lstm.PACKED if available else packed_lstm.NOT_PACKED
    assert said == [f"the model's own code: {want} (2 of its nodes)"]
    assert session.explain().to_dict()["own_code"] == [f"{want} (2 of its nodes)"]


# --- an LSTM over one step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "steps"), [(0, 1), (1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_an_lstm_over_one_step(batch: int, batch_first: bool, bias: bool, steps: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(batch, 2 * steps, 7)[:, ::2] if batch_first else torch.randn(2 * steps, batch, 7)[::2]
    hx = [torch.randn(1, batch, 9), torch.randn(1, batch, 9)]
    params = [torch.randn(36, 7), torch.randn(36, 9), *([torch.randn(36), torch.randn(36)] if bias else [])]
    rest: tuple[Any, ...] = (bias, 1, 0.0, False, False, batch_first)
    got = one_step.lstm(x, hx, params, *rest)
    if batch:
        want = torch.lstm(x.double(), [h.double() for h in hx], [p.double() for p in params], *rest)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=2e-6)
    assert [tuple(g.shape) for g in got] == [(*x.shape[:2], 9), (1, batch, 9), (1, batch, 9)]
    assert len({g.untyped_storage().data_ptr() for g in got}) == 3 or not batch


@pytest.mark.parametrize("kw", [{"num_layers": 2}, {"bidirectional": True}, {"proj_size": 3}, {"dtype": torch.float64}, {}])
def test_modules_with_one_step_follow_their_weights(kw: dict[str, Any]) -> None:
    """Tier 0 reads live weights, whichever way it computes."""
    torch.manual_seed(0)
    layer = nn.LSTM(7, 9, **kw).eval()
    x = torch.randn(1, 2, 7, dtype=kw.get("dtype"))
    with torch.no_grad(), hotfuse.jit(layer, settings=INLINE) as fast:
        for _ in range(4):
            torch.testing.assert_close(fast(x)[0], layer(x)[0], rtol=1e-5, atol=1e-6)
        for p in layer.parameters():
            p.mul_(1.5)
        torch.testing.assert_close(fast(x)[0], layer(x)[0], rtol=1e-5, atol=1e-6)
        assert fast.stats()["plans"] == 1
