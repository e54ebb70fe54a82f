# pyright: reportPrivateUsage=false
# Frames of callers, and private attributes of tensors, are what this module is about.
"""What a model's code asks of its arguments besides what they hold, their sizes, dtypes and strides.

    x * getattr(x, "scale", 1.0)          an attribute that the program writes on some of its tensors
    if x.requires_grad: ...
    if isinstance(x, nn.Parameter): ...
    if query is key: ...

A traced tensor answers for one that has nothing of this: without gradients, without attributes of its own, of the plain class, and
another one than every other. So what is asked is noted, and calls whose arguments would answer otherwise go to the model's own
code (`as_traced`). What can be asked of memory (`x._version`, `x.storage_offset()`, `x._base`) a graph does not hold on
to; a model that asks for it keeps its own code.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, _tensor, overrides
from torch.overrides import TorchFunctionMode

from hotfuse.frontends import plain_numbers
from hotfuse.frontends.captured import Asked
from hotfuse.frontends.model_frames import STANDARD, placed
from hotfuse.frontends.paths import follow
from hotfuse.frontends.plain_numbers import TRACED, Note, is_models, replaced_attribute
from hotfuse.frontends.questions.as_traced import ATTRIBUTE, DATA, IDENTITY, OWN, pattern, same_objects

ANY = -1
"""In place of an argument's number: every one is meant."""
_PASS_ON = frozenset(m.__file__ for m in (_tensor, overrides, plain_numbers, follow))
"""Where torch has methods of tensors in Python, and has them answered by a mode; and the modes inside of this one."""
_GRADIENTS = {getattr(Tensor, name).__get__: name for name in ("requires_grad", "is_leaf", "grad_fn", "grad")}
_MEMORY: dict[Any, str] = {
    **{getattr(Tensor, name).__get__: name for name in ("_version", "_base", "_backward_hooks", "output_nr", "retains_grad")},
    **{getattr(Tensor, n): n for n in ("_is_view", "storage_offset", "untyped_storage", "storage", "is_shared", "is_pinned")},
}


_DATA = frozenset({
    *(getattr(Tensor, name) for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__",
                                         "__array__", "__contains__", "is_nonzero", "equal", "allclose")),
    torch.is_nonzero, torch.equal, torch.allclose,
})  # fmt: skip
"""What gives Python what a tensor holds. A traced one has no data; one from elsewhere has (`helper.limit.item()`)."""


class Questions(TorchFunctionMode):
    """Around a traced call with these arguments; `note` is told of questions that no graph answers."""

    def __init__(self, inputs: Sequence[Tensor], weights: Iterable[Tensor], note: Note) -> None:
        super().__init__()
        self.asked: dict[Asked, None] = {}
        self._numbers = {id(t): i for i, t in enumerate(inputs)}
        self._weights = frozenset(map(id, weights))
        self._identity = pattern(same_objects(inputs))
        self._note = note
        self._thread = threading.get_ident()
        for t in inputs:
            object.__setattr__(t, "__dict__", _Entries(vars(t), note))

    def of_identity(self, what: str = IDENTITY) -> None:
        """Some code that the model leads to compares objects by identity, or with the model's own."""
        self.asked[Asked(self._identity if what == IDENTITY else what, ANY)] = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _GRADIENTS or func in _MEMORY or func in _DATA:
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename in _PASS_ON:
                frame = frame.f_back
            if frame is not None and is_models(frame):
                self._of(func, args[0], frame)
        return func(*args, **(kwargs or {}))

    def of_class(self, t: Tensor) -> None:
        """A tensor is asked for its class."""
        self._add("class", t)

    @contextmanager
    def of_attributes(self) -> Generator[None]:
        """Note attributes that tensors are asked for and have not."""

        def missing(self_: Tensor, name: str) -> Any:
            if threading.get_ident() == self._thread:
                self._missing(self_, name)
            raise AttributeError(f"'Tensor' object has no attribute {name!r}", name=name, obj=self_)

        def hashed(self_: Tensor) -> int:
            if threading.get_ident() == self._thread and is_models(sys._getframe(1)):
                self.of_identity()
            return id(self_)

        with contextlib.ExitStack() as instead:
            for owner in TRACED:
                instead.enter_context(replaced_attribute(owner, "__hash__", hashed))
                instead.enter_context(replaced_attribute(owner, "__getattr__", missing))
            yield

    def _of(self, func: Any, t: Any, frame: Any) -> None:
        if func in _DATA:
            if isinstance(t, Tensor) and not isinstance(t, TRACED):
                self.asked[Asked(DATA, ANY)] = None
        elif id(t) in self._weights:
            self._note(placed(f"asks a weight for {_GRADIENTS.get(func) or _MEMORY[func]}", frame))
        elif func in _GRADIENTS:
            self.asked[Asked("gradients", self._numbers.get(id(t), ANY))] = None
        elif id(t) in self._numbers:
            self._note(placed(f"asks an argument for {_MEMORY[func]}", frame))

    def _missing(self, t: Tensor, name: str) -> None:
        if name == "_is_param":  # `isinstance(x, nn.Parameter)` asks, in torch
            frame = sys._getframe(2).f_back
            if frame is not None and is_models(frame):
                self.of_class(t)
        elif not (name.startswith("__") and name.endswith("__")) and is_models(frame := sys._getframe(2)):
            if id(t) in self._weights:
                self._note(placed(f"asks a weight for an attribute that it has not been given, {name!r}", frame))
            else:
                self._add(ATTRIBUTE + name, t)

    def _add(self, what: str, t: Tensor) -> None:
        """A question to what is no argument is one to all of them: `x.contiguous()` gives `x` itself."""
        if id(t) not in self._weights:
            self.asked[Asked(what, self._numbers.get(id(t), ANY))] = None


class _Entries(dict[str, Any]):
    """What a traced tensor keeps for torch, and has of its own; `note` is told where the model's code looks into it. Attributes are
    looked up past these methods."""

    def __init__(self, held: Mapping[str, Any], note: Note) -> None:
        super().__init__(held)
        self._note = note

    def _told(self) -> None:
        if is_models(frame := sys._getframe(2)):
            self._note(placed("asks an argument for all its attributes", frame))

    def __getitem__(self, key: str) -> Any:
        self._told()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """One of them."""
        self._told()
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._told()
        return super().__contains__(key)

    def __len__(self) -> int:
        self._told()
        return super().__len__()

    def __iter__(self) -> Iterator[str]:
        self._told()
        return super().__iter__()

    def keys(self) -> Any:
        """Their names."""
        self._told()
        return super().keys()

    def items(self) -> Any:
        """Names and values."""
        self._told()
        return super().items()

    def values(self) -> Any:
        """Their values."""
        self._told()
        return super().values()


_VALUES = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
                     "LOAD_DEREF", "BINARY_SUBSCR"})  # fmt: skip
"""Instructions that load what may be a tensor; classes, `None` and members of enumerations come by others."""


def asked_identity(function: types.FunctionType) -> str:
    """What a function asks of which object an argument is: `IDENTITY` of which other values it is, or of its identity; `OWN` of
    whether it is one of the model's tensors alone (`x is self.weight`); nothing, as most. A `forward` counts, and code of the
    program itself: helpers of libraries that are reached and do not run would have nearly every model asked about.
    """
    file = function.__code__.co_filename
    installed = "site-packages" in file or file.startswith((STANDARD, "<frozen"))
    if function.__name__ != "forward" and installed:
        return ""
    found = set(_asked_identity(function.__code__, function.__globals__))
    return IDENTITY if IDENTITY in found else OWN if found else ""


def _asked_identity(code: types.CodeType, space: Mapping[str, Any]) -> Iterator[str]:
    before = local = None
    for at in dis.get_instructions(code):
        if at.opname == "CACHE":
            continue
        if at.opname == "LOAD_GLOBAL" and at.argval == "id":
            yield IDENTITY
        elif at.opname == "IS_OP" and before is not None:
            if before.opname in _VALUES:
                yield IDENTITY
            elif (before.opname == "LOAD_ATTR" and local) or isinstance(space.get(str(before.argval)), Tensor):
                yield OWN
        if at.opname != "LOAD_ATTR":
            local = at.opname in _VALUES  # what attributes are taken of from here on
        before = at
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _asked_identity(inner, space)
