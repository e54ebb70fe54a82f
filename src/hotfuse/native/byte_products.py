"""Products of bytes as native code: layers and convolutions of quantized files, before code of their own is there.

    layer       rows of bytes (or of floats, which are quantized first, also by their own range) times packed weights
    conv        images with channels innermost: windows are copied into rows, a few hundred at a time, and multiplied as above
    depthwise   one channel at a time: some vectors of channels go through all taps of a window before the next

Sums are exact 32-bit integers: four products of an unsigned and a signed byte are one instruction where the processor has it, else
they are widened and added in pairs of 16 bits, which cannot saturate. What happens to the sums is done while they are in the first
cache: `y = (sum + start) * unit + bias`, not below a floor, as floats, as bytes, or as floats that were bytes for a moment.

Weights lie in panels of columns, four bytes of a column side by side (`packed`). What a layer is told once is a table of words
(`LayerTable`); nothing here depends on a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotfuse.native.byte_text import ByteDot, FunctionText
from hotfuse.native.target import CpuTarget

FIELDS = (
    "inputs", "columns", "weights", "start", "sums", "factor", "bias", "source", "x_scale", "x_zero", "floor", "result", "y_zero",
    "low", "high", "y_scale", "padded", "channels", "kernel_y", "kernel_x", "stride_y", "stride_x", "pad_y", "pad_x",
    "dilation_y", "dilation_x",
)  # fmt: skip
"""Of a table: 8 bytes each. Floats take the first four of theirs."""
FLOATS = frozenset({"x_scale", "x_zero", "floor", "y_zero", "low", "high", "y_scale"})
UNSIGNED, SIGNED, STATIC, DYNAMIC, TOLD = range(5)
"""What a layer reads: bytes, floats by constant scale, floats by their own range, signed bytes whose scale comes with the call."""
AS_FLOATS, AS_BYTES, AS_ROUNDED = range(3)
SLACK = 64
"""Bytes that may be read behind the last row."""
CHUNK_BYTES = 96 << 10
"""Rows that are multiplied with all columns before the next ones are looked at: they stay in the second cache."""


def supported(target: CpuTarget) -> bool:
    """Whether there is code for a machine."""
    return target.name in ("avx512", "avx2")


def panels(target: CpuTarget) -> tuple[int, ...]:
    """Columns of a panel, widest first; what is left takes the widest that fits, and the last is filled up."""
    return tuple(target.lanes * v for v in ((4, 2, 1) if target.name == "avx512" else (2, 1)))


def packed(weight: Tensor, target: CpuTarget) -> Tensor:
    """Signed bytes (outputs, inputs) in panels, filled up with zeros."""
    outputs, inputs = weight.shape
    widths = panels(target)
    columns, depth = _up(outputs, widths[-1]), _up(inputs, 4)
    whole = torch.zeros(columns, depth, dtype=torch.int8, device="cpu")
    whole[:outputs, :inputs] = weight
    parts: list[Tensor] = []
    at = 0
    while at < columns:
        width = next(w for w in widths if w <= columns - at)
        parts.append(whole[at : at + width].view(width, depth // 4, 4).permute(1, 0, 2).reshape(-1))
        at += width
    return torch.cat(parts)


def in_words(weight: Tensor) -> Tensor:
    """Signed bytes as 16 bits in words whose upper halves are zero: a product of pairs of 16 bits is one of words then."""
    return weight.to(torch.int32) & 0xFFFF


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


class LayerTable:
    """What a layer is told once; keeps alive what it points to."""

    def __init__(self, **values: float | Tensor) -> None:
        self.kept = [v for v in values.values() if isinstance(v, Tensor)]
        self.words = torch.zeros(len(FIELDS), dtype=torch.int64, device="cpu")
        floats = self.words.view(torch.float32)
        for name, value in values.items():
            at = FIELDS.index(name)
            if isinstance(value, Tensor):
                self.words[at] = value.data_ptr()
            elif name in FLOATS:
                floats[2 * at] = value
            else:
                self.words[at] = int(value)
        self.address = self.words.data_ptr()


_ADDRESSES = frozenset({"weights", "start", "sums", "factor", "bias"})


def _field(f: FunctionText, name: str) -> str:
    """A field of the table `%d`."""
    kind = "float" if name in FLOATS else "ptr" if name in _ADDRESSES else "i64"
    return f.new(f"load {kind}, ptr {f.moved('%d', FIELDS.index(name), 'i64')}")


def _tile_text(dot: ByteDot, rows: int, vectors: int, width: int) -> str:
    """`void tile(ptr a, i64 lda, ptr b, i64 quads, ptr acc)`: sums of some rows and a panel's columns."""
    f = FunctionText(f"void @hf_tile_{rows}_{vectors}(ptr %a, i64 %lda, ptr %b, i64 %quads, ptr %acc)")
    at, places = ["%a"], [(r, v) for r in range(rows) for v in range(vectors)]
    for _ in range(rows - 1):
        at.append(f.moved(at[-1], "%lda"))
    f.do("br label %loop")
    f.at("loop")
    f.do("%q = phi i64 [0, %entry], [%q.next, %loop]")
    for r, v in places:
        f.do(f"%c{r}.{v} = phi {dot.type} [zeroinitializer, %entry], [%n{r}.{v}, %loop]")
    first = f.op("mul", "%q", vectors * dot.lanes)
    weights = [
        dot.signed(f, f.new(f"load {dot.type}, ptr {f.moved('%b', f.op('add', first, v * dot.lanes), 'i32')}, align 4"))
        for v in range(vectors)
    ]
    for r in range(rows):
        four = f.new(f"load i32, ptr {f.moved(at[r], '%q', 'i32')}, align 1")
        x = dot.unsigned(f, dot.splat(f, "i32", dot.lanes, four))
        for v in range(vectors):
            total = dot.add(f, f"%c{r}.{v}", x, weights[v])
            f.do(f"%n{r}.{v} = add {dot.type} {total}, zeroinitializer")
    f.do("%q.next = add i64 %q, 1")
    f.do("%more = icmp ult i64 %q.next, %quads")
    f.branch("%more", "loop", "end")
    f.at("end")
    for r, v in places:
        f.do(f"store {dot.type} %n{r}.{v}, ptr {f.moved('%acc', r * width + v * dot.lanes, 'i32')}, align 4")
    return f.done()


_ROW = (
    "ptr {acc}, ptr {y}, ptr {start}, ptr {unit}, ptr {bias}, float {floor}, float {zero}, float {low}, float {high}, "
    "float {scale}, i64 {n}"
)
ROW_ARGUMENTS = _ROW.format(
    acc="%x", y="%y", start="%start", unit="%unit", bias="%bias", floor="%floor", zero="%zero", low="%low", high="%high",
    scale="%scale", n="%n",
).rsplit(", ", 1)[0]  # fmt: skip
"""Of the functions `hf_row_floats`, `hf_row_bytes` and `hf_row_rounded`, before the number of elements."""
ROWS = {AS_FLOATS: ("floats", 4), AS_BYTES: ("bytes", 1), AS_ROUNDED: ("rounded", 4)}


def _finish(f: FunctionText, acc: str, y: str, start: str, unit: str, bias: str, n: str) -> None:
    """One row of sums, as what the table says."""
    names = {"floor": "floor", "zero": "y_zero", "low": "low", "high": "high", "scale": "y_scale"}
    told = {name: _field(f, field) for name, field in names.items()}
    given = _ROW.format(acc=acc, y=y, start=start, unit=unit, bias=bias, n=n, **told)
    kind, end = _field(f, "result"), f.label()
    labels = {k: f.label() for k in ROWS}
    cases = " ".join(f"i64 {k}, label %{labels[k]}" for k in ROWS)
    f.do(f"switch i64 {kind}, label %{end} [{cases}]")
    for k, (name, _) in ROWS.items():
        f.at(labels[k])
        f.do(f"call void @hf_row_{name}({given})")
        f.do(f"br label %{end}")
    f.at(end)


def _result_size(f: FunctionText) -> str:
    bytes_are_made = f.new(f"icmp eq i64 {_field(f, 'result')}, {AS_BYTES}")
    return f.new(f"select i1 {bytes_are_made}, i64 1, i64 4")


def _gemm_text(target: CpuTarget, heights: Sequence[int]) -> str:
    """`void gemm(ptr x, i64 lda, ptr y, i64 m, ptr d, ptr start, ptr unit)` of unsigned bytes."""
    f = FunctionText("void @hf_gemm(ptr %x, i64 %lda, ptr %y, i64 %m, ptr %d, ptr %start, ptr %unit)")
    widths = panels(target)
    acc = f.new(f"alloca [{heights[0] * widths[0]} x i32], align 64")
    columns, weights, bias, size = _field(f, "columns"), _field(f, "weights"), _field(f, "bias"), _result_size(f)
    quads = f.op("lshr", f.op("add", _field(f, "inputs"), 3), 2)
    depth, padded = f.op("shl", quads, 2), _field(f, "padded")

    def panel(j: str) -> str:
        left = f.op("sub", padded, j)
        width = str(widths[-1])
        for w in reversed(widths[:-1]):
            width = f.new(f"select i1 {f.new(f'icmp sge i64 {left}, {w}')}, i64 {w}, i64 {width}")
        real = f.smaller(width, f.op("sub", columns, j))
        b = f.moved(weights, f.op("mul", j, depth))

        def tile(i: str) -> str:
            rest, rows = f.op("sub", "%m", i), "1"
            for h in reversed(heights[:-1]):
                rows = f.new(f"select i1 {f.new(f'icmp sge i64 {rest}, {h}')}, i64 {h}, i64 {rows}")
            given = f"ptr {f.moved('%x', f.op('mul', i, '%lda'))}, i64 %lda, ptr {b}, i64 {quads}, ptr {acc}"
            code, out = f.op("add", f.op("mul", rows, 1000), width), f.label()
            labels = {(h, w): f.label() for h in heights for w in widths}
            cases = " ".join(f"i64 {1000 * h + w}, label %{labels[h, w]}" for h, w in labels)
            f.do(f"switch i64 {code}, label %{out} [{cases}]")
            for (h, w), label in labels.items():
                f.at(label)
                f.do(f"call void @hf_tile_{h}_{w // target.lanes}({given})")
                f.do(f"br label %{out}")
            f.at(out)

            def row(r: str) -> int:
                place = f.op("add", f.op("mul", f.op("add", i, r), columns), j)
                sums, y = f.moved(acc, f.op("mul", r, widths[0]), "i32"), f.moved("%y", f.op("mul", place, size))
                first, unit, shift = f.moved("%start", j, "i32"), f.moved("%unit", j, "float"), f.moved(bias, j, "float")
                _finish(f, sums, y, first, unit, shift, real)
                return 1

            f.loop(rows, row)
            return rows

        f.loop("%m", tile)
        return width

    f.loop(padded, panel)
    return f.done()


def _layer_text() -> str:
    """`i64 layer(ptr x, ptr y, i64 m, ptr scratch, ptr d, float scale, i32 zero)`: 0 where the range of floats has no scale.

    The scratch has two words a padded column, and behind them the bytes of floats, or signed ones turned into unsigned ones:
    turning them as they are multiplied took a seventh of a product's time.
    """
    f = FunctionText("i64 @hf_layer(ptr %x, ptr %y, i64 %m, ptr %scratch, ptr %d, float %scale, i32 %zero)")
    found = f.new("alloca [2 x float], align 4")
    rows, start, unit, scale, zero = (f.new(f"alloca {t}") for t in ("ptr", "ptr", "ptr", "float", "i32"))
    inputs, padded, source = _field(f, "inputs"), _field(f, "padded"), _field(f, "source")
    n = f.op("mul", "%m", inputs)
    behind = f.moved("%scratch", f.op("mul", padded, 8))
    f.do(f"store ptr %x, ptr {rows}")
    f.do(f"store ptr {_field(f, 'start')}, ptr {start}")
    f.do(f"store ptr {_field(f, 'factor')}, ptr {unit}")
    f.do(f"store float %scale, ptr {scale}")
    f.do(f"store i32 %zero, ptr {zero}")
    labels = {k: f.label() for k in (SIGNED, STATIC, DYNAMIC, TOLD)}
    ready, run, refused, good = (f.label() for _ in range(4))
    cases = " ".join(f"i64 {k}, label %{label}" for k, label in labels.items())
    f.do(f"switch i64 {source}, label %{run} [{cases}]")
    f.at(labels[SIGNED])
    f.do(f"call void @hf_turned(ptr %x, ptr {behind}, i64 {n})")
    f.do(f"store ptr {behind}, ptr {rows}")
    f.do(f"br label %{run}")
    f.at(labels[STATIC])
    told = f"float {_field(f, 'x_scale')}, float {_field(f, 'x_zero')}, float 0.0, float 255.0"
    f.do(f"call void @hf_quantize(ptr %x, ptr {behind}, {told}, i64 {n})")
    f.do(f"store ptr {behind}, ptr {rows}")
    f.do(f"br label %{run}")
    f.at(labels[DYNAMIC])
    ok = f.new(f"call i64 @hf_dynamic(ptr %x, ptr {behind}, ptr {found}, float 0.0, i64 {n})")
    f.branch(f.new(f"icmp eq i64 {ok}, 0"), refused, good)
    f.at(good)
    f.do(f"store ptr {behind}, ptr {rows}")
    f.do(f"store float {f.new(f'load float, ptr {found}')}, ptr {scale}")
    second = f.new(f"load float, ptr {f.moved(found, 1, 'float')}")
    f.do(f"store i32 {f.new(f'fptosi float {second} to i32')}, ptr {zero}")
    f.do(f"br label %{ready}")
    f.at(labels[TOLD])
    f.do(f"call void @hf_turned(ptr %x, ptr {behind}, i64 {n})")
    f.do(f"store ptr {behind}, ptr {rows}")
    f.do(f"store i32 {f.op('add', '%zero', 128, 'i32')}, ptr {zero}")
    f.do(f"br label %{ready}")
    f.at(ready)
    units = f.moved("%scratch", padded, "float")
    told = f"i32 {f.new(f'load i32, ptr {zero}')}, float {f.new(f'load float, ptr {scale}')}"
    f.do(f"call void @hf_told(ptr {_field(f, 'sums')}, ptr {_field(f, 'factor')}, ptr %scratch, ptr {units}, {told}, i64 {padded})")
    f.do(f"store ptr %scratch, ptr {start}")
    f.do(f"store ptr {units}, ptr {unit}")
    f.do(f"br label %{run}")
    f.at(run)
    first, last = f.new(f"load ptr, ptr {start}"), f.new(f"load ptr, ptr {unit}")
    source_rows = f.new(f"load ptr, ptr {rows}")
    columns, size, chunk = _field(f, "columns"), _result_size(f), _chunk(f, inputs)

    def some(i: str) -> str:
        x, y = f.moved(source_rows, f.op("mul", i, inputs)), f.moved("%y", f.op("mul", f.op("mul", i, columns), size))
        many = f.smaller(chunk, f.op("sub", "%m", i))
        f.do(f"call void @hf_gemm(ptr {x}, i64 {inputs}, ptr {y}, i64 {many}, ptr %d, ptr {first}, ptr {last})")
        return chunk

    f.loop("%m", some)
    f.do("ret i64 1")
    f.at(refused)
    return f.done("i64 0")


def _chunk(f: FunctionText, row: str) -> str:
    """Rows at a time: a multiple of what a tile has."""
    return f.larger(24, f.op("mul", f.op("udiv", f.op("udiv", CHUNK_BYTES, row), 24), 24))


def _copy_text() -> str:
    """`void copy(ptr from, ptr to, i64 n)` without reading or writing outside: pieces overlap at the end."""
    f = FunctionText("void @hf_copy(ptr %from, ptr %to, i64 %n)")
    for width in (64, 16, 8, 4):
        here, smaller = f.label(), f.label()
        f.branch(f.new(f"icmp uge i64 %n, {width}"), here, smaller)
        f.at(here)
        last, kind = f.op("sub", "%n", width), f"<{width} x i8>"

        def piece(i: str, kind: str = kind, width: int = width) -> int:
            value = f.new(f"load {kind}, ptr {f.moved('%from', i)}, align 1")
            f.do(f"store {kind} {value}, ptr {f.moved('%to', i)}, align 1")
            return width

        f.loop(last, piece)
        piece(last)
        f.do("ret void")
        f.at(smaller)

    def single(i: str) -> int:
        byte = f.new(f"load i8, ptr {f.moved('%from', i)}")
        f.do(f"store i8 {byte}, ptr {f.moved('%to', i)}")
        return 1

    f.loop("%n", single)
    return f.done()


def _fill_text() -> str:
    f = FunctionText("void @hf_fill(ptr %to, i8 %value, i64 %n)")

    def single(i: str) -> int:
        f.do(f"store i8 %value, ptr {f.moved('%to', i)}")
        return 1

    f.loop("%n", single)
    return f.done()


_IMAGE = "i64 %height, i64 %width, i64 %rows, i64 %columns"


def _conv_text() -> str:
    """`void conv(ptr x, ptr y, i64 pixels, ptr scratch, ptr d, i64 height, i64 width, i64 rows, i64 columns)`: of images with
    channels innermost, to so many rows and columns of pixels each."""
    f = FunctionText(f"void @hf_conv(ptr %x, ptr %y, i64 %pixels, ptr %scratch, ptr %d, {_IMAGE})")
    inputs, start, unit = _field(f, "inputs"), _field(f, "start"), _field(f, "factor")
    channels, size, out = _field(f, "channels"), _result_size(f), _field(f, "columns")
    signed = f.new(f"icmp eq i64 {_field(f, 'source')}, {SIGNED}")
    border = f.new(f"fptosi float {_field(f, 'x_zero')} to i32")
    pad = f.new(f"trunc i32 {border} to i8")
    chunk, plane = _chunk(f, inputs), f.op("mul", "%rows", "%columns")
    taps_y, taps_x = _field(f, "kernel_y"), _field(f, "kernel_x")
    dilation_x = _field(f, "dilation_x")
    run = f.op("mul", taps_x, channels)
    dense = f.new(f"icmp eq i64 {dilation_x}, 1")

    def some(first: str) -> str:
        many = f.smaller(chunk, f.op("sub", "%pixels", first))
        last = f.op("add", first, many)

        def pixel(p: str) -> int:
            image, inner = f.op("udiv", p, plane), f.op("urem", p, plane)
            oy, ox = f.op("udiv", inner, "%columns"), f.op("urem", inner, "%columns")
            top = f.op("sub", f.op("mul", oy, _field(f, "stride_y")), _field(f, "pad_y"))
            left = f.op("sub", f.op("mul", ox, _field(f, "stride_x")), _field(f, "pad_x"))
            row = f.moved("%scratch", f.op("mul", f.op("sub", p, first), inputs))
            lines = f.op("mul", image, "%height")
            last_x = f.op("add", left, f.op("sub", taps_x, 1))
            in_left, in_right = f.new(f"icmp sge i64 {left}, 0"), f.new(f"icmp slt i64 {last_x}, %width")
            whole = f.op("and", dense, f.op("and", in_left, in_right, "i1"), "i1")

            def line(ky: str) -> int:
                iy = f.op("add", top, f.op("mul", ky, _field(f, "dilation_y")))
                to = f.moved(row, f.op("mul", ky, run))
                inside = f.op("and", f.new(f"icmp sge i64 {iy}, 0"), f.new(f"icmp slt i64 {iy}, %height"), "i1")
                base = f.op("mul", f.op("add", lines, iy), "%width")

                def at_x(ix: str) -> str:
                    return f.moved("%x", f.op("mul", f.op("add", base, ix), channels))

                def tap(kx: str) -> int:
                    ix = f.op("add", left, f.op("mul", kx, dilation_x))
                    here = f.op("and", f.new(f"icmp sge i64 {ix}, 0"), f.new(f"icmp slt i64 {ix}, %width"), "i1")
                    at = f.moved(to, f.op("mul", kx, channels))
                    f.when(
                        here,
                        lambda: f.do(f"call void @hf_copy(ptr {at_x(ix)}, ptr {at}, i64 {channels})"),
                        lambda: f.do(f"call void @hf_fill(ptr {at}, i8 {pad}, i64 {channels})"),
                    )
                    return 1

                f.when(
                    inside,
                    lambda: f.when(
                        whole,
                        lambda: f.do(f"call void @hf_copy(ptr {at_x(left)}, ptr {to}, i64 {run})"),
                        lambda: f.loop(taps_x, tap),
                    ),
                    lambda: f.do(f"call void @hf_fill(ptr {to}, i8 {pad}, i64 {run})"),
                )
                return 1

            f.loop(taps_y, line)
            return 1

        f.loop(last, pixel, first)
        y = f.moved("%y", f.op("mul", f.op("mul", first, out), size))
        copied = f.op("mul", many, inputs)
        f.when(signed, lambda: f.do(f"call void @hf_turned(ptr %scratch, ptr %scratch, i64 {copied})"))
        f.do(f"call void @hf_gemm(ptr %scratch, i64 {inputs}, ptr {y}, i64 {many}, ptr %d, ptr {start}, ptr {unit})")
        return chunk

    f.loop("%pixels", some)
    return f.done()


def _taps_text(dot: ByteDot) -> str:
    """`void taps(ptr x, ptr w, ptr acc, i32 flip, i32 zero, i64 y0, i64 y1, i64 x0, i64 x1, i64 line, i64 step, i64 row, i64 n)`:
    sums of one window for `n` channels, of the taps from one to another in both directions."""
    f = FunctionText(
        "void @hf_taps(ptr %x, ptr %w, ptr %acc, i32 %flip, i32 %zero, i64 %y0, i64 %y1, i64 %x0, i64 %x1, i64 %line, i64 %step, "
        "i64 %row, i64 %n)"
    )

    def window(first: str, vectors: int, width: int) -> int:
        kind = "i32" if width == 1 else f"<{width} x i32>"
        outer, lines, inner, taps, line_end, end = (f.label() for _ in range(6))
        ky, kx = f"%y.{outer}", f"%x.{outer}"
        sums, totals = ([f"%{name}{v}.{outer}" for v in range(vectors)] for name in ("s", "t"))
        flip, zero = ("%flip", "%zero") if width == 1 else (dot.splat(f, "i32", width, v) for v in ("%flip", "%zero"))
        f.do(f"br label %{outer}.before")
        f.at(f"{outer}.before")
        f.do(f"br label %{outer}")
        f.at(outer)
        f.do(f"{ky} = phi i64 [%y0, %{outer}.before], [{ky}.next, %{line_end}]")
        for s, t in zip(sums, totals, strict=True):
            f.do(f"{s} = phi {kind} [{'0' if width == 1 else 'zeroinitializer'}, %{outer}.before], [{t}, %{line_end}]")
        f.branch(f.new(f"icmp slt i64 {ky}, %y1"), lines, end)
        f.at(lines)
        source = f.moved(f.moved("%x", f.op("mul", ky, "%line")), first)
        weights = f.moved("%w", f.op("add", f.op("mul", ky, "%row"), first), "i32")
        f.do(f"br label %{inner}")
        f.at(inner)
        f.do(f"{kx} = phi i64 [%x0, %{lines}], [{kx}.next, %{taps}]")
        for s, t in zip(sums, totals, strict=True):
            f.do(f"{t} = phi {kind} [{s}, %{lines}], [{t}.next, %{taps}]")
        f.branch(f.new(f"icmp slt i64 {kx}, %x1"), taps, line_end)
        f.at(taps)
        x, w = f.moved(source, f.op("mul", kx, "%step")), f.moved(weights, f.op("mul", kx, "%n"), "i32")
        for v, t in enumerate(totals):
            bytes_at, words_at = f.moved(x, v * width), f.moved(w, v * width, "i32")
            byte = f.new(f"load {'i8' if width == 1 else f'<{width} x i8>'}, ptr {bytes_at}, align 1")
            wide = f.new(f"zext {'i8' if width == 1 else f'<{width} x i8>'} {byte} to {kind}")
            real = f.op("sub", f.op("xor", wide, flip, kind), zero, kind)
            word = f.new(f"load {kind}, ptr {words_at}, align 4")
            product = dot.of_words(f, real, word) if width > 1 else f.op("mul", real, _signed_word(f, word), kind)
            f.do(f"{t}.next = add {kind} {t}, {product}")
        f.do(f"{kx}.next = add i64 {kx}, 1")
        f.do(f"br label %{inner}")
        f.at(line_end)
        f.do(f"{ky}.next = add i64 {ky}, 1")
        f.do(f"br label %{outer}")
        f.at(end)
        for v, s in enumerate(sums):
            f.do(f"store {kind} {s}, ptr {f.moved('%acc', f.op('add', first, v * width), 'i32')}, align 4")
        return vectors * width

    start: str | int = 0
    for vectors, width in ((4, dot.lanes), (1, dot.lanes), (1, 1)):
        until = f.op("and", "%n", -vectors * width)
        f.loop(until, lambda c, vectors=vectors, width=width: window(c, vectors, width), start)
        start = until
    return f.done()


def _signed_word(f: FunctionText, word: str) -> str:
    return f.op("ashr", f.op("shl", word, 16, "i32"), 16, "i32")


def _depthwise_text() -> str:
    """`void depthwise(ptr x, ptr y, i64 pixels, ptr scratch, ptr d, …)`: weights are taps by channels, as `in_words`."""
    f = FunctionText(f"void @hf_depthwise(ptr %x, ptr %y, i64 %pixels, ptr %scratch, ptr %d, {_IMAGE})")
    channels, size, weights = _field(f, "channels"), _result_size(f), _field(f, "weights")
    signed = f.new(f"icmp eq i64 {_field(f, 'source')}, {SIGNED}")
    flip = f.new(f"select i1 {signed}, i32 128, i32 0")
    border = f.new(f"fptosi float {_field(f, 'x_zero')} to i32")
    plane, taps_y, taps_x = f.op("mul", "%rows", "%columns"), _field(f, "kernel_y"), _field(f, "kernel_x")
    dilation_y, dilation_x = _field(f, "dilation_y"), _field(f, "dilation_x")
    line, step = f.op("mul", f.op("mul", "%width", channels), dilation_y), f.op("mul", channels, dilation_x)
    row = f.op("mul", taps_x, channels)
    zero = f.op("xor", f.op("and", border, 255, "i32"), flip, "i32")
    start, unit, bias = _field(f, "start"), _field(f, "factor"), _field(f, "bias")

    def inside(first: str, size: str, dilation: str, taps: str) -> tuple[str, str]:
        """The first tap that lies in the image, and the one behind the last."""
        less = f.op("sub", dilation, 1)
        before = f.op("sdiv", f.op("add", f.larger(f.op("sub", 0, first), 0), less), dilation)
        behind = f.op("sdiv", f.op("add", f.larger(f.op("sub", size, first), 0), less), dilation)
        return before, f.smaller(taps, behind)

    def pixel(p: str) -> int:
        image, inner = f.op("udiv", p, plane), f.op("urem", p, plane)
        oy, ox = f.op("udiv", inner, "%columns"), f.op("urem", inner, "%columns")
        top = f.op("sub", f.op("mul", oy, _field(f, "stride_y")), _field(f, "pad_y"))
        left = f.op("sub", f.op("mul", ox, _field(f, "stride_x")), _field(f, "pad_x"))
        lines = f.op("mul", image, "%height")
        (y0, y1), (x0, x1) = inside(top, "%height", dilation_y, taps_y), inside(left, "%width", dilation_x, taps_x)
        at = f.moved("%x", f.op("mul", f.op("add", f.op("mul", f.op("add", lines, top), "%width"), left), channels))
        taps = f"i64 {y0}, i64 {y1}, i64 {x0}, i64 {x1}, i64 {line}, i64 {step}, i64 {row}, i64 {channels}"
        f.do(f"call void @hf_taps(ptr {at}, ptr {weights}, ptr %scratch, i32 {flip}, i32 {zero}, {taps})")
        y = f.moved("%y", f.op("mul", f.op("mul", p, channels), size))
        _finish(f, "%scratch", y, start, unit, bias, channels)
        return 1

    f.loop("%pixels", pixel)
    return f.done()


def text(target: CpuTarget) -> str:
    """The functions; those that go through one row are written by `byte_kernels`."""
    dot = ByteDot(target)
    heights = (6, 2, 1) if target.name == "avx512" else (4, 2, 1)
    widths = panels(target)
    tiles = [_tile_text(dot, h, w // target.lanes, widths[0]) for h in heights for w in widths]
    return "\n".join((
        *dot.declared, "declare i64 @llvm.smin.i64(i64, i64)", "declare i64 @llvm.smax.i64(i64, i64)", *tiles,
        _gemm_text(target, heights), _layer_text(), _copy_text(), _fill_text(), _conv_text(), _taps_text(dot), _depthwise_text(),
    ))  # fmt: skip
