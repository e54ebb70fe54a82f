"""Formulas over chunks of fp32 or fp64 numbers, written as one would on paper: `r.mul(x, r.poly(x, coefficients))`."""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.backends.llvm.emission.arith import Chunk
from hotfuse.ir.types import DType

MAGIC = 12582912.0
"""1.5 * 2^23: added to a small number, it leaves the number's nearest integer in the low bits."""
MAGIC64 = 6755399441055744.0
"""The same of fp64: 1.5 * 2^52."""


class FloatFormulas:
    """Reading aids for formulas over fp32 or fp64 chunks."""

    def __init__(self, c: Chunk) -> None:
        self.c, self.fn, self.width = c, c.fn, c.width
        self.whole = Chunk(c.fn, DType.I64 if c.dtype is DType.F64 else DType.I32, c.width)

    def const(self, x: float) -> str:
        """A literal."""
        return self.c.const(x)

    def _of(self, x: str | float) -> str:
        return x if isinstance(x, str) else self.const(x)

    def add(self, a: str | float, b: str | float) -> str:
        """a + b."""
        return self.c.op("fadd", self._of(a), self._of(b))

    def sub(self, a: str | float, b: str | float) -> str:
        """a - b."""
        return self.c.op("fsub", self._of(a), self._of(b))

    def mul(self, a: str | float, b: str | float) -> str:
        """a b."""
        return self.c.op("fmul", self._of(a), self._of(b))

    def div(self, a: str | float, b: str | float) -> str:
        """a / b."""
        return self.c.op("fdiv", self._of(a), self._of(b))

    def fma(self, a: str | float, b: str | float, c: str | float) -> str:
        """a b + c."""
        return self.c.fma(self._of(a), self._of(b), self._of(c))

    def neg(self, a: str) -> str:
        """-a."""
        return self.fn.val(f"fneg {self.c.ty} {a}")

    def abs(self, a: str) -> str:
        """|a|."""
        return self.c.call("fabs", a)

    def signed_as(self, a: str, sign: str) -> str:
        """|a| with another's sign."""
        return self.c.call("copysign", a, sign)

    def test(self, how: str, a: str, b: str | float) -> str:
        """A comparison."""
        return self.c.op(f"fcmp {how}", a, self._of(b))

    def pick(self, cond: str, a: str | float, b: str | float) -> str:
        """A select."""
        return self.c.pick(cond, self._of(a), self._of(b))

    def at_most(self, a: str, limit: float) -> str:
        """Limited from above; NaN stays."""
        return self.pick(self.test("ogt", a, limit), limit, a)

    def at_least(self, a: str, limit: float) -> str:
        """Limited from below; NaN stays."""
        return self.pick(self.test("olt", a, limit), limit, a)

    def poly(self, x: str, coefficients: Sequence[float]) -> str:
        """Horner's rule; the constant comes first in the table."""
        acc: str | float = coefficients[-1]
        for c in reversed(coefficients[:-1]):
            acc = self.fma(acc, x, c)
        return self._of(acc)

    def bits(self, a: str) -> str:
        """The bits as an integer."""
        return self.fn.val(f"bitcast {self.c.ty} {a} to {self.whole.ty}")

    def float(self, a: str) -> str:
        """Bits as a float."""
        return self.fn.val(f"bitcast {self.whole.ty} {a} to {self.c.ty}")

    def int(self, name: str, a: str, b: str | int) -> str:
        """Integer arithmetic on bits."""
        return self.whole.op(name, a, self.whole.const(b) if isinstance(b, int) else b)

    def from_int(self, a: str) -> str:
        """An integer's value as a float."""
        return self.fn.val(f"sitofp {self.whole.ty} {a} to {self.c.ty}")

    def rounded(self, scaled: str) -> tuple[str, str]:
        """What adding the magic number left: the nearest integer as a float, and as an integer."""
        magic = MAGIC64 if self.c.dtype is DType.F64 else MAGIC
        return self.sub(scaled, magic), self.int("sub", self.bits(scaled), self.bits(self.const(magic)))

    def two_to(self, n: str) -> str:
        """2^n for integers in the range of normal numbers."""
        bias, shift = (1023, 52) if self.c.dtype is DType.F64 else (127, 23)
        return self.float(self.int("shl", self.int("add", n, bias), shift))
