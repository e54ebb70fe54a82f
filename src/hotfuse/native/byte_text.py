"""Text of functions with loops and branches, and of sums of products of bytes, as `byte_products` writes them."""

from __future__ import annotations

from collections.abc import Callable

from hotfuse.native.target import CpuTarget


class FunctionText:
    """Text of a function, line by line."""

    def __init__(self, head: str) -> None:
        self.lines, self._count = [f"define {head} {{", "entry:"], 0

    def new(self, right: str) -> str:
        """A value that nobody had before."""
        self._count += 1
        name = f"%v{self._count}"
        self.lines.append(f"  {name} = {right}")
        return name

    def do(self, line: str) -> None:
        """A line without a value."""
        self.lines.append(f"  {line}")

    def label(self) -> str:
        """A name for a block."""
        self._count += 1
        return f"l{self._count}"

    def at(self, label: str) -> None:
        """Here a block begins."""
        self.lines.append(f"{label}:")

    def branch(self, mask: str, yes: str, no: str) -> None:
        """Two ways on."""
        self.do(f"br i1 {mask}, label %{yes}, label %{no}")

    def op(self, name: str, a: str | int, b: str | int, type: str = "i64") -> str:
        """An instruction on two values of one type."""
        return self.new(f"{name} {type} {a}, {b}")

    def moved(self, base: str, by: str | int, element: str = "i8") -> str:
        """An address so many elements further."""
        return self.new(f"getelementptr {element}, ptr {base}, i64 {by}")

    def smaller(self, a: str | int, b: str | int) -> str:
        """The smaller one of two signed numbers."""
        return self.new(f"call i64 @llvm.smin.i64(i64 {a}, i64 {b})")

    def larger(self, a: str | int, b: str | int) -> str:
        """The larger one."""
        return self.new(f"call i64 @llvm.smax.i64(i64 {a}, i64 {b})")

    def loop(self, until: str, body: Callable[[str], str | int], start: str | int = 0) -> None:
        """`body` is given the count and says by how much it grows."""
        before, head, inside, after, end = (self.label() for _ in range(5))
        now, following = f"%i{self._count}", f"%i{self._count}.next"
        self.do(f"br label %{before}")
        self.at(before)
        self.do(f"br label %{head}")
        self.at(head)
        self.do(f"{now} = phi i64 [{start}, %{before}], [{following}, %{after}]")
        self.branch(self.new(f"icmp slt i64 {now}, {until}"), inside, end)
        self.at(inside)
        step = body(now)
        self.do(f"br label %{after}")
        self.at(after)
        self.do(f"{following} = add i64 {now}, {step}")
        self.do(f"br label %{head}")
        self.at(end)

    def when(self, mask: str, yes: Callable[[], None], no: Callable[[], None] | None = None) -> None:
        """One of two blocks, and on behind them."""
        first, second, end = self.label(), self.label(), self.label()
        self.branch(mask, first, second if no is not None else end)
        self.at(first)
        yes()
        self.do(f"br label %{end}")
        if no is not None:
            self.at(second)
            no()
            self.do(f"br label %{end}")
        self.at(end)

    def done(self, result: str = "void") -> str:
        """The whole text, with what it returns."""
        self.do(f"ret {result}")
        return "\n".join((*self.lines, "}", ""))


class ByteDot:
    """Sums of four products of bytes to a 32-bit lane, as a target has them."""

    def __init__(self, target: CpuTarget) -> None:
        self.lanes, self.fast = target.lanes, target.dots_bytes
        self.type, self.raw, self.half = f"<{self.lanes} x i32>", f"<{4 * self.lanes} x i8>", f"<{2 * self.lanes} x i16>"
        self.pairs = "llvm.x86.avx512.pmaddw.d.512" if target.name == "avx512" else "llvm.x86.avx2.pmadd.wd"
        self.declared = [f"declare {self.type} @{self.pairs}({self.half}, {self.half})"]
        if self.fast:
            self.name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
            self.declared.append(f"declare {self.type} @{self.name}({self.type}, {self.raw}, {self.raw})")

    def splat(self, f: FunctionText, type: str, count: int, value: str) -> str:
        """A number in every place of a vector."""
        one = f.new(f"insertelement <{count} x {type}> poison, {type} {value}, i64 0")
        return f.new(f"shufflevector <{count} x {type}> {one}, <{count} x {type}> poison, <{count} x i32> zeroinitializer")

    def unsigned(self, f: FunctionText, x: str) -> tuple[str, ...]:
        """Lanes of unsigned bytes, as `add` wants them."""
        if self.fast:
            return (f.new(f"bitcast {self.type} {x} to {self.raw}"),)
        mask = self.splat(f, "i32", self.lanes, "16711935")
        low = f.new(f"and {self.type} {x}, {mask}")
        moved = f.new(f"lshr {self.type} {x}, {self.splat(f, 'i32', self.lanes, '8')}")
        high = f.new(f"and {self.type} {moved}, {mask}")
        return tuple(f.new(f"bitcast {self.type} {v} to {self.half}") for v in (low, high))

    def signed(self, f: FunctionText, x: str) -> tuple[str, ...]:
        """Lanes of signed bytes, the same."""
        if self.fast:
            return (f.new(f"bitcast {self.type} {x} to {self.raw}"),)
        pairs = f.new(f"bitcast {self.type} {x} to {self.half}")
        eight = self.splat(f, "i16", 2 * self.lanes, "8")
        up = f.new(f"shl {self.half} {pairs}, {eight}")
        return tuple(f.new(f"ashr {self.half} {v}, {eight}") for v in (up, pairs))

    def of_words(self, f: FunctionText, x: str, w: str) -> str:
        """Products of lanes that 16 bits hold; the upper halves of `w` are zero."""
        a, b = (f.new(f"bitcast {self.type} {v} to {self.half}") for v in (x, w))
        return f.new(f"call {self.type} @{self.pairs}({self.half} {a}, {self.half} {b})")

    def add(self, f: FunctionText, total: str, x: tuple[str, ...], w: tuple[str, ...]) -> str:
        """Sums with four products more in each lane."""
        if self.fast:
            return f.new(f"call {self.type} @{self.name}({self.type} {total}, {self.raw} {x[0]}, {self.raw} {w[0]})")
        for a, b in zip(x, w, strict=True):
            more = f.new(f"call {self.type} @{self.pairs}({self.half} {a}, {self.half} {b})")
            total = f.new(f"add {self.type} {total}, {more}")
        return total
