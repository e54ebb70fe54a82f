# pyright: reportPrivateUsage=false
# Functions of this file are what an expression can do.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import field
from typing import Any

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Sym:
    """An expression; a leaf is `Sym("sym", (name,))`.

    Sums and products are sorted by the text of their operands, code is placed by the names that expressions mention, and found
    again by the expressions: each is asked for again and again, and kept once somebody has asked.
    """

    op: str
    args: tuple[Dim | str, ...]
    _text: str | None = field(default=None, init=False, repr=False, compare=False)
    _symbols: frozenset[str] | None = field(default=None, init=False, repr=False, compare=False)
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return show(self)

    def __hash__(self) -> int:
        found = self._hash
        if found is None:
            found = hash((self.op, self.args))
            object.__setattr__(self, "_hash", found)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what is kept: hashes of names differ from process to process."""
        return Sym, (self.op, self.args)


Dim = int | Sym
_NONE: frozenset[str] = frozenset()

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
"""A name that stands in text without quotes."""
STRING = r'"(?:[^"\\\n]|\\.)*"?'
"""A quoted string, on one line; one that does not end is a token too, so that no text is scanned again and again."""
MAX_DEPTH = 64
"""How deep anything may nest in text: far more than any model needs, far less than Python's stack holds."""

_ODD = re.compile("[\"\\\\\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_COMPLETE = re.compile(STRING.removesuffix("?"), re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_SHORT = {c: "\\" + letter for letter, c in _LETTERS.items() if letter != "/"}


def quote(text: str) -> str:
    """A JSON string that shows every character on one line; lone surrogates survive."""
    return '"' + _ODD.sub(lambda m: _SHORT.get(m.group(), f"\\u{ord(m.group()):04x}"), text) + '"'


def unquote(text: str) -> str:
    """The string that `quote` wrote; raises ValueError on an unknown escape, or when it does not end."""
    if not _COMPLETE.fullmatch(text):
        raise ValueError("a quoted string expected")
    body = text[1:-1]
    return _ESCAPE.sub(_unescape, body) if "\\" in body else body


def _unescape(m: re.Match[str]) -> str:
    if m.group(1) is not None:
        return chr(int(m.group(1), 16))
    if m.group(2) not in _LETTERS:
        raise ValueError(f"unknown escape \\{m.group(2)}")
    return _LETTERS[m.group(2)]


def _power(a: int, b: int) -> int:
    """Bounded, because expressions come from files: a dimension never needs more than 4096 bits."""
    if b < 0 or a.bit_length() * b > 4096:
        raise ModelError(f"dimension {a} ** {b} is not a size")
    return a**b


_EVAL: dict[str, Callable[..., int]] = {
    "+": lambda *a: sum(a),
    "*": lambda *a: math.prod(a),
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": _power,
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


def well_formed(op: str, operands: int) -> bool:
    """Whether there is such an operator, and it takes so many operands."""
    return op in _EVAL and operands >= 1 and _ARITY.get(op, operands) == operands


def sym(name: str) -> Sym:
    """A named symbol."""
    return Sym("sym", (name,))


def expr(op: str, *args: Dim) -> Dim:
    """An expression, folded when every operand is a number; `+` and `*` keep their operands sorted."""
    if op in ("+", "*"):
        if not args:
            raise ModelError(f"malformed dimension expression {op!r} of no operands")
        summed = op == "+"
        unit = number = 0 if summed else 1
        rest: list[Sym | int] = []
        for a in args:
            for part in a.args if isinstance(a, Sym) and a.op == op else (a,):
                if isinstance(part, int):
                    number = number + part if summed else number * part
                elif isinstance(part, Sym):
                    rest.append(part)
        if not rest or (number == 0 and not summed):
            return int(number)
        if len(rest) > 1:  # the text of a single one is asked for by nobody
            rest.sort(key=str)
        if number != unit:
            rest.append(number)
        return rest[0] if len(rest) == 1 else Sym(op, tuple(rest))
    if not well_formed(op, len(args)):
        raise ModelError(f"malformed dimension expression {op!r} of {len(args)} operands")
    if all(isinstance(a, int) for a in args) and not (op in ("//", "%", "ceildiv") and args[1] == 0):
        return _EVAL[op](*args)
    return Sym(op, args)


def dims_in(e: Sym) -> Iterator[Dim]:
    """The operands of an expression; none for a symbol."""
    for a in e.args:
        if not isinstance(a, str):
            yield a


def symbols(d: Dim) -> frozenset[str]:
    """The names an expression mentions."""
    if isinstance(d, int):
        return _NONE
    if d._symbols is None:
        found = frozenset({str(d.args[0])}) if d.op == "sym" else _NONE.union(*map(symbols, dims_in(d)))
        object.__setattr__(d, "_symbols", found)
        return found
    return d._symbols


def factor(d: Dim) -> int:
    """A positive number that divides the expression whatever its symbols are; of a number, its own magnitude (1 for 0)."""
    if isinstance(d, int):
        return abs(d) or 1
    if d.op == "*":
        return math.prod(map(factor, dims_in(d)))
    return math.gcd(*map(factor, dims_in(d))) if d.op == "+" else 1


def evaluate(d: Dim, env: Mapping[str, int]) -> int:
    """The value under a binding of every symbol; predicates give 0 or 1."""
    if isinstance(d, int):
        return d
    if d.op == "sym":
        return env[str(d.args[0])]
    return int(_EVAL[d.op](*(evaluate(a, env) for a in dims_in(d))))


def rename(d: Dim, names: Mapping[str, str]) -> Dim:
    """The same expression with other symbol names."""
    if isinstance(d, int):
        return d
    if d.op == "sym":
        name = str(d.args[0])
        return sym(names.get(name, name))
    return expr(d.op, *(rename(a, names) for a in dims_in(d)))


def substitute(d: Dim, by: Mapping[str, Dim]) -> Dim:
    """The expression with some symbols replaced by expressions; parts that mention none of them stay as they are."""
    return _substituted(d, by, {})


def _substituted(d: Dim, by: Mapping[str, Dim], done: dict[int, Dim]) -> Dim:
    """Parts that stand in several places are looked at once: written out, such an expression grows with every level."""
    if isinstance(d, int) or symbols(d).isdisjoint(by):
        return d
    if d.op == "sym":
        return by[str(d.args[0])]
    found = done.get(id(d))
    if found is None:
        found = done[id(d)] = expr(d.op, *(_substituted(a, by, done) for a in dims_in(d)))
    return found


def solve(d: Dim, value: int, env: Mapping[str, int]) -> dict[str, int] | None:
    """The one new symbol that makes `d` equal `value`, if it stands once, under sums and products only.

    Gives {} when nothing is left to find and the two are equal; None when no value of the symbol fits.
    Raises LookupError when the expression has not exactly one new symbol in such a place.
    """
    while isinstance(d, Sym) and d.op != "sym":
        new = [a for a in dims_in(d) if symbols(a) - env.keys()]
        if not new:
            return {} if evaluate(d, env) == value else None
        if len(new) > 1 or d.op not in ("+", "*"):
            raise LookupError(show(d))
        rest = _EVAL[d.op](*(evaluate(a, env) for a in dims_in(d) if a is not new[0]))
        if d.op == "*" and (rest == 0 or value % rest):
            return None
        d, value = new[0], value // rest if d.op == "*" else value - rest
    if isinstance(d, int):
        return {} if d == value else None
    name = str(d.args[0])
    if name in env:
        return {} if env[name] == value else None
    return {name: value}


def solvable(d: Dim, known: AbstractSet[str]) -> str | None:
    """The symbol that `solve` would find when the known ones are bound; None when there is none."""
    while isinstance(d, Sym) and d.op != "sym":
        new = [a for a in dims_in(d) if symbols(a) - known]
        if len(new) != 1 or d.op not in ("+", "*"):
            return None
        d = new[0]
    return None if isinstance(d, int) or d.args[0] in known else str(d.args[0])


def show(d: Dim) -> str:
    """Text that `parse` reads back to an equal expression."""
    if isinstance(d, int):
        return str(d)
    if d._text is None:
        text = _shown(d)
        object.__setattr__(d, "_text", text)
        return text
    return d._text


def _shown(d: Sym) -> str:
    if d.op == "sym":
        name = str(d.args[0])
        return name if NAME.fullmatch(name) else quote(name)
    parts = [show(a) for a in dims_in(d)]
    if d.op in _PREFIX:
        return f"{d.op}({', '.join(parts)})"
    return "(" + f" {d.op} ".join(parts) + ")"


class DimSyntaxError(ModelError):
    """Malformed text of a dimension; `at` is the index of the faulty token."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(what)
        self.at = at


def read(tokens: Sequence[str], at: int, depth: int = 0) -> tuple[Dim, int]:
    """Read what `show` writes from tokens that end with an empty one; nothing is folded or sorted."""
    token = tokens[at]
    if depth > MAX_DEPTH:
        raise DimSyntaxError("dimension expression nested too deeply", at)
    if token == "(":
        part, at = read(tokens, at + 1, depth + 1)
        op, parts = tokens[at], [part]
        if op == ")":
            return part, at + 1
        while tokens[at] == op and op in _EVAL and op not in _PREFIX:
            part, at = read(tokens, at + 1, depth + 1)
            parts.append(part)
        if tokens[at] != ")" or not well_formed(op, len(parts)):
            raise DimSyntaxError("malformed dimension", at)
        return Sym(op, tuple(parts)), at + 1
    if token in _PREFIX and tokens[at + 1] == "(":
        parts, at, end = list[Dim](), at + 1, ","
        while end == ",":
            part, at = read(tokens, at + 1, depth + 1)
            parts.append(part)
            end = tokens[at]
        if end != ")" or not well_formed(token, len(parts)):
            raise DimSyntaxError("malformed dimension", at)
        return Sym(token, tuple(parts)), at + 1
    if NAME.fullmatch(token):
        return sym(token), at + 1
    try:
        return (sym(unquote(token)) if token.startswith('"') else int(token)), at + 1
    except ValueError as e:
        raise DimSyntaxError("a dimension expected", at) from e


_TOKEN = re.compile(rf"\s*({STRING}|-?[0-9]+|{NAME.pattern}|\*\*|//|==|!=|<=|\S)")


def parse(text: str) -> Dim:
    """Read one dimension or predicate, into normal form."""
    tokens = [*_TOKEN.findall(text.strip()), ""]
    try:
        d, at = read(tokens, 0)
    except DimSyntaxError as e:
        raise ModelError(f"malformed dimension {text!r}", where=f"token {e.at + 1}", because=e.what) from e
    if at != len(tokens) - 1:
        raise ModelError(f"malformed dimension {text!r}", where=f"token {at + 1}")
    return normal(d)


def normal(d: Dim) -> Dim:
    """The same expression as `expr` builds it: folded, flattened and sorted."""
    return rename(d, {})
