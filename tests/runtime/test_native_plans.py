"""Tier 1 from the outside: kernels serve, at every size the guard admits, and give way when the model changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.backends.llvm.backend import LlvmBackend
from hotfuse.compile import whole_graph
from hotfuse.compile.unit import kernel_text
from hotfuse.compile.variants import trial
from hotfuse.fusion.groups import group, reordered
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.lower.common.codec import from_json, to_json
from hotfuse.lower.common.errors import CannotLower
from hotfuse.tile import text as tile_text
from tests.races import every_kernel_wins, kernels_lose, kernels_win

INLINE = Settings(capture="inline", hot_calls=1)


@pytest.fixture(autouse=True)
def kernels_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    every_kernel_wins(monkeypatch)
    with torch.no_grad():
        yield


def backends(fast: Any) -> list[str]:
    plans = [p for s in fast.explain().to_dict()["sites"] for p in s["plans"] if p["tier"] == 1]
    return [part["backend"] for p in plans for part in p["partitions"]]


def native_calls(fast: Any) -> int:
    return fast.stats()["calls_per_tier"]["1"]


class Block(nn.Module):
    """One encoder layer: everything tier 1 knows, and an op it does not."""

    def __init__(self, width: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        h = self.norm1(x)
        q, k, v = (p(h).view(b, s, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, w)
        x = x + self.o(a)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x.index_select(1, order)


def test_an_encoder_layer_at_many_sizes() -> None:
    model = Block().eval()
    fast = hotfuse.jit(model, settings=INLINE)
    seen = 0
    for b, s in ((2, 9), (3, 16), (2, 9), (4, 5), (2, 33), (5, 2), (3, 70), (2, 16), (7, 3)):
        for _ in range(2):
            x, order = torch.randn(b, s, 48), torch.randperm(s)
            got, want = fast(x, order), model(x, order)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            seen = native_calls(fast)
    assert seen >= 10, str(fast.explain(full=True))
    assert backends(fast).count("llvm") >= 5 and "library" in backends(fast), str(fast.explain(full=True))


def test_changed_weights_are_packed_again() -> None:
    model = Block().eval()
    fast = hotfuse.jit(model, settings=INLINE)
    x, order = torch.randn(2, 8, 48), torch.arange(8)
    for _ in range(3):
        fast(x, order)
    assert native_calls(fast) >= 1, str(fast.explain(full=True))
    model.up.weight.mul_(1.5)
    for _ in range(4):
        torch.testing.assert_close(fast(x, order), model(x, order), rtol=1e-4, atol=1e-4)
    assert fast.stats()["deopts"] == 1 and fast.stats()["events"]["deploy.faster"] == 2


def test_inputs_that_lie_differently_inside_a_plan() -> None:
    def mix(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        picked = x.index_select(0, i).transpose(0, 1)  # a library result that is not contiguous
        return torch.exp(picked) * 2 + picked

    fast = hotfuse.jit(mix, settings=INLINE)
    for n in (5, 5, 8, 8, 13, 13):
        x, i = torch.randn(n, 6), torch.randperm(n)
        torch.testing.assert_close(fast(x, i), mix(x, i), rtol=1e-5, atol=1e-5)
    assert native_calls(fast) >= 2, str(fast.explain(full=True))


def test_lazily_negated_views_inside_a_plan() -> None:
    def shifted(z: torch.Tensor) -> torch.Tensor:
        x = z.conj().imag
        return torch.exp(x) + x

    fast = hotfuse.jit(shifted, settings=INLINE)
    for _ in range(4):
        z = torch.randn(6, 4, dtype=torch.complex64)
        torch.testing.assert_close(fast(z), shifted(z), rtol=1e-5, atol=1e-5)
    assert native_calls(fast) >= 1, str(fast.explain(full=True))


def test_lazily_negated_inputs_are_answered_by_the_model_and_counted() -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) + x

    fast = hotfuse.jit(shifted, settings=INLINE)
    for n in range(8):
        x = torch.randn(6, 4, dtype=torch.complex64).imag
        x = x if n % 2 else torch.complex(torch.zeros(6, 4), x).conj().imag
        assert x.is_neg() is (n % 2 == 0)
        torch.testing.assert_close(fast(x), shifted(x), rtol=1e-5, atol=1e-5)
    stats = fast.stats()
    assert stats["events"]["lazy_inputs"] == 4 and native_calls(fast) >= 1, str(fast.explain(full=True))


class Rows(nn.Module):
    """Looks rows up, and works on them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.layer = nn.Linear(16, 16)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.table(i)))


@pytest.mark.parametrize("tiers", [0, 1])
def test_a_call_that_asks_for_what_does_not_exist_costs_no_plan(tiers: int) -> None:
    model = Rows().eval()
    fast = hotfuse.jit(model, settings=INLINE.with_(tiers=tiers))
    for _ in range(4):
        fast(torch.tensor([1, 2, 9]))
    before = fast.stats()["calls_per_tier"]
    assert before[str(tiers)] >= 1, str(fast.explain(full=True))
    with pytest.raises(IndexError) as ours:
        fast(torch.tensor([1, 10, 9]))
    with pytest.raises(IndexError) as own:
        model(torch.tensor([1, 10, 9]))
    assert str(ours.value) == str(own.value)
    i = torch.tensor([3, 0, 9])
    torch.testing.assert_close(fast(i), model(i), rtol=1e-5, atol=1e-5)
    stats = fast.stats()
    assert stats["calls_per_tier"][str(tiers)] == before[str(tiers)] + 1, str(fast.explain(full=True))
    assert stats["deopts"] == 0 and stats["events"]["call_faults"] == 1 and "drop.run_failed" not in stats["events"]


def test_a_kernel_that_is_the_whole_graph_takes_its_inputs_in_order_of_use() -> None:
    def apart(a: torch.Tensor, unused: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.exp(b) * 2 - a

    fast = hotfuse.jit(apart, settings=INLINE)
    for _ in range(4):
        a, b = torch.randn(5, 6), torch.randn(5, 6)
        torch.testing.assert_close(fast(a, a, b), apart(a, a, b), rtol=1e-5, atol=1e-5)
    assert native_calls(fast) >= 1 and backends(fast) == ["llvm"], str(fast.explain(full=True))


def test_special_values_and_tails() -> None:
    def chain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.softmax(x, -1), torch.tanh(x) + torch.sigmoid(x), x.amax(-1, keepdim=True)

    fast = hotfuse.jit(chain, settings=INLINE)
    for n in (3, 3, 17, 17, 31, 64, 65, 100):
        x = torch.randn(4, n)
        x[0, 0], x[1, -1], x[2, n // 2] = float("nan"), float("inf"), float("-inf")
        for got, want in zip(fast(x), chain(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert native_calls(fast) >= 3, str(fast.explain(full=True))


def test_gradients_enabled_reach_tier_1() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    fast = hotfuse.jit(model, settings=INLINE)
    with torch.enable_grad():
        for _ in range(8):
            result = fast(torch.randn(3, 8))
    assert native_calls(fast) > 0 and result.grad_fn is not None, str(fast.explain(full=True))


def test_sessions_reach_tier_1() -> None:
    w = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", c]) for n, c in (("x", 16), ("y", 32))]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [onnx.numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = hotfuse.InferenceSession(model.SerializeToString(), settings=INLINE)
    for n in (3, 3, 5, 5, 9, 9):
        x = np.random.default_rng(n).standard_normal((n, 16)).astype(np.float32)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], np.maximum(x @ w, 0), rtol=1e-4, atol=1e-4)
    assert native_calls(session) >= 2, str(session.explain(full=True))


# --- the pieces ----------------------------------------------------------------------------------

LAYER = """graph main(%x: f32[s0, 96], %r: f32[s0, 96]) where (2 <= s0) {
  param %w: f32[96, 96] = "w"
  param %b: f32[96] = "b"
  param %v: f32[96, 96] = "v"
  %h: f32[s0, 96] = aten.linear.default(%x, %w, %b)
  %g: f32[s0, 96] = aten.gelu.default(%h)
  %k: f32[s0, 96] = aten.linear.default(%x, %v, None)
  %sorted: f32[s0, 96], %places: i64[s0, 96] = aten.sort.default(%g)
  %late: f32[s0, 96] = aten.add.Tensor(%k, %sorted)
  %y: f32[s0, 96] = aten.add.Tensor(%g, %r)
  return %y, %late
}
"""


def test_groups_never_depend_on_themselves() -> None:
    graph = parse(LAYER)
    groups = group(graph)
    verify(reordered(graph, groups))
    kinds = {graph.nodes[i].op: g.kind for g in groups for i in g.nodes}
    assert kinds["aten.linear.default"] == "contract" and kinds["aten.sort.default"] == "library"
    first = next(g for g in groups if g.kind == "contract")
    ops = [graph.nodes[i].op for i in first.nodes]
    assert ops.count("aten.linear.default") == 2, "linears of one input share a kernel"
    late = next(i for i, n in enumerate(graph.nodes) if n.outs[0].name == "late")
    assert late not in first.nodes, "what waits for the sort cannot be in the kernel that feeds it"


def test_groups_of_random_graphs_can_always_be_ordered() -> None:
    rng = np.random.default_rng(0)
    ops = ["aten.tanh.default({0})", "aten.add.Tensor({0}, {1})", "aten.linear.default({0}, %w, None)",
           "aten.sort.default({0})", "aten.mul.Tensor({0}, {1})", "aten.softmax.int({0}, -1)"]
    for n in range(60):
        f, i64 = ("f32[8, 8]", "i64[8, 8]") if n % 2 else ("f32[96, 96]", "i64[96, 96]")  # sorts with a kernel and without
        names, lines = ["%x"], []
        for i in range(40):
            a, b = (names[int(rng.integers(max(0, len(names) - 9), len(names)))] for _ in range(2))
            op = ops[int(rng.integers(len(ops)))].format(a, b)
            extra = f", %p{i}: {i64}" if "sort" in op else ""
            lines.append(f"  %n{i}: {f}{extra} = {op}")
            names.append(f"%n{i}")
        text = f'graph main(%x: {f}) {{\n  param %w: {f} = "w"\n' + "\n".join(lines)
        graph = parse(text + f"\n  return {', '.join(names[-6:])}\n}}\n")
        groups = group(graph)
        assert sorted(i for g in groups for i in g.nodes) == list(range(40))
        verify(reordered(graph, groups))


def test_kernels_cross_the_pipe_as_text() -> None:
    header, codes = whole_graph.make(parse(LAYER), {"s0": 7})
    assert len(codes) == len(header["kernels"]) >= 1
    for k in header["kernels"]:
        assert to_json(from_json(k))["kernel"] == k["kernel"]
        assert to_json(from_json(k))["arguments"] == k["arguments"]


def test_a_worker_does_not_read_again_what_it_has_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    header, _ = whole_graph.make(parse(LAYER), {"s0": 7})
    read: list[str] = []
    monkeypatch.setattr(kernel_text, "parse", lambda text: (read.append(text), tile_text.parse(text))[1])
    assert header["kernels"]
    for k in header["kernels"]:
        kernel_text._shown.clear()
        fresh = kernel_text.from_json(k)
        assert len(read) == 1 and kernel_text.to_json(fresh)["kernel"] == k["kernel"]
        shown = kernel_text.from_json(k)
        assert shown == fresh == from_json(k) and shown.kernel is fresh.kernel and len(read) == 1
        read.clear()


def test_layers_that_are_alike_are_compiled_once() -> None:
    lines = ["graph main(%x0: f32[s0, 64]) where (2 <= s0) {"]
    lines += [f'  param %w{i}: f32[64, 64] = "w{i}"' for i in range(5)]
    for i in range(5):
        lines += [f"  %h{i}: f32[s0, 64] = aten.linear.default(%x{i}, %w{i}, None)",
                  f"  %x{i + 1}: f32[s0, 64] = aten.tanh.default(%h{i})"]
    header, codes = whole_graph.make(parse("\n".join([*lines, "  return %x5", "}", ""])), {"s0": 4})
    assert len(codes) == 1 and [k for _, _, k in header["parts"]] == [0] * 5


def test_a_slower_kernel_never_leaves_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_lose(monkeypatch)
    header, codes = whole_graph.make(parse(LAYER), {"s0": 7})
    assert not codes and all(k < 0 for _, _, k in header["parts"])
    assert any("the library takes" in n for n in header["notes"])


def test_a_wrong_kernel_never_leaves_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LlvmBackend.glue

    def wrong(*args: Any) -> Any:
        made = right(*args)
        return lambda *a: tuple(o + 1 for o in made(*a))

    monkeypatch.setattr(LlvmBackend, "glue", wrong)
    header, codes = whole_graph.make(parse(LAYER), {"s0": 7})
    assert not codes and any("differs from the library" in n for n in header["notes"])


def test_sizes_that_depend_on_data_are_not_tried() -> None:
    text = LAYER.replace("s0", "u0").replace(" where (2 <= u0)", "")
    value = parse(text).inputs[0]
    with pytest.raises(CannotLower, match="depends on data"):
        trial.made_up(value, {}, torch.Generator())

def test_a_group_is_cut_before_the_node_that_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_win(monkeypatch)
    ops = ["tanh", "exp", "sigmoid", "lgamma", "neg", "abs", "relu"]
    lines = ["graph main(%x0: f32[s0, 64]) where (2 <= s0) {"]
    lines += [f"  %x{i + 1}: f32[s0, 64] = aten.{op}.default(%x{i})" for i, op in enumerate(ops)]
    header, codes = whole_graph.make(parse("\n".join([*lines, "  return %x7", "}", ""])), {"s0": 4})
    assert [(first, last) for first, last, _ in header["parts"]] == [(0, 3), (3, 4), (4, 7)], header["notes"]
    before, blamed, behind = (kernel for _, _, kernel in header["parts"])  # numbered as they were compiled
    assert blamed == -1 and {before, behind} == {0, 1} and len(codes) == 2, header["notes"]
    assert any("cut before lgamma" in n for n in header["notes"])


def test_kernels_behind_strides_serve_every_size() -> None:
    net = nn.Sequential(nn.AvgPool1d(2, 2), nn.Conv1d(4, 8, 3, stride=2), nn.Hardswish(), nn.BatchNorm1d(8), nn.Tanh())
    model = net.eval()
    fast = hotfuse.jit(model, settings=INLINE)
    for n in (40, 41, 40, 60, 60, 77, 90, 13, 100):
        x = torch.randn(2, 4, n)
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert native_calls(fast) >= 6, str(fast.explain(full=True))


def test_parts_without_elements_stay_with_the_library() -> None:
    w, v = torch.randn(16, 32), torch.randn(32, 16)

    def net(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        up = (x @ w).relu()
        return up @ v, up.sum(0) + 1, torch.cat([up, torch.ones(3, 32).exp()]).mean(0)

    with hotfuse.jit(net, settings=Settings(capture="inline", hot_calls=2)) as fast, torch.no_grad():
        for _ in range(6):
            for got, want in zip(fast(torch.randn(0, 16)), net(torch.randn(0, 16)), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert "KeyError" not in str(fast.explain(full=True))
        x = torch.randn(5, 16)
        torch.testing.assert_close(fast(x)[0], net(x)[0], rtol=1e-4, atol=1e-5)


SHARING: dict[str, Any] = {
    "a row and all": lambda y, x: (y, y[:, 0]),
    "all, then a row": lambda y, x: (y[:, 0], y),
    "parts of what is no result": lambda y, x: (y[:, 0], y[:, 1:]),
    "turned": lambda y, x: (y.transpose(1, 2), y[:, 0].unsqueeze(-1)),
    "an input": lambda y, x: (x.transpose(1, 2)[:, 1], x, y),
    "nothing": lambda y, x: (y, y[:, 0] + 1),
}


@pytest.mark.parametrize("name", SHARING)
def test_results_share_memory_where_the_models_own_do(name: str) -> None:
    body, of = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16)).eval(), SHARING[name]

    def net(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return of(body(x), x)

    with hotfuse.jit(net, settings=Settings(capture="inline", hot_calls=2)) as fast, torch.no_grad():
        x = torch.randn(3, 5, 16)
        for _ in range(6):
            got, want = fast(x), net(x)
        assert fast.stats()["calls_per_tier"]["1"] > 0, str(fast.explain(full=True))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)

        def shared(results: tuple[torch.Tensor, ...]) -> list[bool]:
            return [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in (*results, x) for b in results]

        assert shared(got) == shared(want)
