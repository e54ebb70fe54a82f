"""Whole layers over those products, as text, and as functions of this process.

    window_product   a convolution: windows of an image in any order of memory are copied into rows, which are multiplied
    lstm, gru        one direction of a recurrent layer: the products of some steps' inputs, then step after step
    grouped_queries  an attention over a cache that grows (`grouped_queries_code`)

torch's libraries take 15 to 50 us for the call of a convolution or a recurrent layer that has 5 us to compute, and most of what a
small model does is such layers. Nothing here depends on a model: the code is compiled once, kept for later processes, and until
it is there callers have the libraries. What a layer is told is a table of words (`word_table`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hotfuse.base.faults import is_begun, steady
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.native.byte_text import FunctionText
from hotfuse.native.float_layers import grouped_queries_code, gru_code, panel_products
from hotfuse.native.float_layers.gate_formulas import VectorMath, number
from hotfuse.native.float_layers.word_table import field
from hotfuse.native.function import entered, entry_symbols, with_entries
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.target import CpuTarget, host
from hotfuse.native.toolchain import helper_object

WINDOW_FIELDS = (
    "pixels", "inputs", "columns", "padded", "bias", "relu", "channels", "height", "width", "rows", "cols", "kernel_y",
    "kernel_x", "stride_y", "stride_x", "pad_y", "pad_x", "dilation_y", "dilation_x", "image_step", "channel_step", "line_step",
    "pixel_step",
)  # fmt: skip
"""Of a convolution of images of one kind; steps are elements."""
LSTM_FIELDS = ("features", "hidden", "lane", "r_at", "w_scale", "r_scale", "bias", "bytes", "back", "directions")
"""Of a direction of a layer. `lane`: hidden values filled up to whole vectors; gates are i, f, g and o, so many columns each.
`r_at`: where the states' weights begin, in bytes behind the inputs'. `bytes`: whether weights are bytes. `back`: whether it reads
backwards."""
CHUNK = 24
"""Windows that are copied and multiplied together: they stay in the first caches."""


def supported(target: CpuTarget) -> bool:
    """Whether there is code for a machine."""
    return target.name in ("avx512", "avx2")


def _copy_text(target: CpuTarget) -> str:
    """`void copy(ptr from, ptr to, i64 n)`: floats that lie side by side; `gather(from, to, n, step)`: those so many bytes
    apart."""
    text: list[str] = []
    for name, more in (("copy", ""), ("gather", ", i64 %step")):
        f = FunctionText(f"void @hf_{name}(ptr %from, ptr %to, i64 %n{more})")

        def single(i: str, f: FunctionText = f, more: str = more) -> int:
            at = f.moved("%from", f.op("mul", i, "%step")) if more else f.moved("%from", i, "float")
            f.do(f"store float {f.new(f'load float, ptr {at}')}, ptr {f.moved('%to', i, 'float')}")
            return 1

        def piece(i: str, f: FunctionText = f) -> int:
            kind = f"<{target.lanes} x float>"
            value = f.new(f"load {kind}, ptr {f.moved('%from', i, 'float')}, align 4")
            f.do(f"store {kind} {value}, ptr {f.moved('%to', i, 'float')}, align 4")
            return target.lanes

        start: str | int = 0
        if not more:
            start = f.op("and", "%n", -target.lanes)
            f.loop(start, piece)
        f.loop("%n", single, start)
        text.append(f.done())
    f = FunctionText("void @hf_zeros(ptr %to, i64 %n)")
    f.loop("%n", lambda i: f.do(f"store float 0.0, ptr {f.moved('%to', i, 'float')}") or 1)
    text.append(f.done())
    f = FunctionText("void @hf_ends(ptr %sums, ptr %y, ptr %bias, i64 %relu, i64 %n)")
    f.do(f"%floor = select i1 {f.new('icmp ne i64 %relu, 0')}, float 0.0, float {number(float('-inf'))}")

    def ends(lanes: int, start: str | int, until: str) -> None:
        kind, floor = (f"<{lanes} x float>", f"<{lanes} x i1>") if lanes > 1 else ("float", "i1")
        low = "%floor"
        if lanes > 1:
            one = f.new(f"insertelement {kind} poison, float %floor, i64 0")
            low = f.new(f"shufflevector {kind} {one}, {kind} poison, <{lanes} x i32> zeroinitializer")

        def some(i: str) -> int:
            sums = f.new(f"load {kind}, ptr {f.moved('%sums', i, 'float')}, align 4")
            y = f.new(f"fadd {kind} {sums}, {f.new(f'load {kind}, ptr ' + f.moved('%bias', i, 'float') + ', align 4')}")
            less = f.new(f"fcmp olt {kind} {y}, {low}")  # what is no number stays so
            held = f.new(f"select {floor} {less}, {kind} {low}, {kind} {y}")
            f.do(f"store {kind} {held}, ptr {f.moved('%y', i, 'float')}, align 4")
            return lanes

        f.loop(until, some, start)

    whole = f.op("and", "%n", -target.lanes)
    ends(target.lanes, 0, whole)
    ends(1, whole, "%n")
    text.append(f.done())
    return "\n".join(text)


def _windows_text() -> str:
    """`void window_product(ptr x, ptr y, ptr scratch, ptr d, ptr weights)`: y has channels innermost. The scratch has `CHUNK`
    rows of windows, and as many of padded columns behind them."""
    f = FunctionText("void @hf_window_product(ptr %x, ptr %y, ptr %scratch, ptr %d, ptr %weights)")
    word = {name: field(f, WINDOW_FIELDS, name) for name in WINDOW_FIELDS}
    inputs, channels, columns = word["inputs"], word["channels"], word["columns"]
    plane, row = f.op("mul", word["rows"], word["cols"]), f.op("mul", inputs, 4)
    sums, wide = f.moved("%scratch", f.op("mul", row, CHUNK)), f.op("mul", word["padded"], 4)
    run = f.op("mul", word["kernel_x"], channels)
    together = f.new(f"icmp eq i64 {word['channel_step']}, 1")
    single = f.new(f"icmp eq i64 {channels}, 1")
    close = f.op("or", together, single, "i1")
    dense = f.new(f"icmp eq i64 {f.op('mul', word['pixel_step'], word['dilation_x'])}, {channels}")
    in_line = f.op("and", close, dense, "i1")
    apart = f.op("mul", word["channel_step"], 4)

    def some(first: str) -> int:
        many = f.smaller(CHUNK, f.op("sub", word["pixels"], first))
        last = f.op("add", first, many)

        def pixel(p: str) -> int:
            image, inner = f.op("udiv", p, plane), f.op("urem", p, plane)
            oy, ox = f.op("udiv", inner, word["cols"]), f.op("urem", inner, word["cols"])
            top = f.op("sub", f.op("mul", oy, word["stride_y"]), word["pad_y"])
            left = f.op("sub", f.op("mul", ox, word["stride_x"]), word["pad_x"])
            to_row = f.moved("%scratch", f.op("mul", f.op("sub", p, first), row))
            base = f.moved("%x", f.op("mul", image, word["image_step"]), "float")
            end = f.op("add", left, f.op("mul", f.op("sub", word["kernel_x"], 1), word["dilation_x"]))
            inside_x = f.op("and", f.new(f"icmp sge i64 {left}, 0"), f.new(f"icmp slt i64 {end}, {word['width']}"), "i1")
            whole = f.op("and", in_line, inside_x, "i1")

            def line(ky: str) -> int:
                iy = f.op("add", top, f.op("mul", ky, word["dilation_y"]))
                to = f.moved(to_row, f.op("mul", ky, run), "float")
                inside = f.op("and", f.new(f"icmp sge i64 {iy}, 0"), f.new(f"icmp slt i64 {iy}, {word['height']}"), "i1")

                def at_x(ix: str) -> str:
                    place = f.op("add", f.op("mul", iy, word["line_step"]), f.op("mul", ix, word["pixel_step"]))
                    return f.moved(base, place, "float")

                def tap(kx: str) -> int:
                    ix = f.op("add", left, f.op("mul", kx, word["dilation_x"]))
                    here = f.op("and", f.new(f"icmp sge i64 {ix}, 0"), f.new(f"icmp slt i64 {ix}, {word['width']}"), "i1")
                    into = f.moved(to, f.op("mul", kx, channels), "float")
                    f.when(
                        here,
                        lambda: f.when(
                            close,
                            lambda: f.do(f"call void @hf_copy(ptr {at_x(ix)}, ptr {into}, i64 {channels})"),
                            lambda: f.do(f"call void @hf_gather(ptr {at_x(ix)}, ptr {into}, i64 {channels}, i64 {apart})"),
                        ),
                        lambda: f.do(f"call void @hf_zeros(ptr {into}, i64 {channels})"),
                    )
                    return 1

                f.when(
                    inside,
                    lambda: f.when(
                        whole,
                        lambda: f.do(f"call void @hf_copy(ptr {at_x(left)}, ptr {to}, i64 {run})"),
                        lambda: f.loop(word["kernel_x"], tap),
                    ),
                    lambda: f.do(f"call void @hf_zeros(ptr {to}, i64 {run})"),
                )
                return 1

            f.loop(word["kernel_y"], line)
            return 1

        f.loop(last, pixel, first)
        given = f"ptr %scratch, i64 {row}, ptr {sums}, i64 {wide}, i64 {many}, ptr %weights, i64 {inputs}, i64 {word['padded']}"
        f.do(f"call void @hf_gemm_f({given})")

        def finish(r: str) -> int:
            source = f.moved(sums, f.op("mul", r, wide))
            y = f.moved("%y", f.op("mul", f.op("add", first, r), columns), "float")
            f.do(f"call void @hf_ends(ptr {source}, ptr {y}, ptr {word['bias']}, i64 {word['relu']}, i64 {columns})")
            return 1

        f.loop(many, finish)
        return CHUNK

    f.loop(word["pixels"], some)
    return f.done()


def _cell_text(target: CpuTarget) -> str:
    """`void cell(ptr x, ptr h_sums, ptr c, ptr h, ptr d)`: one row's gates to its next states; gates are summed up here."""
    f, lanes = FunctionText("void @hf_cell(ptr %x, ptr %sums, ptr %c, ptr %h, ptr %d)"), target.lanes
    math = VectorMath(f, lanes)
    word = {n: field(f, LSTM_FIELDS, n) for n in ("lane", "w_scale", "r_scale", "bias")}

    def unit(u: str) -> int:
        def load(base: str, at: str) -> str:
            return f.new(f"load {math.type}, ptr {f.moved(base, at, 'float')}, align 4")

        gates: list[str] = []
        for gate in range(4):
            at = f.op("add", f.op("mul", word["lane"], gate), u)
            total = math.fma(load("%x", at), load(word["w_scale"], at), load(word["bias"], at))
            gates.append(math.fma(load("%sums", at), load(word["r_scale"], at), total))
        i, forget, o = (math.sigmoid(gates[k]) for k in (0, 1, 3))
        c = math.fma(forget, load("%c", u), math.op("fmul", i, math.tanh(gates[2])))
        h = math.op("fmul", o, math.tanh(c))
        f.do(f"store {math.type} {c}, ptr {f.moved('%c', u, 'float')}, align 4")
        f.do(f"store {math.type} {h}, ptr {f.moved('%h', u, 'float')}, align 4")
        return lanes

    f.loop(word["lane"], unit)
    return f.done()


def _lstm_text() -> str:
    """`void lstm(ptr x, ptr y, ptr h, ptr c, ptr last_h, ptr last_c, ptr scratch, ptr d, ptr weights, i64 steps, i64 batch, i64
    many)`: rows of x and states lie one behind another, those of y with other directions' between steps. The scratch has rows of
    `lane` floats for both states, and of four times as many for the sums of one step's states and of `many` steps' inputs, which
    are multiplied together; one for each row of the batch."""
    arguments = "ptr %x, ptr %y, ptr %h, ptr %c, ptr %last_h, ptr %last_c, ptr %scratch, ptr %d, ptr %weights"
    f = FunctionText(f"void @hf_lstm({arguments}, i64 %steps, i64 %batch, i64 %many)")
    word = {n: field(f, LSTM_FIELDS, n) for n in ("features", "hidden", "lane", "r_at", "bytes", "back", "directions")}
    recurrent = f.moved("%weights", word["r_at"])
    backwards = f.new(f"icmp ne i64 {word['back']}, 0")
    lane, hidden, features = word["lane"], word["hidden"], word["features"]
    state, gates = f.op("mul", lane, 4), f.op("mul", lane, 16)
    columns, states = f.op("mul", lane, 4), f.op("mul", "%batch", state)
    h, c = "%scratch", f.moved("%scratch", states)
    h_sums = f.moved(c, states)
    x_sums = f.moved(h_sums, f.op("mul", "%batch", gates))
    as_bytes = f.new(f"icmp ne i64 {word['bytes']}, 0")

    def product(x: str, lda: str, y: str, m: str, w: str, k: str) -> None:
        given = f"(ptr {x}, i64 {lda}, ptr {y}, i64 {gates}, i64 {m}, ptr {w}, i64 {k}, i64 {columns})"
        f.when(as_bytes, lambda: f.do(f"call void @hf_gemm_b{given}"), lambda: f.do(f"call void @hf_gemm_f{given}"))

    def row(base: str, b: str, size: str) -> str:
        return f.moved(base, f.op("mul", b, size))

    in_states = f.op("mul", hidden, 4)
    fill = f.op("sub", lane, hidden)

    def begin(b: str) -> int:
        for source, to in (("%h", h), ("%c", c)):
            here = row(to, b, state)
            f.do(f"call void @hf_copy(ptr {row(source, b, in_states)}, ptr {here}, i64 {hidden})")
            f.do(f"call void @hf_zeros(ptr {f.moved(here, hidden, 'float')}, i64 {fill})")
        return 1

    f.loop("%batch", begin)
    wide = f.op("mul", features, 4)

    def turned(forward: str, back: str) -> str:
        return f.new(f"select i1 {backwards}, i64 {back}, i64 {forward}")

    def some(first: str) -> str:
        many = f.smaller("%many", f.op("sub", "%steps", first))
        start = turned(first, f.op("sub", f.op("sub", "%steps", first), many))
        x = row("%x", f.op("mul", start, "%batch"), wide)
        product(x, wide, x_sums, f.op("mul", many, "%batch"), "%weights", features)

        def step(t: str) -> int:
            product(h, state, h_sums, "%batch", recurrent, hidden)
            here = turned(t, f.op("sub", f.op("sub", many, 1), t))
            rows = f.op("mul", "%batch", word["directions"])

            def cell(b: str) -> int:
                sums = row(x_sums, f.op("add", f.op("mul", here, "%batch"), b), gates)
                now, cells = row(h, b, state), row(c, b, state)
                f.do(f"call void @hf_cell(ptr {sums}, ptr {row(h_sums, b, gates)}, ptr {cells}, ptr {now}, ptr %d)")
                out = f.op("add", f.op("mul", f.op("add", start, here), rows), b)
                f.do(f"call void @hf_copy(ptr {now}, ptr {row('%y', out, in_states)}, i64 {hidden})")
                return 1

            f.loop("%batch", cell)
            return 1

        f.loop(many, step)
        return "%many"

    f.loop("%steps", some)

    def end(b: str) -> int:
        for source, to in ((h, "%last_h"), (c, "%last_c")):
            f.do(f"call void @hf_copy(ptr {row(source, b, state)}, ptr {row(to, b, in_states)}, i64 {hidden})")
        return 1

    f.loop("%batch", end)
    return f.done()


def module_text(target: CpuTarget) -> str:
    """All of it."""
    math = VectorMath(FunctionText(""), target.lanes)
    return "\n".join((
        math.declared(), "declare i64 @llvm.smin.i64(i64, i64)", panel_products.text(target), _copy_text(target), _windows_text(),
        _cell_text(target), _lstm_text(), gru_code.text(target), grouped_queries_code.text(target),
    ))  # fmt: skip


@dataclass(frozen=True, slots=True)
class FloatLayers:
    """The layers as functions of addresses and numbers; they let the interpreter lock go."""

    target: CpuTarget
    window_product: Callable[..., Any]
    """x, y, scratch, table, weights"""
    lstm: Callable[..., Any]
    """x, y, h, c, last h, last c, scratch, table, weights, steps, batch, many"""
    gru: Callable[..., Any]
    """x, y, h, last h, scratch, table, weights, steps, batch, many"""
    grouped_queries: Callable[..., Any]
    """q, k, v, past k, past v, keys, values, y, before, cos, sin, scratch, table, batch, steps, past, length, scale, softcap"""


def load_layers(target: CpuTarget) -> tuple[FloatLayers, Loaded]:
    """The layers made for a machine, and the code, which has to be kept."""
    names = ("hf_window_product", "hf_lstm", "hf_gru", "hf_grouped_queries")
    text = with_entries(module_text(target), names)
    code = load_object(helper_object(text, target), [f"py_{name}" for name in names], entry_symbols())
    return FloatLayers(target, *(entered(code, name) for name in names)), code


_kept: list[Loaded] = []


class _BackgroundLayers:
    """Has the layers compiled in the background, once in a process. What the machine can execute is found out there, too: where
    nothing has kept it, that takes programs of their own."""

    def __init__(self) -> None:
        self.layers: FloatLayers | None = None
        self._begun = False

    def begin(self) -> None:
        """Have them made, unless somebody has."""
        if not self._begun:
            self._begun = True
            is_begun(steady(self._make, "hotfuse-float-layers"))

    def _make(self) -> None:
        """Callers stay with the libraries where it fails, which is counted."""
        if supported(host()):
            layers, code = load_layers(host())
            _kept.append(code)
            self.layers = layers

    def after_fork(self) -> None:
        """In a forked child: who was at it is in the parent, and the next that asks begins anew."""
        self._begun = self.layers is not None


background_layers = _BackgroundLayers()
os.register_at_fork(after_in_child=background_layers.after_fork)
