"""LSTM and GRU sequences through the tile interpreter and as native code, against torch in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.fusion.groups import group
from hotfuse.ir.graph import Graph, Value
from hotfuse.ir.text import parse
from hotfuse.ir.types import Layout, TensorType
from hotfuse.ir.verify import verify
from hotfuse.lower import lower
from hotfuse.lower.common import pack
from hotfuse.lower.common.codec import from_json, to_json
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import (
    BufferArgument,
    BufferRole,
    Lowered,
    PackArgument,
    StrideArgument,
    SymbolArgument,
)
from hotfuse.lower.common.pack import PackSource, PackSpec, WeightOrder
from hotfuse.lower.cpu import thread_work
from hotfuse.lower.cpu.recurrent import recurrent_kernel
from hotfuse.lower.cpu.tiling import Core
from hotfuse.native.target import CpuTarget, host_levels
from hotfuse.tile import interpreter
from hotfuse.tile.program import BufferKind, Kernel
from hotfuse.tile.text import show
from tests.races import kernels_win, slow_library

Tensor = torch.Tensor
CORES = {
    "avx512": Core(16, 32),
    "avx2": Core(8, 16),
    "generic": Core(4, 16),
    "tiny caches": Core(8, 16, 1 << 10, 4 << 10),
}
INLINE = Settings(capture="inline", hot_calls=1)


@dataclass(frozen=True)
class Layer:
    """A recurrent node and the sizes it is tried with."""

    cell: str
    inputs: int
    hidden: int
    steps: int
    batch: int
    layers: int = 1
    both: bool = False
    batch_first: bool = False
    biased: bool = True
    symbolic: bool = False
    zeros: bool = False

    @property
    def module(self) -> nn.LSTM | nn.GRU:
        torch.manual_seed(3)
        make = nn.LSTM if self.cell == "lstm" else nn.GRU
        return make(
            self.inputs, self.hidden, self.layers, self.biased, self.batch_first, bidirectional=self.both
        ).eval()

    @property
    def states(self) -> int:
        return self.layers * (2 if self.both else 1)

    def data(self) -> list[Tensor]:
        """The sequence, and the initial states where they are given."""
        first = (self.batch, self.steps) if self.batch_first else (self.steps, self.batch)
        made = [torch.randn(*first, self.inputs)]
        if not self.zeros:
            made += [torch.randn(self.states, self.batch, self.hidden) for _ in range(2 if self.cell == "lstm" else 1)]
        return made

    def graph(self, weights: Mapping[str, Tensor]) -> Graph:
        t, b = ("t", "b") if self.symbolic else (self.steps, self.batch)

        def sequence(n: int) -> str:
            return f"f32[{b}, {t}, {n}]" if self.batch_first else f"f32[{t}, {b}, {n}]"

        state = f"f32[{self.states}, {b}, {self.hidden}]"
        names = ["h", "c"][: 2 if self.cell == "lstm" else 1]
        given = "".join(f", %{n}: {state}" for n in names) if not self.zeros else ""
        first = ", ".join(f"%{n}" for n in names)
        made = (
            "\n".join(f"%{n}: {state} = aten.zeros.default([{self.states}, 1, 1])" for n in names) if self.zeros else ""
        )
        return verify(
            parse(f"""graph g(%x: {sequence(self.inputs)}{given}) {{
          {" ".join(f'param %{n}: f32{list(w.shape)} = "{n}"' for n, w in weights.items())}
          {made}
          %y: {sequence(self.hidden * (2 if self.both else 1))}, {", ".join(f"%{n}n: {state}" for n in names)} =
            aten.{self.cell}.input(%x, {f"[{first}]" if self.cell == "lstm" else first},
              [{", ".join(f"%{n}" for n in weights)}], {self.biased}, {self.layers}, 0.0, False, {self.both}, {self.batch_first})
          return %y, {", ".join(f"%{n}n" for n in names)}
        }}""")
        )

    def exact(self, module: nn.Module, data: list[Tensor]) -> list[Tensor]:
        """torch's own outputs in float64."""
        x, *states = (t.double() for t in data)
        hx: Any = None if self.zeros else tuple(states) if self.cell == "lstm" else states[0]
        y, final = module.double()(x, hx)
        return [y, *final] if self.cell == "lstm" else [y, final]


def outputs(
    lowered: Lowered, layer: Layer, data: list[Tensor], weights: dict[str, Tensor], native: CpuTarget | None
) -> list[Tensor]:
    """Run a kernel; outputs begin as NaN."""
    first = (layer.batch, layer.steps) if layer.batch_first else (layer.steps, layer.batch)
    shapes = {"y": (*first, layer.hidden * (2 if layer.both else 1))}
    shapes |= {n: (layer.states, layer.batch, layer.hidden) for n in ["hn", "cn"][: 2 if layer.cell == "lstm" else 1]}
    outs = {n: torch.full(s, torch.nan) for n, s in shapes.items()}
    values = dict(zip("xhc", data, strict=False))
    buffers: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    for a in lowered.arguments:
        match a:
            case BufferArgument(buffer, role, value):
                buffers[buffer] = outs[value] if role is BufferRole.OUTPUT else values[value]
            case PackArgument(buffer, spec):
                packed = pack.pack(spec, {s.name: weights[s.name].detach().numpy() for s in spec.sources})
                buffers[buffer] = torch.from_numpy(packed)
            case SymbolArgument(size, symbol):
                sizes[size] = {"t": layer.steps, "b": layer.batch}[symbol]
            case StrideArgument(size, value, dim):
                sizes[size] = values[value].stride(dim)
            case _:
                raise AssertionError(f"recurrent layers have no {a}")
    if native is None:
        interpreter.run(lowered.kernel, {n: t.numpy() for n, t in buffers.items()}, sizes)
    else:
        load_kernel(compile_kernel(lowered.kernel, native))(list(buffers.values()), list(sizes.values()))
    return list(outs.values())


def check(layer: Layer, core: Core, native: CpuTarget | None = None) -> Lowered:
    """Lower and run; all outputs are near torch's."""
    module = layer.module
    weights = dict(module.named_parameters())
    lowered = lower(layer.graph(weights), core)
    with torch.no_grad():
        data = layer.data()
        got = outputs(lowered, layer, data, {n: w.clone() for n, w in weights.items()}, native)
        for result, exact in zip(got, layer.exact(module, data), strict=True):
            torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=2e-6)
    return lowered


SMALL = [
    Layer("lstm", 5, 7, 3, 2),
    Layer("gru", 5, 7, 3, 2),
    Layer("lstm", 1, 1, 1, 1),
    Layer("gru", 1, 1, 1, 1),
    Layer("lstm", 8, 16, 1, 1, zeros=True),
    Layer("gru", 16, 33, 5, 1, biased=False),
    Layer("lstm", 3, 20, 4, 13, batch_first=True),
    Layer("gru", 3, 20, 4, 13, batch_first=True, zeros=True),
    Layer("lstm", 6, 9, 4, 3, layers=3),
    Layer("gru", 6, 9, 4, 3, both=True),
    Layer("lstm", 6, 9, 5, 2, layers=3, both=True, batch_first=True),
    Layer("gru", 4, 5, 3, 5, layers=2, both=True, biased=False),
]
LONG = [
    Layer("lstm", 4, 6, 61, 2),
    Layer("lstm", 3, 5, 3, 60),
    Layer("gru", 4, 6, 53, 1, both=True),
    Layer("lstm", 4, 6, 50, 3, layers=2),
]


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
@pytest.mark.parametrize("layer", SMALL, ids=str)
def test_what_kernels_mean(core: Core, layer: Layer) -> None:
    lowered = check(layer, core)
    assert from_json(to_json(lowered)) == lowered


@pytest.mark.parametrize("layer", LONG, ids=str)
def test_sequences_of_several_chunks(layer: Layer) -> None:
    check(layer, CORES["tiny caches"])
    check(replace(layer, symbolic=True), CORES["avx512"])


@pytest.mark.parametrize("target", host_levels(), ids=lambda t: t.name)
@pytest.mark.parametrize("layer", [*SMALL, *LONG, Layer("lstm", 64, 96, 20, 9), Layer("gru", 40, 64, 100, 17)], ids=str)
def test_native_code(target: CpuTarget, layer: Layer) -> None:
    core = Core(target.lanes, 32 if target.name == "avx512" else 16)
    check(layer, core, target)


def layer_kernel(layer: Layer, core: Core) -> Kernel:
    """What a layer becomes on a core of a test's own, whatever this machine has."""
    return lower(layer.graph(dict(layer.module.named_parameters())), core).kernel


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(
    "layer",
    [
        Layer("lstm", 20, 40, 5, 1),
        Layer("gru", 20, 40, 50, 6, layers=2, both=True),
        Layer("lstm", 20, 40, 5, 13, batch_first=True),
        Layer("lstm", 20, 33, 7, 55, symbolic=True),
        Layer("gru", 8, 33, 7, 61),
    ],
    ids=str,
)
@pytest.mark.parametrize("l2", [1 << 10, 1 << 20], ids=["threads share panels", "threads share rows"])
def test_threads(layer: Layer, l2: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_work, "WORK_PER_THREAD", 1)
    monkeypatch.setattr(thread_work, "MEETING_WORK", 1)
    monkeypatch.setattr(recurrent_kernel, "STEP_WORK", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        target = host_levels()[0]
        check(layer, Core(target.lanes, 32 if target.name == "avx512" else 16, l2=l2), target)
        wide = layer_kernel(layer, replace(CORES["avx512"], l2=l2))
    finally:
        torch.set_num_threads(before)
    shared = {b.name for b in wide.buffers if b.kind is BufferKind.SHARED}
    assert bool(shared) == (l2 == 1 << 10 or (layer.batch in (1, 6) and not layer.symbolic))


@pytest.mark.parametrize(
    "layer", [Layer("lstm", 20, 70, 5, 1), Layer("gru", 20, 70, 6, 1, both=True, layers=2)], ids=str
)
@pytest.mark.parametrize("short", [True, False], ids=["one thread", "shared"])
def test_steps_to_and_fro(layer: Layer, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What threads do not share goes through the panels forwards and backwards in turns; what they share does not."""
    monkeypatch.setattr(recurrent_kernel, "STEP_WORK", 1 << 20 if short else 0)
    target = host_levels()[0]
    lowered = check(layer, Core(target.lanes, 32 if target.name == "avx512" else 16), target)
    assert ("for turned" in show(lowered.kernel)) is short


@pytest.mark.parametrize(
    ("layer", "copied"),
    [
        (Layer("lstm", 20, 40, 50, 5), False),
        (Layer("gru", 20, 40, 50, 5, both=True, layers=2), False),
        (Layer("lstm", 20, 40, 50, 1, batch_first=True), False),
        (Layer("lstm", 20, 40, 50, 2, batch_first=True), True),
        (Layer("gru", 20, 40, 50, 13), True),
        (Layer("gru", 20, 40, 50, 5, symbolic=True), True),
    ],
    ids=["in order", "both directions", "one row", "rows first", "blocks of rows", "any number of rows"],
)
def test_inputs_are_read_where_they_are(layer: Layer, copied: bool) -> None:
    """Where rows of all steps lie behind each other and there is one block of rows; results are right either way."""
    target = host_levels()[0]
    check(layer, Core(target.lanes, 32 if target.name == "avx512" else 16), target)
    assert any(b.name.startswith("xs") for b in layer_kernel(layer, CORES["avx512"]).buffers) is copied


@pytest.mark.parametrize(
    ("layer", "shared"),
    [
        (Layer("lstm", 64, 64, 100, 1), 0),
        (Layer("gru", 64, 64, 100, 1), 0),
        (Layer("lstm", 256, 64, 100, 1), 1),
        (Layer("lstm", 256, 256, 100, 1), 2),
        (Layer("lstm", 128, 128, 100, 8), 1),
    ],
    ids=["short steps", "short steps, gru", "wide inputs", "long steps", "blocks of rows"],
)
def test_what_threads_share(layer: Layer, shared: int) -> None:
    """Inputs' products, and those of steps: neither where a step is short; blocks of rows are shared from end to end."""
    lowered = lower(layer.graph(dict(layer.module.named_parameters())), CORES["avx512"])
    assert show(lowered.kernel).count(" parallel") == shared


@pytest.mark.parametrize(
    "layer", [Layer("lstm", 5, 18, 2, 2, both=True, symbolic=True), Layer("gru", 5, 18, 2, 2, symbolic=True)], ids=str
)
def test_one_kernel_serves_every_length_and_batch(layer: Layer) -> None:
    core = CORES["avx512"]
    lowered = lower(layer.graph(dict(layer.module.named_parameters())), core)
    for steps, batch in itertools.product((1, 2, 7, 49), (1, 2, 5, 6, 7, 13)):
        sized = replace(layer, steps=steps, batch=batch)
        assert lower(sized.graph(dict(sized.module.named_parameters())), core) == lowered
    for steps, batch in ((1, 1), (2, 5), (49, 7), (3, 13), (0, 3), (4, 0)):
        sized = replace(layer, steps=steps, batch=batch)
        weights = {n: w.detach().clone() for n, w in sized.module.named_parameters()}
        with torch.no_grad():
            data = sized.data()
            got = outputs(lowered, sized, data, weights, None)
            if steps and batch:
                for result, exact in zip(got, sized.exact(sized.module, data), strict=True):
                    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=2e-6)
            elif batch:  # torch refuses empty sequences; the states pass through
                assert all(torch.equal(a, b) for a, b in zip(got[1:], data[1:], strict=True))


@pytest.mark.parametrize("native", [None, *host_levels()], ids=lambda t: t.name if t else "interpreted")
def test_a_sequence_that_lies_differently(native: CpuTarget | None) -> None:
    layer = Layer("gru", 7, 18, 5, 3)
    weights = {n: w.detach().clone() for n, w in layer.module.named_parameters()}
    graph = layer.graph(weights)
    x = graph.inputs[0]
    assert isinstance(x.type, TensorType)
    strided = Value(x.name, replace(x.type, layout=Layout(strided=True)))
    node = graph.nodes[0]
    graph = replace(graph, inputs=(strided, *graph.inputs[1:]), nodes=(replace(node, args=(strided, *node.args[1:])),))
    target = native or host_levels()[0]
    lowered = lower(graph, Core(target.lanes, 32 if target.name == "avx512" else 16))
    data = [torch.randn(3, 7, 5).permute(2, 0, 1), layer.data()[1]]
    with torch.no_grad():
        got = outputs(lowered, layer, data, weights, native)
        for result, exact in zip(got, layer.exact(layer.module, data), strict=True):
            torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=2e-6)


def test_extreme_gates_saturate() -> None:
    layer = Layer("lstm", 8, 8, 3, 2)
    weights = {n: w.detach().clone() for n, w in layer.module.named_parameters()}
    lowered = lower(layer.graph(weights), CORES["avx2"])
    x, h, c = layer.data()
    x[0], x[1] = 1e30, -1e30
    got = outputs(lowered, layer, [x, h, c], weights, None)
    with torch.no_grad():
        want = layer.exact(layer.module, [x, h, c])
    for result, exact in zip(got, want, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=2e-6)


def test_outputs_that_nobody_reads_are_not_written() -> None:
    layer = Layer("lstm", 4, 6, 3, 2)
    whole = layer.graph(dict(layer.module.named_parameters()))
    lowered = lower(replace(whole, outputs=whole.outputs[1:2]), CORES["avx2"])
    assert [a.value for a in lowered.arguments if isinstance(a, BufferArgument) and a.role is BufferRole.OUTPUT] == ["hn"]


def test_rows_of_a_stack_are_packed() -> None:
    weight = np.arange(2 * 6 * 3, dtype=np.float32).reshape(2, 6, 3)
    spec = PackSpec((PackSource("w", WeightOrder.ROWS, 3, 2), PackSource("w", WeightOrder.ROWS, 3, 8)), 3, 8, together=True)
    panel = pack.pack(spec, {"w": weight})[: 3 * 8].reshape(3, 8)
    flat = weight.reshape(12, 3)
    assert np.array_equal(panel[:, :3], flat[2:5].T) and np.array_equal(panel[:, 4:7], flat[8:11].T)
    assert not panel[:, 3].any() and not panel[:, 7].any()


# --- refusals


ONE = """graph g(%x: f32[4, 2, 3], %h: f32[1, 2, 5]{more}) {{
  param %wi: f32[15, 3] = "wi" param %wh: f32[15, 5] = "wh" param %bi: f32[15] = "bi" param %bh: f32[15] = "bh"
  {before}
  %y: f32[4, 2, 5], %hn: f32[1, 2, 5] = aten.gru.input(%x, %h, [{weights}], True, 1, {dropout}, {train}, False, False)
  return %y, %hn }}"""
PLAIN = {"more": "", "before": "", "weights": "%wi, %wh, %bi, %bh", "dropout": "0.0", "train": "False"}


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("is not constant", {"more": ", %w: f32[15, 3]", "weights": "%w, %wh, %bi, %bh"}),
        ("dropout", {"dropout": "0.5", "train": "True"}),
        ("2 weights", {"weights": "%wi, %wh"}),
        ("computed by aten.neg", {"before": "%n: f32[15, 3] = aten.neg.default(%wi)", "weights": "%n, %wh, %bi, %bh"}),
        (
            "not rows of a param",
            {"before": "%n: f32[15] = aten.flip.default(%bi, [0])", "weights": "%wi, %wh, %n, %bh"},
        ),
    ],
)
def test_what_cannot_be_lowered_says_why(why: str, changes: dict[str, str]) -> None:
    assert lower(parse(ONE.format(**PLAIN)), CORES["avx2"])
    with pytest.raises(CannotLower, match=why):
        lower(parse(ONE.format(**PLAIN | changes)), CORES["avx2"])


def test_a_group_takes_in_what_prepares_it() -> None:
    before = """%p: f32[5, 3], %q: f32[5, 3], %r: f32[5, 3] = aten.chunk.default(%wi, 3)
      %w: f32[15, 3] = aten.cat.default([%q, %p, %r])"""
    graph = parse(ONE.format(**PLAIN | {"before": before, "weights": "%w, %wh, %bi, %bh"}))
    (found,) = group(graph)
    assert found.kind == "recurrent" and len(found.nodes) == 3
    lowered = lower(graph, CORES["avx2"])
    spec = next(a.spec for a in lowered.arguments if isinstance(a, PackArgument) and a.spec.k == 3)
    assert [(s.name, s.first) for s in spec.sources] == [("wi", 5), ("wi", 0), ("wi", 10)]
    kept = replace(graph, outputs=(*graph.outputs, graph.nodes[1].outs[0]))  # read outside as well: it stays outside
    assert sorted(len(g.nodes) for g in group(kept)) == [1, 2]


# --- from the outside


@pytest.fixture
def kernels_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    with torch.no_grad():
        yield


def native_nodes(fast: Any) -> dict[str, int]:
    """How often each operator is in a generated kernel."""
    plans = [p for s in fast.explain().to_dict()["sites"] for p in s["plans"] if p["tier"] == 1]
    parts = [part["ops"] for p in plans for part in p["partitions"] if part["backend"] == "llvm"]
    return {op: sum(ops.get(op, 0) for ops in parts) for op in {op for ops in parts for op in ops}}


@pytest.mark.usefixtures("kernels_always_win")
@pytest.mark.parametrize(
    "module",
    [nn.LSTM(6, 20, batch_first=True), nn.GRU(6, 20, num_layers=2, bidirectional=True, batch_first=True)],
    ids=["lstm", "gru"],
)
def test_modules_reach_tier_1(module: nn.LSTM | nn.GRU) -> None:
    fast = hotfuse.jit(module.eval(), settings=INLINE)
    for batch in (3, 3, 3, 8, 8, 5, 13):
        x = torch.randn(batch, 7, 6)
        got, want = fast(x), module(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    name = "aten.lstm" if isinstance(module, nn.LSTM) else "aten.gru"
    assert native_nodes(fast).get(name, 0) >= 2, str(fast.explain(full=True))
    assert fast.stats()["calls_per_tier"]["1"] >= 2, str(fast.explain(full=True))


@pytest.mark.usefixtures("kernels_always_win")
@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_onnx_layers_reach_tier_1(op: str) -> None:
    rng = np.random.default_rng(0)
    gates, states = (4, ["h", "c"]) if op == "LSTM" else (3, ["h"])
    weights = {"w": (1, gates * 10, 6), "r": (1, gates * 10, 10), "b": (1, gates * 20)}
    arrays = {n: rng.standard_normal(s).astype(np.float32) / 3 for n, s in weights.items()}
    attrs: dict[str, Any] = {"hidden_size": 10} | ({} if op == "LSTM" else {"linear_before_reset": 1})
    node = helper.make_node(op, ["x", "w", "r", "b", "", *states], ["y", *(f"{s}n" for s in states)], **attrs)
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["t", 2, 6])]
    ports += [helper.make_tensor_value_info(s, TensorProto.FLOAT, [1, 2, 10]) for s in states]
    outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in node.output]
    constants = [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    model = helper.make_model(
        helper.make_graph([node], "g", ports, outs, constants),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    session = hotfuse.InferenceSession(model.SerializeToString(), settings=INLINE)
    plain = hotfuse.InferenceSession(model.SerializeToString(), settings=replace(INLINE, hot_calls=1000))
    for steps in (4, 4, 4, 9, 9, 9):
        feeds = {"x": rng.standard_normal((steps, 2, 6)).astype(np.float32)}
        feeds |= {s: rng.standard_normal((1, 2, 10)).astype(np.float32) for s in states}
        for got, want in zip(session.run(None, feeds), plain.run(None, feeds), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert native_nodes(session).get(f"aten.{op.lower()}", 0) >= 1, str(session.explain(full=True))
