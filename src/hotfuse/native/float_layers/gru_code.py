"""One direction of a GRU layer in native code, as text; its gates are z, r and h, as ONNX has them.

    before reset   n = tanh(x W + r * (h R + b))
    otherwise      n = tanh(x W + (r * h) R + b), which is a product of its own, behind that of z and r
"""

from __future__ import annotations

from hotfuse.native.byte_text import FunctionText
from hotfuse.native.float_layers.gate_formulas import VectorMath
from hotfuse.native.float_layers.word_table import field
from hotfuse.native.target import CpuTarget

GRU_FIELDS = ("features", "hidden", "lane", "zr_at", "h_at", "bias", "r_bias", "before_reset", "back", "directions")
"""Of a direction of a layer. `lane`: hidden values filled up to whole vectors. `zr_at`, `h_at`: where the states' weights of z
and r, and of h, begin, in bytes behind the inputs'. `r_bias`: of the product of h. `back`: whether it reads backwards."""


def _load(f: FunctionText, math: VectorMath, base: str, at: str) -> str:
    return f.new(f"load {math.type}, ptr {f.moved(base, at, 'float')}, align 4")


def _gate(f: FunctionText, math: VectorMath, bias: str, at: str) -> str:
    """What z and r are the sigmoid of."""
    total = math.op("fadd", _load(f, math, "%x", at), _load(f, math, bias, at))
    return math.op("fadd", total, _load(f, math, "%sums", at))


def _reset_text(target: CpuTarget) -> str:
    """`void reset(ptr x, ptr sums, ptr h, ptr to, ptr d)`: one row's `r * h`."""
    f = FunctionText("void @hf_gru_reset(ptr %x, ptr %sums, ptr %h, ptr %to, ptr %d)")
    math = VectorMath(f, target.lanes)
    lane, bias = field(f, GRU_FIELDS, "lane"), field(f, GRU_FIELDS, "bias")

    def unit(u: str) -> int:
        r = math.sigmoid(_gate(f, math, bias, f.op("add", lane, u)))
        f.do(f"store {math.type} {math.op('fmul', r, _load(f, math, '%h', u))}, ptr {f.moved('%to', u, 'float')}, align 4")
        return target.lanes

    f.loop(lane, unit)
    return f.done()


def _cell_text(target: CpuTarget) -> str:
    """`void cell(ptr x, ptr sums, ptr h, ptr d)`: one row's next state; gates are summed up here."""
    f = FunctionText("void @hf_gru_cell(ptr %x, ptr %sums, ptr %h, ptr %d)")
    math = VectorMath(f, target.lanes)
    word = {n: field(f, GRU_FIELDS, n) for n in ("lane", "bias", "r_bias", "before_reset")}
    before = f.new(f"icmp ne i64 {word['before_reset']}, 0")

    def unit(u: str) -> int:
        z, r = (math.sigmoid(_gate(f, math, word["bias"], f.op("add", f.op("mul", word["lane"], k), u))) for k in range(2))
        at = f.op("add", f.op("mul", word["lane"], 2), u)
        given = math.op("fadd", _load(f, math, "%x", at), _load(f, math, word["bias"], at))
        inner = math.op("fadd", _load(f, math, "%sums", at), _load(f, math, word["r_bias"], u))
        factor = f.new(f"select i1 {before}, {math.type} {r}, {math.type} {math.all(1.0)}")
        n, h = math.tanh(math.fma(factor, inner, given)), _load(f, math, "%h", u)
        new = math.fma(z, math.op("fsub", h, n), n)
        f.do(f"store {math.type} {new}, ptr {f.moved('%h', u, 'float')}, align 4")
        return target.lanes

    f.loop(word["lane"], unit)
    return f.done()


def _layer_text() -> str:
    """`void gru(ptr x, ptr y, ptr h, ptr last_h, ptr scratch, ptr d, ptr weights, i64 steps, i64 batch, i64 many)`: as `lstm`.
    The scratch has rows of `lane` floats for the state and for `r * h`, and of three times as many for one step's sums and `many`
    steps'."""
    head = "ptr %x, ptr %y, ptr %h, ptr %last_h, ptr %scratch, ptr %d, ptr %weights, i64 %steps, i64 %batch, i64 %many"
    f = FunctionText(f"void @hf_gru({head})")
    word = {n: field(f, GRU_FIELDS, n) for n in GRU_FIELDS if not n.endswith("bias")}
    lane, hidden = word["lane"], word["hidden"]
    state, gates, columns = f.op("mul", lane, 4), f.op("mul", lane, 12), f.op("mul", lane, 3)
    now = "%scratch"
    kept = f.moved(now, f.op("mul", "%batch", state))
    sums = f.moved(kept, f.op("mul", "%batch", state))
    x_sums = f.moved(sums, f.op("mul", "%batch", gates))
    zr, into_h = f.moved("%weights", word["zr_at"]), f.moved("%weights", word["h_at"])
    two = f.op("mul", lane, 2)
    third = f.moved(sums, two, "float")
    before, backwards = (f.new(f"icmp ne i64 {word[n]}, 0") for n in ("before_reset", "back"))
    in_states, wide, fill = f.op("mul", hidden, 4), f.op("mul", word["features"], 4), f.op("sub", lane, hidden)
    rows = f.op("mul", "%batch", word["directions"])

    def product(x: str, lda: str, y: str, m: str, w: str, k: str, columns: str) -> None:
        f.do(f"call void @hf_gemm_f(ptr {x}, i64 {lda}, ptr {y}, i64 {gates}, i64 {m}, ptr {w}, i64 {k}, i64 {columns})")

    def row(base: str, b: str, size: str) -> str:
        return f.moved(base, f.op("mul", b, size))

    def begin(b: str) -> int:
        here = row(now, b, state)
        f.do(f"call void @hf_copy(ptr {row('%h', b, in_states)}, ptr {here}, i64 {hidden})")
        f.do(f"call void @hf_zeros(ptr {f.moved(here, hidden, 'float')}, i64 {fill})")
        return 1

    f.loop("%batch", begin)

    def turned(forward: str, back: str) -> str:
        return f.new(f"select i1 {backwards}, i64 {back}, i64 {forward}")

    def some(first: str) -> str:
        many = f.smaller("%many", f.op("sub", "%steps", first))
        start = turned(first, f.op("sub", f.op("sub", "%steps", first), many))
        x = row("%x", f.op("mul", start, "%batch"), wide)
        product(x, wide, x_sums, f.op("mul", many, "%batch"), "%weights", word["features"], columns)

        def step(t: str) -> int:
            here = turned(t, f.op("sub", f.op("sub", many, 1), t))

            def of_x(b: str) -> str:
                return row(x_sums, f.op("add", f.op("mul", here, "%batch"), b), gates)

            def reset(b: str) -> int:
                given = f"ptr {of_x(b)}, ptr {row(sums, b, gates)}, ptr {row(now, b, state)}, ptr {row(kept, b, state)}"
                f.do(f"call void @hf_gru_reset({given}, ptr %d)")
                return 1

            def cell(b: str) -> int:
                one = row(now, b, state)
                f.do(f"call void @hf_gru_cell(ptr {of_x(b)}, ptr {row(sums, b, gates)}, ptr {one}, ptr %d)")
                out = f.op("add", f.op("mul", f.op("add", start, here), rows), b)
                f.do(f"call void @hf_copy(ptr {one}, ptr {row('%y', out, in_states)}, i64 {hidden})")
                return 1

            product(now, state, sums, "%batch", zr, hidden, two)
            f.when(before, lambda: None, lambda: f.loop("%batch", reset))
            source = f.new(f"select i1 {before}, ptr {now}, ptr {kept}")
            product(source, state, third, "%batch", into_h, hidden, lane)
            f.loop("%batch", cell)
            return 1

        f.loop(many, step)
        return "%many"

    f.loop("%steps", some)

    def end(b: str) -> int:
        f.do(f"call void @hf_copy(ptr {row(now, b, state)}, ptr {row('%last_h', b, in_states)}, i64 {hidden})")
        return 1

    f.loop("%batch", end)
    return f.done()


def text(target: CpuTarget) -> str:
    """All of it."""
    return "\n".join((_reset_text(target), _cell_text(target), _layer_text()))
