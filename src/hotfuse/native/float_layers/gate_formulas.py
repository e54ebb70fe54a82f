"""The sigmoid and the hyperbolic tangent of a vector, as text: what the gates of a recurrent layer take.

Both are made of one exponential: `2**n * p(r)` with a polynomial of degree six (Cephes), whose largest error is one unit in the
last place. Near zero the tangent is a polynomial of its own, since the difference there would lose the digits. What is no number
stays so.
"""

from __future__ import annotations

import struct

from hotfuse.native.byte_text import FunctionText

_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_LOWEST, _HIGHEST = -87.0, 89.0
"""Arguments of the exponential: below, results stay at 1.6e-38; at the upper end they are infinite."""
_ROUNDER = 12582912.0
"""1.5 * 2**23: behind the addition the last bits of a float are the nearest integer."""
_POLYNOMIAL_BELOW = 0.625
"""Below it, the tangent's own polynomial."""


def number(value: float) -> str:
    """A float32 as LLVM wants it: the bits of the double that equals it."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return "0x" + struct.pack(">d", rounded).hex().upper()


class VectorMath:
    """Writes arithmetic on vectors of floats into a function."""

    def __init__(self, f: FunctionText, lanes: int) -> None:
        self.f, self.lanes = f, lanes
        self.type, self.ints = f"<{lanes} x float>", f"<{lanes} x i32>"

    def all(self, value: float) -> str:
        """A number in every place."""
        return f"<{', '.join([f'float {number(value)}'] * self.lanes)}>"

    def op(self, name: str, a: str, b: str) -> str:
        """An instruction on two vectors."""
        return self.f.new(f"{name} {self.type} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        """`a * b + c`, rounded once."""
        kind = self.type
        return self.f.new(f"call {kind} @llvm.fma.v{self.lanes}f32({kind} {a}, {kind} {b}, {kind} {c})")

    def _where(self, comparison: str, a: str, b: str, yes: str, no: str) -> str:
        mask = self.f.new(f"fcmp {comparison} {self.type} {a}, {b}")
        return self.f.new(f"select <{self.lanes} x i1> {mask}, {self.type} {yes}, {self.type} {no}")

    def _polynomial(self, numbers: tuple[float, ...], x: str) -> str:
        made = self.all(numbers[0])
        for n in numbers[1:]:
            made = self.fma(made, x, self.all(n))
        return made

    def exp(self, x: str) -> str:
        """e to the power of it."""
        low, high = self.all(_LOWEST), self.all(_HIGHEST)
        x = self._where("olt", x, low, low, x)
        x = self._where("ogt", x, high, high, x)
        rounded = self.fma(x, self.all(_LOG2E), self.all(_ROUNDER))
        n = self.op("fsub", rounded, self.all(_ROUNDER))
        r = self.fma(n, self.all(-_LN2_HIGH), x)
        r = self.fma(n, self.all(-_LN2_LOW), r)
        rest = self.fma(self._polynomial(_EXP, r), self.op("fmul", r, r), self.op("fadd", r, self.all(1.0)))
        bits = self.f.new(f"bitcast {self.type} {rounded} to {self.ints}")
        places = ", ".join(["i32 127"] * self.lanes)
        up = self.f.new(f"add {self.ints} {bits}, <{places}>")
        shifted = self.f.new(f"shl {self.ints} {up}, <{', '.join(['i32 23'] * self.lanes)}>")
        return self.op("fmul", rest, self.f.new(f"bitcast {self.ints} {shifted} to {self.type}"))

    def sigmoid(self, x: str) -> str:
        """`1 / (1 + exp(-x))`"""
        e = self.exp(self.f.new(f"fneg {self.type} {x}"))
        return self.op("fdiv", self.all(1.0), self.op("fadd", e, self.all(1.0)))

    def tanh(self, x: str) -> str:
        """The hyperbolic tangent."""
        size = self.f.new(f"call {self.type} @llvm.fabs.v{self.lanes}f32({self.type} {x})")
        e = self.exp(self.op("fmul", size, self.all(-2.0)))
        far = self.op("fdiv", self.op("fsub", self.all(1.0), e), self.op("fadd", e, self.all(1.0)))
        signed = self.f.new(f"call {self.type} @llvm.copysign.v{self.lanes}f32({self.type} {far}, {self.type} {x})")
        z = self.op("fmul", x, x)
        near = self.fma(self.op("fmul", self._polynomial(_TANH, z), z), x, x)
        return self._where("olt", size, self.all(_POLYNOMIAL_BELOW), near, signed)

    def declared(self) -> str:
        """What a module with such text has to declare."""
        kind, name = self.type, f"v{self.lanes}f32"
        return "\n".join((
            f"declare {kind} @llvm.fma.{name}({kind}, {kind}, {kind})", f"declare {kind} @llvm.fabs.{name}({kind})",
            f"declare {kind} @llvm.copysign.{name}({kind}, {kind})",
        ))  # fmt: skip
