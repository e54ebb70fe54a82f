"""Calls whose structure was met before, taken apart by straight-line code that was made for it.

A key/value cache of sixteen layers has two hundred parts. Naming each of them again in every step of a generation, and comparing
the name with that of the step before, takes longer than a device needs for some layers. A structure that comes back gets a function
that looks whether a call has it, and hands out the leaves:

    cache = kwargs["past_key_values"]
    if type(cache) is not StaticCache or tuple(cache.__dict__) != ("layers", …): return None

It finds exactly the calls for which `base.structure.take_call` gives the same spec, and gives that spec itself, so comparing specs
is comparing addresses. What registered functions of torch's pytree take apart has none, nor have dataclasses that are no plain
objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import Spec, Taken, count_tensor, is_plain, take_call, text_base

Match = Callable[[tuple[Any, ...], dict[str, Any]], Taken | None]
MAX_KNOWN = 16
"""Structures of calls with the same number and names of arguments that are tried one after the other: one that is not the call's
mostly shows it in its first lines, and taking a call apart without code takes as long as a dozen of those."""
MAX_SHAPES = 64
MAX_PARTS = 4000
"""Of a structure that code is made for."""


class _NoMatcher(Exception):
    """A part of the structure is taken apart by functions of other people's."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownStructure:
    """A structure that code was made for."""

    spec: Spec
    match: Match
    number: int
    """No other structure has it."""
    tensors: tuple[int, ...]
    """Places of tensors among the leaves."""
    counts: tuple[int, ...]


class KnownStructures:
    """Takes calls apart like `take_call`, faster where their structure came before."""

    def __init__(self) -> None:
        self._by_names: dict[tuple[Any, ...], list[KnownStructure]] = {}
        self._once: dict[tuple[Any, ...], Spec] = {}
        """The structure that came last of those that have no code yet: the next one like it gets some."""
        self._numbers = itertools.count()

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Taken, KnownStructure | None]:
        """The call, and its structure if code took it apart; raises InputError where `take_call` does."""
        names = (len(args), *kwargs)
        known = self._by_names.get(names, ())
        for each in known:
            if (found := each.match(args, kwargs)) is not None:
                return found, each
        taken = take_call(args, kwargs)
        if self._once.get(names) == taken.spec and not any(each.spec == taken.spec for each in known):
            made = matcher(taken.spec)
            if made is not None:
                kinds = list(_leaf_kinds(taken.spec))
                places = (tuple(i for i, kind in enumerate(kinds) if kind == asked) for asked in ("tensor", "count"))
                self._by_names[names] = [KnownStructure(taken.spec, made, next(self._numbers), *places), *known][:MAX_KNOWN]
        elif len(self._once) < MAX_SHAPES or names in self._once:
            self._once[names] = taken.spec
        return taken, None


def _leaf_kinds(spec: Spec) -> Iterator[str]:
    """The kind of each leaf, in order."""
    if spec.kind in ("tensor", "count"):
        yield spec.kind
    for child in spec.children:
        yield from _leaf_kinds(child)


def matcher(spec: Spec) -> Match | None:
    """A function for the calls of one spec; None where there is none."""
    made = _Matcher(spec)
    positional, named = spec.children
    try:
        made.line(f"if len(args) != {len(positional.children)} or tuple(kwargs) != {made.constant(named.detail)}: return None")
        made.several("args", positional.children, inside=False)
        made.several("kwargs.values()", named.children, inside=False)
    except _NoMatcher:
        return None
    return made.compiled()


class _Matcher:
    """Lines of a function, and what they refer to."""

    def __init__(self, spec: Spec) -> None:
        self._lines: list[str] = []
        self._names: dict[str, Any] = {"Tensor": torch.Tensor, "Taken": Taken, "count": count_tensor, "spec": spec}
        self._parts = 0
        self._leaves: list[str] = []
        self._holders: list[str] = []

    def line(self, text: str) -> None:
        self._lines.append(text)

    def constant(self, value: Any) -> str:
        """A name for a value."""
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def compiled(self) -> Match:
        """All lines as one function."""
        held = ", ".join(f"id({h})" for h in self._holders)
        if len(self._holders) > 1:  # what was met as one object is one
            self.line(f"if len({{{held}}}) != {len(self._holders)}: return None")
        self.line(f"return Taken([{', '.join(self._leaves)}], spec, [{', '.join(self._holders)}])")
        text = "def match(args, kwargs):\n" + "\n".join(f"    {line}" for line in self._lines)
        exec(compile(text, "<hotfuse structure>", "exec"), self._names)
        return self._names["match"]

    def several(self, values: str, specs: tuple[Spec, ...], *, inside: bool) -> None:
        """Parts of something whose number is known to be right."""
        if not specs:
            return
        names = [f"v{self._parts + i}" for i in range(len(specs))]
        self._parts += len(specs)
        if self._parts > MAX_PARTS:
            raise _NoMatcher
        self.line(f"{', '.join(names)}, = {values}")
        for name, spec in zip(names, specs, strict=True):
            self._part(name, spec, inside=inside)

    def _part(self, name: str, spec: Spec, *, inside: bool) -> None:
        match spec.kind:
            case "tensor":
                self.line(f"if type({name}) is not Tensor and not isinstance({name}, Tensor): return None")
                self._leaves.append(name)
            case "count":
                self.line(f"if type({name}) is not int or {name} < 0: return None")
                self._leaves.append(f"count({name})")
            case "ref":
                self.line(f"if {name} is not {self._holders[spec.detail]}: return None")
            case "slice":
                self.line(f"if type({name}) is not slice: return None")
                self.several(f"({name}.start, {name}.stop, {name}.step)", spec.children, inside=False)
            case "constant" if not _bare(spec):
                raise _NoMatcher
            case "constant":
                value = self.constant(spec.detail)
                other = f"type({name}) is not {self.constant(spec.cls)} or {name} != {value}"
                self.line(f"if {name} is not {value} and ({other}): return None")
            case "float":
                assert spec.cls is not None
                text = f"{text_base(spec.cls).__name__}.__repr__({name})"
                self.line(f"if type({name}) is not {self.constant(spec.cls)} or {text} != {spec.detail!r}: return None")
            case _:
                self._container(name, spec, inside=inside)

    def _container(self, name: str, spec: Spec, *, inside: bool) -> None:
        self.line(f"if type({name}) is not {self.constant(spec.cls)}: return None")
        match spec.kind:
            case "tuple" | "size" | "namedtuple" | "list":
                self.line(f"if len({name}) != {len(spec.children)}: return None")
                if spec.kind == "list":
                    self._holders.append(name)
                self.several(name, spec.children, inside=inside)
            case "dict":
                self.line(f"if tuple({name}) != {self.constant(spec.detail)}: return None")
                self._holders.append(name)
                self.several(f"{name}.values()", spec.children, inside=inside)
            case "object" if spec.cls is not None and is_plain(spec.cls) and not _described(spec.cls, spec.detail):
                self.line(f"if tuple({name}.__dict__) != {self.constant(spec.detail)}: return None")
                self._holders.append(name)
                self.several(f"{name}.__dict__.values()", spec.children, inside=True)
            case _:
                raise _NoMatcher


def _bare(spec: Spec) -> bool:
    """Whether a constant's class leaves no room for more than what it equals others by."""
    return isinstance(spec.detail, Enum | type) or getattr(spec.cls, "__dictoffset__", 0) == 0


def _described(cls: type, names: tuple[str, ...]) -> bool:
    """Whether the class has a say in what an attribute of an object is."""
    return any(hasattr(getattr(cls, name, None), "__set__") for name in names)
