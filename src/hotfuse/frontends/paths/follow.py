# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# Torch keeps what a front end needs private.
"""Tracing follows the path that a real call took through code which reads its tensors (decision 160).

Each read gives what it gave in that call (`frontends.paths.reads`), and what the graph rests on then is said in the graph itself:

    if x.mean() > 1: ...        _assert_async(x.mean() > 1, "... true")     a mark: what was read, and what it gave
    for i in range(int(n)):     _assert_async(n, "... 3")
    n.item(), x.nonzero()       a symbol of torch's, with what it was as a hint: only what the code asks of it is assumed

`frontends.paths.path_checks` makes one check of the marks. What code asks of a symbol, torch would assert by itself, but not
reliably: it leaves comparisons of floats out, and takes a size for known once it was compared, so that nothing is left to check. So
every symbol has a tensor that it is read from, and what is asked of it is a mark like others.

Libraries read what would spare them work in eager, and ask whether they are traced before (`if not is_tracing() and mask.all()`, in
`transformers`). Such reads are left out: a traced call comes to none of that place, and to what was read behind it. Where a place
was read in both, as often in both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import TensorReferenceAnalysis

from hotfuse.base.errors import CaptureError
from hotfuse.frontends.as_in_eager.tensors_of_tensors import of_tensors
from hotfuse.frontends.paths.reads import (
    ITEM,
    NUMBERS,
    REAL,
    SIZES,
    TRUTH,
    WHOLE,
    Read,
    is_sized,
    reading_place,
    tensors_in,
    with_padding_read,
)
from hotfuse.ops.own.assume import size_of

MARK = "a call read "
"""What the message of an assertion that is a mark begins with; the value as JSON follows."""


_SYMBOL = re.compile(r"\b(?:zuf|u|s)\d+\b")
_ARITHMETIC = ("_operator", "torch")
"""Where the functions come from that torch computes with symbols by: `operator.ge`, `torch.sym_not`."""
_TURNED: Any = (sympy.Le, sympy.Ge, sympy.Ne)
_SIZES = (torch.ops.aten.sym_size.int,)


class AssumedReads(TorchFunctionMode):
    """Around a traced call: reads give what they gave in a real one."""

    def __init__(self, reads: Sequence[Read], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._reads = list(reads)
        self._at = 0
        self._read_at, self._skipped = set[str](), set[str]()
        """Places that read while tracing, and those that only did in the call."""
        self._read_from: dict[Any, Tensor] = {}
        """By symbol, the number that it was read from, as it was then."""
        self._asked: list[Any] = []
        """What was asked of symbols since the last call of torch: often by operators that are being traced, where nothing that is
        computed would be written down."""
        self._hooked: set[int] = set()
        for t in inputs:
            for d, size in enumerate(t.shape):
                if isinstance(size, torch.SymInt):
                    self._read_from.setdefault(size.node.expr, size_of(t, d))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._mark_asked()
        if (kind := NUMBERS.get(func)) is not None:
            return self._number(kind, _read_tensor(func, args, kwargs))
        if (made := of_tensors(func, args, kwargs)) is not None:
            return made
        args, kwargs = with_padding_read(func, args, kwargs, lambda t: self._number(WHOLE, t))
        result = func(*args, **kwargs)
        if is_sized(func, args):
            shapes = self._next(SIZES)
            for t, shape in zip(tensors_in(result), shapes, strict=True):
                for d, (size, seen) in enumerate(zip(t.shape, shape, strict=True)):
                    self._hint(size, seen, lambda t=t, d=d: size_of(t, d))
        self._mark_asked()
        return result

    def finish(self) -> frozenset[str]:
        """The call is over: all reads were made. The symbols of which everything that was asked is marked."""
        self._mark_asked()
        self._skipped |= {place for _, _, place in self._reads[self._at :]}
        if apart := self._skipped & self._read_at:
            raise _otherwise(f"it reads less there than in a call, in {_function(min(apart))}")
        return frozenset(map(str, self._read_from))

    def _next(self, kind: str) -> Any:
        place = reading_place()
        left = range(self._at, len(self._reads))
        at = next((i for i in left if self._reads[i][2] == place), None)
        if at is None:  # the same function may ask otherwise where it is traced
            at = next((i for i in left if _function(self._reads[i][2]) == _function(place) and self._reads[i][0] == kind), None)
        if at is None:
            raise _otherwise(f"it reads more there than in a call, in {_function(place)}")
        self._skipped |= {where for _, _, where in self._reads[self._at : at]}  # where it asked whether it is traced
        found, value, where = self._reads[at]
        self._at = at + 1
        self._read_at.add(where)
        if found != kind:
            raise _otherwise(f"read {self._at} is a {kind} there, and a {found} in a call")
        return value

    def _number(self, kind: str, t: Tensor | bool) -> Any:  # noqa: FBT001  (what is read)
        value = self._next(kind)
        if isinstance(t, bool):  # no data decide it
            return t
        if (known := _constant(t)) is not None:
            number = known.item()
            return {TRUTH: bool, WHOLE: int, REAL: float}[kind](number) if kind != ITEM else number
        if kind == ITEM and t.dtype is not torch.bool:
            symbol: Any = t.item()
            self._hint(symbol, value, lambda: t.reshape(()).clone())  # it may be written to before anybody asks
            return symbol
        _mark(t, value)
        return value

    def _hint(self, size: Any, seen: Any, source: Callable[[], Tensor]) -> None:
        """What a symbol was in the call, for guards that ask."""
        if not isinstance(size, torch.SymInt | torch.SymFloat) or (isinstance(seen, float) and not math.isfinite(seen)):
            return
        env, symbol = size.node.shape_env, size.node.expr
        if not getattr(symbol, "is_Symbol", False) or not free_unbacked_symbols(size):
            return
        self._read_from[symbol] = source()
        tell = getattr(env, "set_real_tensor_prop_unbacked_vals", None) or env.set_unbacked_var_to_val
        tell(symbol, seen)
        if id(env) not in self._hooked:
            self._hooked.add(id(env))
            self._mark_guards(env)

    def _mark_guards(self, env: Any) -> None:
        """Have what is asked of symbols be marks."""
        real = env.guard_or_defer_runtime_assert

        def asserted(condition: Any, *rest: Any, **named: Any) -> Any:
            if not free_unbacked_symbols(condition):
                return real(condition, *rest, **named)
            if unknown := condition.free_symbols - self._read_from.keys():
                if not isinstance(condition, sympy.Eq):  # a bound of a size that the graph computes, asserted by torch
                    return real(condition, *rest, **named)
                raise CaptureError(f"the model's code asks for {condition}", because=f"nothing shows {min(map(str, unknown))}",
                                   hint="it keeps running as it is")  # fmt: skip
            self._asked.append(condition)
            if isinstance(condition, sympy.Eq) and condition.lhs in self._read_from and condition.rhs.is_Integer:
                return real(condition, *rest, **named)  # torch takes it for that number from here on
            return True

        env.guard_or_defer_runtime_assert = asserted

    def _mark_asked(self) -> None:
        asked, self._asked = self._asked, []
        condition: Any
        for condition in dict.fromkeys(asked):
            read: dict[Any, Tensor] = {s: self._read_from[s] for s in condition.free_symbols}
            if isinstance(condition, sympy.Eq) and condition.lhs in read and condition.rhs.is_Integer:
                value: Any = condition.rhs
                _mark(read[condition.lhs], int(value))
                continue
            wide = {s: t.double() if t.is_floating_point() else t.long() for s, t in read.items()}
            for t in read.values():
                if t.is_floating_point():
                    _mark(torch.isnan(t), value=False)  # of a NaN neither a comparison holds nor its opposite
            turned = isinstance(condition, _TURNED)  # one question, whichever way it went
            _mark(sympy_interp(_Comparisons, wide, sympy.Not(condition) if turned else condition), value=not turned)


class _Comparisons(TensorReferenceAnalysis):
    """What is asked of symbols, on tensors."""

    @staticmethod
    def mod(x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override] - torch's own raises
        """The remainder of sizes, which are never negative."""
        return torch.remainder(x, y)

    python_mod = mod


def _mark(t: Tensor, value: Any) -> None:
    torch.ops.aten._assert_async.msg(t if t.dim() == 0 else t.reshape(()), MARK + json.dumps(value))


def without_assertions(program: fx.Graph, symbols: frozenset[str]) -> None:
    """Take out what torch asserts of symbols by itself: all of it is marked, and each assertion would interrupt a run."""
    for node in reversed(program.nodes):
        if node.target is torch.ops.aten._assert_scalar.default:
            named = set(_SYMBOL.findall(str(node.args[1]) if len(node.args) > 1 else ""))
            if named and named <= symbols:
                program.erase_node(node)
        elif not node.users and (getattr(node.target, "__module__", "") in _ARITHMETIC or node.target in _SIZES):
            program.erase_node(node)


def _read_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | bool:
    """The one number that a call reads; a truth value where sizes alone decide."""
    if func in (Tensor.equal, torch.equal):
        a, b = (*args, *kwargs.values())
        return (a == b).all() if tuple(a.shape) == tuple(b.shape) else False
    if func in (Tensor.allclose, torch.allclose):
        return torch.isclose(*args, **kwargs).all()
    if func is Tensor.__contains__:
        return (args[0] == args[1]).any()
    return args[0] if args else next(iter(kwargs.values()))


def _function(place: str) -> str:
    return place.rpartition("+")[0]


def _constant(t: Tensor) -> Tensor | None:
    """A tensor whose data are known while tracing."""
    if not isinstance(t, FakeTensor):
        return t
    return t.constant


def _otherwise(because: str) -> CaptureError:
    return CaptureError("the model's code reads its data otherwise while it is traced", because=because,
                        hint="it keeps running as it is; avoid branches on tensor values for a graph")  # fmt: skip
