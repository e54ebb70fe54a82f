"""Small native functions, written down step by step: loops, conditions, memory at addresses.

Everything is a 64-bit word or a double; an address is a word. Variables are memory of the function's own. For loops over a few
hundred things that array functions are too slow for (`hpm.compiled.columns` is for formulas over whole columns).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm.compiled import columns as native

WORD, REAL = "i64", "double"
Number = str | int | float
"""What the code calls it, or a plain number."""


def _literal(number: Number) -> str:
    return repr(float(number)) if isinstance(number, float) else str(number)


class FunctionWriter:
    """The body of one function of so many words."""

    def __init__(self, words: int) -> None:
        self._lines: list[str] = []
        self._variables: list[str] = []
        self._count = 0
        self.args = [f"%a{i}" for i in range(words)]

    def text(self, name: str) -> str:
        """A module with the function, once its body is written."""
        args = ", ".join(f"{WORD} {a}" for a in self.args)
        begin = ["declare double @llvm.ceil.f64(double)", f"define void @{name}({args}) {{"]
        return "\n".join([*begin, *self._variables, *self._lines, "  ret void", "}"]) + "\n"

    def _new(self, stem: str) -> str:
        self._count += 1
        return f"%{stem}{self._count}"

    def line(self, text: str) -> str:
        """The name of what a line computes."""
        name = self._new("v")
        self._lines.append(f"  {name} = {text}")
        return name

    # --- memory ------------------------------------------------------------------------------------------------------------

    def _at(self, address: Number, place: Number) -> str:
        where = self.plus(address, self.times(place, 8)) if place != 0 else _literal(address)
        return self.line(f"inttoptr {WORD} {where} to ptr")

    def load(self, address: Number, place: Number = 0, kind: str = WORD) -> str:
        """What lies so many words behind an address."""
        return self.line(f"load {kind}, ptr {self._at(address, place)}")

    def store(self, value: Number, address: Number, place: Number = 0, kind: str = WORD) -> None:
        """Put it there."""
        self._lines.append(f"  store {kind} {_literal(value)}, ptr {self._at(address, place)}")

    def variable(self, first: Number, kind: str = WORD) -> Variable:
        """A number that changes."""
        where = self._new("m")
        self._variables.append(f"  {where} = alloca {kind}")
        made = Variable(self, where, kind)
        made.put(first)
        return made

    def keep(self, value: Number, where: str, kind: str) -> None:
        """Into a variable."""
        self._lines.append(f"  store {kind} {_literal(value)}, ptr {where}")

    # --- arithmetic --------------------------------------------------------------------------------------------------------

    def plus(self, one: Number, other: Number) -> str:
        """The sum of words."""
        return self.line(f"add {WORD} {_literal(one)}, {_literal(other)}")

    def times(self, one: Number, other: Number) -> str:
        """The product of words."""
        return self.line(f"mul {WORD} {_literal(one)}, {_literal(other)}")

    def holds(self, one: Number, relation: str, other: Number) -> str:
        """A comparison of words: eq, ne, slt, sge."""
        return self.line(f"icmp {relation} {WORD} {_literal(one)}, {_literal(other)}")

    def compares(self, one: Number, relation: str, other: Number) -> str:
        """A comparison of doubles: oeq, ogt, olt, ole."""
        return self.line(f"fcmp {relation} {REAL} {_literal(one)}, {_literal(other)}")

    def real(self, operation: str, one: Number, other: Number) -> str:
        """fadd, fmul, fdiv of doubles."""
        return self.line(f"{operation} {REAL} {_literal(one)}, {_literal(other)}")

    def either(self, condition: str, one: Number, other: Number, kind: str = WORD) -> str:
        """One where something holds, else the other."""
        return self.line(f"select i1 {condition}, {kind} {_literal(one)}, {kind} {_literal(other)}")

    def larger(self, one: Number, other: Number) -> str:
        """The larger of two doubles."""
        return self.either(self.compares(one, "ogt", other), one, other, REAL)

    def ceil(self, number: str) -> str:
        """A double rounded up."""
        return self.line(f"call double @llvm.ceil.f64(double {number})")

    def both(self, one: str, other: str) -> str:
        """Whether both hold."""
        return self.line(f"and i1 {one}, {other}")

    def one_of(self, one: str, other: str) -> str:
        """Whether one holds."""
        return self.line(f"or i1 {one}, {other}")

    # --- structure ---------------------------------------------------------------------------------------------------------

    def _label(self, name: str) -> None:
        self._lines.append(f"{name[1:]}:")

    @contextmanager
    def when(self, condition: str) -> Generator[None]:
        """What is only done where something holds."""
        body, after = self._new("then"), self._new("after")
        self._lines.append(f"  br i1 {condition}, label {body}, label {after}")
        self._label(body)
        yield
        self._lines.append(f"  br label {after}")
        self._label(after)

    @contextmanager
    def loop_while(self, condition: Callable[[], str]) -> Generator[None]:
        """What is done again as long as something holds, asked before each turn."""
        head, body, after = self._new("head"), self._new("turn"), self._new("done")
        self._lines.append(f"  br label {head}")
        self._label(head)
        self._lines.append(f"  br i1 {condition()}, label {body}, label {after}")
        self._label(body)
        yield
        self._lines.append(f"  br label {head}")
        self._label(after)

    @contextmanager
    def each(self, stop: Number) -> Generator[str]:
        """Numbers from 0 on."""
        at = self.variable(0)
        with self.loop_while(lambda: self.holds(at.value, "slt", stop)):
            now = at.value
            yield now
            at.put(self.plus(now, 1))


@dataclass(frozen=True, slots=True)
class Variable:
    """A number that changes."""

    writer: FunctionWriter
    where: str
    kind: str

    @property
    def value(self) -> str:
        """What it is now."""
        return self.writer.line(f"load {self.kind}, ptr {self.where}")

    def put(self, new: Number) -> None:
        """What it is from now on."""
        self.writer.keep(new, self.where, self.kind)


def compiled(name: str, kinds: Sequence[native.ArgumentKind], body: Callable[[FunctionWriter], None]) -> native.NativeFunction:
    """The function that `body` writes down, of arrays (their addresses) and numbers; called with the interpreter lock held."""
    writer = FunctionWriter(len(kinds))
    body(writer)
    return native.function(writer.text(name), name, kinds, holding=True, pointer=WORD)
