"""Groups around a convolution as text, lowered and run through the tile interpreter or as native code, against float64."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from hotfuse.backends.llvm.native import NativeKernel, compile_kernel, load_kernel
from hotfuse.ir import dims
from hotfuse.ir.graph import Graph, Value, output_values, sources
from hotfuse.ir.text import parse
from hotfuse.ir.types import TensorType
from hotfuse.lower.common import pack
from hotfuse.lower.common.codec import from_json, to_json
from hotfuse.lower.common.lowered import BufferArgument, BufferRole, Lowered, PackArgument, SymbolArgument
from hotfuse.lower.cpu.conv.conv_group import lower_convolution
from hotfuse.lower.cpu.conv.shape import Axis
from hotfuse.lower.cpu.tiling import Core
from hotfuse.native.target import CpuTarget
from hotfuse.ops.table import resolve
from hotfuse.tile import interpreter
from hotfuse.tile.text import parse as parse_kernel
from hotfuse.tile.text import show as show_kernel

CORES = {"avx512": Core(16, 32), "avx2": Core(8, 16), "generic": Core(4, 16), "tiny caches": Core(8, 16, 1 << 10, 4 << 10)}
GUARD = 64
"""Elements around every buffer that no kernel may write, and none may use."""
LAST = "{0,2,3,1}"
EPILOGUES = {
    "nothing": ("", "%h"),
    "relu": ("%y: T = aten.relu.default(%h)", "%y"),
    "hardswish": ("%y: T = aten.hardswish.default(%h)", "%y"),
    "silu": ("%y: T = aten.silu.default(%h)", "%y"),
    "residual": ("%a: T = aten.add.Tensor(%h, %r) %y: T = aten.relu.default(%a)", "%y"),
    "batch norm": (
        "%a: T = aten.batch_norm.default(%h, %g, %o, %m, %v, False, 0.1, 1e-05, False) %y: T = aten.relu.default(%a)",
        "%y",
    ),
    "batch norm, silu, residual": (
        "%a: T = aten.batch_norm.default(%h, %g, %o, %m, %v, False, 0.1, 1e-05, False) %s: T = aten.silu.default(%a) "
        "%y: T = aten.add.Tensor(%s, %r)",
        "%y",
    ),
    "two outputs": ("%y: T = aten.sigmoid.default(%h)", "%h, %y"),
    "per image": ("%y: T = aten.mul.Tensor(%h, %q)", "%y"),
}


def text(
    size: tuple[int, int], window: tuple[int, int], channels: tuple[int, int], *, n: str = "1", stride: int = 1,
    padding: tuple[int, int] | int = 0, dilation: int = 1, groups: int = 1, epilogue: str = "relu", into: str = LAST,
    out: str = LAST,
) -> str:  # fmt: skip
    """A group as text."""
    pads = padding if isinstance(padding, tuple) else (padding, padding)
    ic, oc = channels
    oh, ow = (Axis(s, w, stride, p, dilation).out for s, w, p in zip(size, window, pads, strict=True))
    body, outputs = EPILOGUES[epilogue]
    kind = f"f32[{n}, {oc}, {oh}, {ow}]{out}"
    reads = {name for name in ("r", "q") if f"%{name})" in body or f"%{name}," in body}
    more = "".join(f", %r: {kind}" if r == "r" else f", %q: f32[{n}, {oc}, 1, 1]" for r in sorted(reads))
    params = "".join(f'param %{p}: f32[{oc}] = "{p}"\n' for p in "bgomv" if p == "b" or f"%{p}," in body)
    return f"""graph g(%x: f32[{n}, {ic}, {size[0]}, {size[1]}]{into}{more}) {{
      param %w: f32[{oc}, {ic // groups}, {window[0]}, {window[1]}] = "w"
      {params}
      %h: {kind} = aten.conv2d.default(%x, %w, %b, [{stride}, {stride}], [{pads[0]}, {pads[1]}], [{dilation}, {dilation}], {groups})
      {body.replace(": T", f": {kind}")}
      return {outputs} }}"""


def guarded(shape: list[int], strides: list[int], fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in the middle of its memory, and all of that memory."""
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = torch.full((extent + 2 * GUARD,), fill)
    return memory.as_strided(shape, strides, GUARD), memory


def laid_out(v: Value, sizes: dict[str, int]) -> tuple[list[int], list[int]]:
    assert isinstance(v.type, TensorType)
    shape = [dims.evaluate(d, sizes) for d in v.type.shape]
    order = v.type.layout.order or tuple(range(len(shape)))
    strides = [0] * len(shape)
    step = 1
    for d in reversed(order):
        strides[d], step = step, step * shape[d]
    return shape, strides


def reference(graph: Graph, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    env: dict[str, Any] = {n: t.double() for n, t in values.items()}

    def given(a: Any) -> Any:
        return env[a.name] if isinstance(a, Value) else a

    for node in graph.nodes:
        (out,) = node.outs
        env[out.name] = resolve(node.op)(*map(given, node.args), **{k: given(a) for k, a in node.attrs})
    return [env[v.name] for v in output_values(graph)]


@lru_cache(maxsize=4)
def _native(kernel: str, target: CpuTarget) -> NativeKernel:
    """The kernel of this text, once for all the sizes it is asked for."""
    return load_kernel(compile_kernel(parse_kernel(kernel), target))


def check(source: str, core: Core, native: CpuTarget | None = None, **sizes: int) -> Lowered:
    """Lower, send through JSON, run, compare; nothing around the buffers may change or be used."""
    graph = parse(source)
    lowered = from_json(to_json(lower_convolution(graph, core)))
    generator = torch.Generator().manual_seed(3)
    values: dict[str, torch.Tensor] = {}
    for v in sources(graph):
        values[v.name], _ = guarded(*laid_out(v, sizes), math.nan)
        values[v.name].copy_(torch.randn(values[v.name].shape, generator=generator))
    if "v" in values:
        values["v"].abs_().add_(0.5)
    outs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for v in dict.fromkeys(output_values(graph)):
        shape, strides = laid_out(v, sizes)
        assert [dims.evaluate(d, sizes) for d in dict(lowered.strides)[v.name]] == strides
        outs[v.name] = guarded(shape, strides, 77.0)
    buffers: dict[str, torch.Tensor] = {}
    numbers: list[int] = []
    for a in lowered.arguments:
        match a:
            case BufferArgument(buffer, role, value):
                buffers[buffer] = outs[value][0] if role is BufferRole.OUTPUT else values[value]
            case PackArgument(buffer, spec):
                buffers[buffer] = torch.from_numpy(pack.pack(spec, {s.name: values[s.name].numpy() for s in spec.sources}))
            case SymbolArgument(_, symbol):
                numbers.append(sizes[symbol])
            case _:
                raise AssertionError(a)
    if native is not None:
        _native(show_kernel(lowered.kernel), native)(list(buffers.values()), numbers)
    else:
        flat = {n: t.as_strided((t.numel(),), (1,)).numpy() if lowered.kernel.buffer(n).kind != "const" else t.numpy()
                for n, t in buffers.items()}  # fmt: skip
        interpreter.run(lowered.kernel, flat, dict(zip(lowered.kernel.sizes, numbers, strict=True)))
    weight = values["w"]
    bound = 4e-6 * (weight.numel() / weight.shape[0]) ** 0.5
    for v, exact in zip(output_values(graph), reference(graph, values), strict=True):
        got, memory = outs[v.name]
        assert torch.allclose(got.double(), exact, rtol=2e-5, atol=bound), (got - exact).abs().max()
        assert (memory[:GUARD] == 77).all() and (memory[-GUARD:] == 77).all()
    return lowered
