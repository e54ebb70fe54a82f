"""Dataclasses with deferred methods behave as the standard library's do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hotfuse.base import lazy_dataclass

STYLES: dict[str, dict[str, bool]] = {
    "frozen, slots": {"frozen": True, "slots": True},
    "slots": {"slots": True},
    "plain": {},
    "frozen": {"frozen": True},
    "frozen, identity": {"frozen": True, "slots": True, "eq": False},
    "identity": {"slots": True, "eq": False},
}


def _made(decorate: Callable[..., Any], style: dict[str, bool]) -> Any:
    class Point:
        """With every kind of field."""

        kinds: ClassVar[int] = 3
        x: int
        y: float = 0.5
        tags: list[str] = field(default_factory=list)
        hidden: int = field(default=7, repr=False, compare=False)
        area: float = field(init=False, default=1.0)
        later: str | None = field(init=False, default=None, repr=False, compare=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "area", self.x * 2.0)

    return decorate(**style)(Point)


Lazy = lazy_dataclass.dataclass(frozen=True, slots=True)(type("Lazy", (), {"__annotations__": {"a": int}, "__module__": __name__}))


def _said(f: Callable[[], Any]) -> str:
    try:
        return repr(f()).replace(".<locals>", "")
    except Exception as e:
        return f"{type(e).__name__}: {str(e).replace('_made.<locals>.', '')}"


def _asked(cls: Any) -> list[str]:
    """What a class answers, as text."""
    unordered = cls(1) == cls(1), cls(1) == cls(2), cls(1) == 1, cls(1) != cls(1, hidden=9)
    return [
        _said(lambda: cls(1)), _said(lambda: cls(1, 2.0, ["a"], 3)), _said(lambda: cls(x=4, tags=["b"])), _said(lambda: cls()),
        _said(lambda: cls(1, z=2)), _said(lambda: cls(1, 2.0, [], 3, 4)), repr(unordered),
        _said(lambda: cls(1).tags is cls(1).tags),
        _said(lambda: dataclasses.replace(cls(1), y=3.0)), _said(lambda: dataclasses.asdict(cls(1))),
        _said(lambda: cls.__match_args__),
        _said(lambda: dataclasses.astuple(cls(2))), _said(lambda: setattr(cls(1), "x", 2)),
        _said(lambda: delattr(cls(1), "x")), _said(lambda: copy.deepcopy(cls(1, tags=["q"]))), _said(lambda: cls.kinds),
        _said(lambda: [f.name for f in dataclasses.fields(cls)]), _said(lambda: cls.__slots__),
        _said(lambda: (cls(1).area, cls(1).later)),
        _said(lambda: hash(cls(1)) == hash(cls(1))),
    ]  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_as_the_standard_library(style: str) -> None:
    lazy, plain = (_asked(_made(d, STYLES[style])) for d in (lazy_dataclass.dataclass, dataclasses.dataclass))
    for ours, theirs in zip(lazy, plain, strict=True):
        assert ours == theirs


def test_hash_of_equal_values() -> None:
    made = [_made(d, STYLES["frozen, slots"]) for d in (lazy_dataclass.dataclass, dataclasses.dataclass)]
    shown = [c(3, tags=()) for c in made]
    assert hash(shown[0]) == hash(shown[1]) == hash(made[0](3, tags=()))
    with pytest.raises(TypeError, match="unhashable"):
        hash(_made(lazy_dataclass.dataclass, STYLES["slots"])(1))


def test_what_a_class_says_itself_stays() -> None:
    @lazy_dataclass.dataclass(frozen=True, slots=True)
    class Own:
        """With methods."""

        a: int

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

        def __repr__(self) -> str:
            return "own"

    assert Own(1) == Own(2) and hash(Own(1)) == 5 and repr(Own(1)) == "own"


def test_inherited_fields() -> None:
    @lazy_dataclass.dataclass(frozen=True, slots=True)
    class Base:
        """Of one field."""

        a: int

    @lazy_dataclass.dataclass(frozen=True, slots=True)
    class More(Base):
        """Of two."""

        b: int = 2

    assert repr(Base(1)).endswith("Base(a=1)") and repr(More(1)).endswith("More(a=1, b=2)")
    assert More(1) == More(1, 2) and More(1) != Base(1) and len({More(1), More(1), Base(1)}) == 2


def test_frozen_classes_are_derived_from_frozen_ones_alone() -> None:
    @lazy_dataclass.dataclass(frozen=True, slots=True)
    class Base:
        """Of one field."""

        a: int

    @dataclasses.dataclass(frozen=True)
    class More(Base):
        """The standard library's own."""

        b: int = 2

    assert More(1) == More(1, 2) and repr(More(1)).endswith("More(a=1, b=2)")
    for decorate in (lazy_dataclass.dataclass, dataclasses.dataclass):
        with pytest.raises(TypeError, match="cannot inherit non-frozen"):
            decorate(slots=True)(type("Free", (Base,), {"__annotations__": {"c": int}}))
        with pytest.raises(TypeError, match="cannot inherit frozen"):
            free = lazy_dataclass.dataclass(type("Free", (), {"__annotations__": {"c": int}}))
            decorate(frozen=True)(type("Frozen", (free,), {"__annotations__": {"d": int}}))


def test_pickled() -> None:
    made: Any = pickle.loads(pickle.dumps(Lazy(4)))  # type: ignore[call-arg]
    assert made == Lazy(4) and made.a == 4  # type: ignore[call-arg]


def test_methods_take_their_place_once_used() -> None:
    cls = _made(lazy_dataclass.dataclass, STYLES["frozen, slots"])
    deferred = {n: cls.__dict__[n] for n in ("__init__", "__repr__", "__eq__", "__hash__")}
    one = cls(1, tags=())
    assert (repr(one), one == cls(1, tags=()), hash(one)) and all(cls.__dict__[n] is not m for n, m in deferred.items())


def test_first_used_by_many_threads() -> None:
    cls = _made(lazy_dataclass.dataclass, STYLES["frozen, slots"])
    begin, found = threading.Barrier(8), list[Any]()

    def use() -> None:
        begin.wait()
        found.append((cls(1, tags=()), hash(cls(1, tags=())), repr(cls(1, tags=()))))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(found)) == 1 and len(found) == 8


def test_the_package_defers_its_own() -> None:
    """One class imported with the standard library's is half a millisecond of every start."""
    root = Path(lazy_dataclass.__file__).parents[1]
    found = [f.relative_to(root).as_posix() for f in root.rglob("*.py") if "import dataclass\n" in (t := f.read_text()) or
             "import dataclass," in t or ", dataclass" in t]  # fmt: skip
    of_the_library = [f for f in found if "from hotfuse.base.lazy_dataclass import dataclass" not in (root / f).read_text()]
    assert of_the_library == ["base/settings.py"]  # users ask for its signature
