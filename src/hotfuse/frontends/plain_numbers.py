# pyright: reportPrivateUsage=false
# Frames of callers are what this module asks about.
"""What a model's code does with numbers besides computing: it makes text of them, looks things up by them, and asks for their type.

    self[f"expert_{i[0]}"]                  a layer by its name, where `i` is a tensor of experts
    tables.get(kind.item())                 one by a number that data decide
    tables[str(tuple(x.shape))]             one by sizes
    if isinstance(n, int) and n == 0: ...   a size that is a number
    if type(n) is int and n - 3 == True: ...

While code is traced, sizes and numbers that data decide are symbols: their text is `s77`, and their type is not `int`. The text of
a tensor is `FakeTensor(...)`. Code that compares such text, looks something up by it, or asks for the type would take another path
than in eager, and calls on that path would seem to prove the graph. So the model's code, and libraries that it calls, find
numbers. Where code makes text of a size, the size is assumed to be that of the traced call, and the graph gets a guard. A number
that data decide is read as by `int(t)` (`frontends.paths`). The text of whole tensors is no path that could be followed: a model
that makes it keeps its own code. What checks and logs say is text that nothing rests on (`frontends.messages`), and stays that of
symbols.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from hotfuse.frontends.as_in_eager.tensors_of_tensors import of_tensors
from hotfuse.frontends.messages import in_message
from hotfuse.frontends.model_frames import OURS, TORCH, emitter, placed

_NUMBERS: tuple[tuple[Any, type[Any]], ...] = ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool))
TRACED = (FakeTensor, FunctionalTensor)
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, f"__{name}__")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor",
                 "eq", "ne", "lt", "le", "gt", "ge")
}  # fmt: skip
_TRUTHS = (bool, torch.SymBool)
_TEXT = "makes text of a tensor"
Note = Callable[[str], None]


@contextmanager
def plain_numbers(note: Note) -> Generator[None]:
    """Have numbers be eager's to code on this thread; `note` is told of text that there is none of while tracing."""
    thread = threading.get_ident()

    def asked() -> Any:
        return emitter() if threading.get_ident() == thread else None

    def reads() -> Any:
        """Who makes text that something may rest on."""
        frame = asked()
        return None if frame is None or in_message(frame) else frame

    def as_text(plain: type[Any], real: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda self: real(self) if reads() is None else repr(plain(self))

    def formatted(plain: type[Any]) -> Callable[[Any, str], str]:
        return lambda self, spec: _format(self) if reads() is None else format(plain(self), spec)

    def hashed(real: Callable[[Any], int]) -> Callable[[Any], int]:
        def number(self: Any) -> int:
            if not free_unbacked_symbols(self) or asked() is None:
                return real(self)  # libraries keep results by sizes where those have a hash, and would assume them
            return hash(int(self))

        return number

    def attribute(plain: type[Any]) -> Callable[[Any, str], Any]:
        def got(self: Any, name: str) -> Any:
            if name == "__class__" and threading.get_ident() == thread and is_models(sys._getframe(1)):
                return plain  # what `isinstance` asks for behind the type itself
            try:
                return object.__getattribute__(self, name)
            except AttributeError:
                if threading.get_ident() != thread or not hasattr(plain, name) or not is_models(sys._getframe(1)):
                    raise
            return getattr(plain(self), name)

        return got

    def text_of_tensor(real: Callable[..., str]) -> Callable[..., str]:
        def text(self: Tensor, *args: Any, **kwargs: Any) -> str:
            if isinstance(self, TRACED) and (frame := reads()) is not None:
                note(placed(_TEXT, frame))
            return real(self, *args, **kwargs)

        return text

    def formatted_tensor(self: Tensor, spec: str) -> str:
        if not isinstance(self, TRACED):
            return tensor_format(self, spec)
        if (frame := reads()) is None:
            return _format(self)
        if not self.dim():
            return format(self.detach().item(), spec)
        note(placed(_TEXT, frame))
        return object.__format__(self, spec)

    tensor_format = Tensor.__format__
    with contextlib.ExitStack() as instead:
        for owner, plain in _NUMBERS:
            instead.enter_context(replaced_attribute(owner, "__repr__", as_text(plain, owner.__repr__)))
            instead.enter_context(replaced_attribute(owner, "__format__", formatted(plain)))
            instead.enter_context(replaced_attribute(owner, "__getattribute__", attribute(plain)))
            for name, new in _with_booleans(owner):
                instead.enter_context(replaced_attribute(owner, name, new))
        instead.enter_context(replaced_attribute(torch.SymInt, "__hash__", hashed(torch.SymInt.__hash__)))
        for owner in (Tensor, FunctionalTensor):
            instead.enter_context(replaced_attribute(owner, "__repr__", text_of_tensor(owner.__repr__)))
        instead.enter_context(replaced_attribute(Tensor, "__format__", formatted_tensor))
        yield


class TruthsAreRead(TorchFunctionMode):
    """Around a traced call that follows no path: `t.item()` of a truth value is a read there and then. As a symbol it would be
    neither of the two for code that asks `is True`, and nothing would show that it did.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        truth = func is Tensor.item and args[0].dtype is torch.bool and isinstance(args[0], TRACED)
        if truth and is_models(sys._getframe(1)):  # torch's own checks assert what they read
            return bool(args[0])
        if (made := of_tensors(func, args, kwargs or {})) is not None:
            return made
        return func(*args, **(kwargs or {}))


def _with_booleans(owner: type[Any]) -> Generator[tuple[str, Callable[[Any, Any], Any]]]:
    """Operators of symbols to which `True` is 1, as it is in Python: sympy has it equal nothing but itself."""
    for name, plainly in _OPERATORS.items():
        for method, reflected in ((f"__{name}__", False), (f"__r{name}__", True)):
            real = vars(owner).get(method)
            if owner is torch.SymBool and not (reflected and name in ("eq", "ne", "lt", "le", "gt", "ge")):
                yield method, _of_a_truth(plainly, real if name in ("and", "or") else None, reflected=reflected)
            elif owner is not torch.SymBool and real is not None:
                yield method, _of_a_number(real)


def _of_a_number(real: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: real(self, int(other) if isinstance(other, _TRUTHS) else other)


def _of_a_truth(
    plainly: Callable[[Any, Any], Any], real: Callable[[Any, Any], Any] | None, *, reflected: bool
) -> Callable[[Any, Any], Any]:  # fmt: skip
    def operation(self: Any, other: Any) -> Any:
        if real is not None and isinstance(other, _TRUTHS):
            return real(self, other)
        given = bool(other) if isinstance(other, torch.SymBool) else other
        return plainly(given, bool(self)) if reflected else plainly(bool(self), given)

    return operation


def is_models(frame: Any) -> bool:
    """Whether code that asks for a type is neither torch's nor ours; classes that are asked (`numbers.Integral`) ask for others."""
    while frame is not None and frame.f_code.co_filename.startswith("<frozen abc"):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith((TORCH, OURS))


def _format(symbol: Any) -> str:
    """As text in a message has it, which nobody compares: whatever the width and the digits would be."""
    return object.__format__(symbol, "")


@contextmanager
def replaced_attribute(owner: type[Any], name: str, new: Any) -> Generator[None]:
    """Have an attribute of a class be something else."""
    own = vars(owner).get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
