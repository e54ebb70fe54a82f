"""Rows of floats times packed weights, as text: tiles of a few rows and a panel of columns, kept in registers.

Weights lie in panels of columns, as floats or as signed bytes, which are widened in registers: a panel of bytes is a quarter of
what a core has to read, and with one row to multiply that is all that takes time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hotfuse.native.byte_products import panels
from hotfuse.native.byte_text import FunctionText
from hotfuse.native.target import CpuTarget

WEIGHTS = {"f": ("float", 4), "b": ("i8", 1)}
"""Kinds of weights: their elements, and bytes of one."""
SUMS = 8
"""Vectors of sums that a tile has at least."""
Sums = dict[tuple[int, int, int], str]
"""Values by row, vector, and place among those side by side."""


def padded(columns: int, target: CpuTarget) -> int:
    """Columns that a packed weight has."""
    return -(-columns // target.lanes) * target.lanes


def in_panels(weight: Tensor, target: CpuTarget) -> Tensor:
    """Floats or signed bytes (outputs, inputs), filled up with zeros: panel after panel, each of them input by input."""
    outputs, inputs = weight.shape
    columns, widths = padded(outputs, target), panels(target)
    whole = weight
    if columns != outputs:
        whole = weight.new_zeros(columns, inputs)
        whole[:outputs] = weight
    made, at = weight.new_empty(columns * inputs), 0
    while at < columns:
        width = next(w for w in widths if w <= columns - at)
        made[at * inputs : (at + width) * inputs].view(inputs, width).copy_(whole[at : at + width].t())
        at += width
    return made


def _heights(target: CpuTarget) -> tuple[int, ...]:
    return (6, 3, 2, 1) if target.name == "avx512" else (4, 2, 1)


def _tile_text(target: CpuTarget, kind: str, rows: int, vectors: int) -> str:
    """`void tile(ptr a, i64 lda, ptr b, i64 k, ptr y, i64 ldy)`: `y = a @ b`; strides are bytes.

    A sum waits four cycles for the one before it, so tiles of few sums have several for inputs side by side, added up at the end.
    """
    lanes, (element, _) = target.lanes, WEIGHTS[kind]
    floats = f"<{lanes} x float>"
    f = FunctionText(f"void @hf_tile_{kind}_{rows}_{vectors}(ptr %a, i64 %lda, ptr %b, i64 %k, ptr %y, i64 %ldy)")
    at, out = ["%a"], ["%y"]
    for _ in range(rows - 1):
        at.append(f.moved(at[-1], "%lda"))
        out.append(f.moved(out[-1], "%ldy"))
    beside = 1
    while rows * vectors * beside < SUMS:
        beside *= 2
    places = [(r, v) for r in range(rows) for v in range(vectors)]

    def loop(name: str, before: str, start: str, until: str, step: int, sums: Sums) -> Sums:
        """From one input to another, so many side by side; the sums behind it."""
        f.do(f"br label %{name}")
        f.at(name)
        f.do(f"%{name}.q = phi i64 [{start}, %{before}], [%{name}.next, %{name}.body]")
        for (r, v, u), value in sums.items():
            f.do(f"%{name}.{r}.{v}.{u} = phi {floats} [{value}, %{before}], [%{name}.n{r}.{v}.{u}, %{name}.body]")
        f.branch(f.new(f"icmp slt i64 %{name}.q, {until}"), f"{name}.body", f"{name}.end")
        f.at(f"{name}.body")
        for u in range(step):
            q = f.op("add", f"%{name}.q", u)
            first = f.op("mul", q, vectors * lanes)
            weights: list[str] = []
            for v in range(vectors):
                place = f.moved("%b", f.op("add", first, v * lanes), element)
                w = f.new(f"load <{lanes} x {element}>, ptr {place}, align {4 if kind == 'f' else 1}")
                if kind == "b":
                    w = f.new(f"sitofp <{lanes} x i32> {f.new(f'sext <{lanes} x i8> {w} to <{lanes} x i32>')} to {floats}")
                weights.append(w)
            for r in range(rows):
                one = f.new(f"load float, ptr {f.moved(at[r], q, 'float')}, align 4")
                single = f.new(f"insertelement {floats} poison, float {one}, i64 0")
                x = f.new(f"shufflevector {floats} {single}, {floats} poison, <{lanes} x i32> zeroinitializer")
                for v in range(vectors):
                    given = f"{floats} {x}, {floats} {weights[v]}, {floats} %{name}.{r}.{v}.{u}"
                    f.do(f"%{name}.n{r}.{v}.{u} = call {floats} @llvm.fma.v{lanes}f32({given})")
        f.do(f"%{name}.next = add i64 %{name}.q, {step}")
        f.do(f"br label %{name}")
        f.at(f"{name}.end")
        return {(r, v, u): f"%{name}.{r}.{v}.{u}" for r, v, u in sums}

    sums: Sums = {(r, v, u): "zeroinitializer" for r, v in places for u in range(beside)}
    if beside == 1:
        sums = loop("all", "entry", "0", "%k", 1, sums)
    else:
        whole = f.op("and", "%k", -beside)
        sums = loop("some", "entry", "0", whole, beside, sums)
        rest = loop("rest", "some.end", whole, "%k", 1, {(r, v, 0): sums[r, v, 0] for r, v in places})
        sums = {**sums, **rest}
    for r, v in places:
        parts = [sums[r, v, u] for u in range(beside)]
        while len(parts) > 1:
            parts = [f.new(f"fadd {floats} {a}, {b}") for a, b in zip(parts[::2], parts[1::2], strict=True)]
        f.do(f"store {floats} {parts[0]}, ptr {f.moved(out[r], v * lanes, 'float')}, align 4")
    return f.done()


def _gemm_text(target: CpuTarget, kind: str, heights: Sequence[int]) -> str:
    """`void gemm(ptr x, i64 lda, ptr y, i64 ldy, i64 m, ptr weights, i64 k, i64 padded)`: rows of padded columns; strides are
    bytes."""
    head = f"void @hf_gemm_{kind}(ptr %x, i64 %lda, ptr %y, i64 %ldy, i64 %m, ptr %weights, i64 %k, i64 %padded)"
    f, widths, size = FunctionText(head), panels(target), WEIGHTS[kind][1]

    def panel(j: str) -> str:
        left, width = f.op("sub", "%padded", j), str(widths[-1])
        for w in reversed(widths[:-1]):
            width = f.new(f"select i1 {f.new(f'icmp sge i64 {left}, {w}')}, i64 {w}, i64 {width}")
        b = f.moved("%weights", f.op("mul", f.op("mul", j, "%k"), size))
        column = f.moved("%y", j, "float")

        def tile(i: str) -> str:
            rest, rows = f.op("sub", "%m", i), "1"
            for h in reversed(heights[:-1]):
                rows = f.new(f"select i1 {f.new(f'icmp sge i64 {rest}, {h}')}, i64 {h}, i64 {rows}")
            x, y = f.moved("%x", f.op("mul", i, "%lda")), f.moved(column, f.op("mul", i, "%ldy"))
            code, out = f.op("add", f.op("mul", rows, 1000), width), f.label()
            labels = {(h, w): f.label() for h in heights for w in widths}
            cases = " ".join(f"i64 {1000 * h + w}, label %{labels[h, w]}" for h, w in labels)
            f.do(f"switch i64 {code}, label %{out} [{cases}]")
            for (h, w), label in labels.items():
                f.at(label)
                f.do(
                    f"call void @hf_tile_{kind}_{h}_{w // target.lanes}(ptr {x}, i64 %lda, ptr {b}, i64 %k, ptr {y}, i64 %ldy)"
                )
                f.do(f"br label %{out}")
            f.at(out)
            return rows

        f.loop("%m", tile)
        return width

    f.loop("%padded", panel)
    return f.done()


def text(target: CpuTarget) -> str:
    """The functions of both kinds of weights."""
    heights = _heights(target)
    vectors = [w // target.lanes for w in panels(target)]
    tiles = [_tile_text(target, k, h, v) for k in WEIGHTS for h in heights for v in vectors]
    return "\n".join((*tiles, *(_gemm_text(target, k, heights) for k in WEIGHTS)))
