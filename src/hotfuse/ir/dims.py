"""Symbolic dimensions: integers, or expressions over named integer symbols.

    dim  ::= int | Sym
    Sym  ::= name | (op dim ...)        op: + * // % ** max min ceildiv
    pred ::= (cmp dim dim) | (and pred ...) | (or pred ...) | (not pred)      cmp: == != < <=

The same class serves dims and guard predicates. Division rounds to minus infinity, as in Python.
Expressions are data: they are parsed by our own reader and evaluated by a table, never by `eval`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hotfuse.base.errors import ModelError


@dataclass(frozen=True, slots=True)
class Sym:
    """An expression; a leaf is `Sym("sym", (name,))`."""

    op: str
    args: tuple[Dim | str, ...]

    def __str__(self) -> str:
        return show(self)


Dim = int | Sym

_EVAL: dict[str, Callable[..., int]] = {
    "+": lambda *a: sum(a),
    "*": lambda *a: math.prod(a),
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
    "ceildiv": lambda a, b: -(-a // b),
    "max": max,
    "min": min,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    "and": lambda *a: int(all(a)),
    "or": lambda *a: int(any(a)),
    "not": lambda a: int(not a),
}
_ARITY = {"//": 2, "%": 2, "**": 2, "ceildiv": 2, "==": 2, "!=": 2, "<": 2, "<=": 2, "not": 1}
_PREFIX = {"max", "min", "ceildiv", "and", "or", "not"}


def sym(name: str) -> Sym:
    """A named symbol."""
    return Sym("sym", (name,))


def expr(op: str, *args: Dim) -> Dim:
    """An expression, folded when every operand is a number; `+` and `*` keep their operands sorted."""
    if op not in _EVAL or _ARITY.get(op, len(args)) != len(args):
        raise ModelError(f"malformed dimension expression {op!r} of {len(args)} operands")
    if op in ("+", "*"):
        unit = 0 if op == "+" else 1
        flat: list[Dim] = []
        for a in args:
            flat.extend(_dims(a) if isinstance(a, Sym) and a.op == op else (a,))
        number = _EVAL[op](*[a for a in flat if isinstance(a, int)], unit)
        if op == "*" and number == 0:
            return 0
        rest = sorted((a for a in flat if isinstance(a, Sym)), key=str)
        if number != unit:
            rest.append(number)  # type: ignore[arg-type]
        if not rest:
            return number
        return rest[0] if len(rest) == 1 else Sym(op, tuple(rest))
    if all(isinstance(a, int) for a in args) and not (op in ("//", "%", "ceildiv") and args[1] == 0):
        return _EVAL[op](*args)
    return Sym(op, args)


def _dims(e: Sym) -> Iterator[Dim]:
    for a in e.args:
        if not isinstance(a, str):
            yield a


def symbols(d: Dim) -> frozenset[str]:
    """The names an expression mentions."""
    if isinstance(d, int):
        return frozenset()
    if d.op == "sym":
        return frozenset({str(d.args[0])})
    return frozenset[str]().union(*(symbols(a) for a in _dims(d)))


def evaluate(d: Dim, env: Mapping[str, int]) -> int:
    """The value under a binding of every symbol; predicates give 0 or 1."""
    if isinstance(d, int):
        return d
    if d.op == "sym":
        return env[str(d.args[0])]
    return int(_EVAL[d.op](*(evaluate(a, env) for a in _dims(d))))


def rename(d: Dim, names: Mapping[str, str]) -> Dim:
    """The same expression with other symbol names."""
    if isinstance(d, int):
        return d
    if d.op == "sym":
        name = str(d.args[0])
        return sym(names.get(name, name))
    return expr(d.op, *(rename(a, names) for a in _dims(d)))


def show(d: Dim) -> str:
    """Text that `parse` reads back to an equal expression."""
    if isinstance(d, int):
        return str(d)
    if d.op == "sym":
        return str(d.args[0])
    parts = [show(a) for a in _dims(d)]
    if d.op in _PREFIX:
        return f"{d.op}({', '.join(parts)})"
    return "(" + f" {d.op} ".join(parts) + ")"


_TOKEN = re.compile(r"\s*(-?\d+|[A-Za-z_][A-Za-z0-9_.]*|\*\*|//|==|!=|<=|[-+*%<(),])")


class _Reader:
    """A reader for the fully parenthesized form that `show` writes."""

    def __init__(self, text: str) -> None:
        self.text, self.pos = text, 0

    def peek(self) -> str:
        m = _TOKEN.match(self.text, self.pos)
        return m.group(1) if m else ""

    def take(self, want: str = "") -> str:
        m = _TOKEN.match(self.text, self.pos)
        if not m or (want and m.group(1) != want):
            raise ModelError(f"malformed dimension {self.text!r}", where=f"column {self.pos + 1}")
        self.pos = m.end()
        return m.group(1)

    def dim(self, depth: int = 0) -> Dim:
        if depth > 100:
            raise ModelError("dimension expression nested too deeply")
        token = self.take()
        if re.fullmatch(r"-?\d+", token):
            return int(token)
        if token == "(":
            parts, op = [self.dim(depth + 1)], ""
            while self.peek() != ")":
                token = self.take()
                if op and token != op:
                    raise ModelError(f"mixed operators in {self.text!r}", where=f"column {self.pos}")
                op = token
                parts.append(self.dim(depth + 1))
            self.take(")")
            return expr(op, *parts) if op else parts[0]
        if token in _PREFIX and self.peek() == "(":
            self.take("(")
            parts = [self.dim(depth + 1)]
            while self.peek() == ",":
                self.take(",")
                parts.append(self.dim(depth + 1))
            self.take(")")
            return expr(token, *parts)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", token):
            raise ModelError(f"malformed dimension {self.text!r}", where=f"column {self.pos}")
        return sym(token)


def parse(text: str) -> Dim:
    """Read one dimension or predicate."""
    reader = _Reader(text)
    d = reader.dim()
    if reader.text[reader.pos:].strip():
        raise ModelError(f"malformed dimension {text!r}", where=f"column {reader.pos + 1}")
    return d
