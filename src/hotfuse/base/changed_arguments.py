"""What a call changes in its arguments, as part of what it gives.

    after  ::= after(result, contents of each holder)
    contents ::= same | contents(keys, children)      a child that is what it was before is `same`

A call may give its result, and change the lists, dicts and objects it was given (`base.structure`: holders): a key/value
cache grows, a list is appended to. Both are taken apart together, so that an object that the call made and put in two places
is one object again. A plan that computes the leaves can then do to the caller's objects what the call would have done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotfuse.base.structure import Spec, StructureBuilder, Taken, Taker, attributes

SAME = Spec("same")
Contents = list[Any] | dict[Any, Any]


def contents(holder: Any) -> Contents:
    """A copy of what a holder holds, by place or by name."""
    if type(holder) is list:
        return list(holder)
    if type(holder) is dict:
        return dict(holder)
    return {k: getattr(holder, k) for k in attributes(holder) or ()}


def take_after(result: Any, holders: Sequence[Any], before: Sequence[Contents]) -> Taken:
    """A result and what its call changed, taken apart: `holders` are those of the arguments, `before` what they held."""
    taker = Taker(numbers=True, known=holders)
    specs = [taker.take(result)]
    for holder, old in zip(holders, before, strict=True):
        specs.append(_changes(taker, holder, old))
    return Taken(taker.leaves, Spec("after", None, None, tuple(specs)), taker.holders)


def _changes(taker: Taker, holder: Any, old: Contents) -> Spec:
    new = contents(holder)
    inside = type(holder) not in (list, dict)
    if isinstance(new, list):
        assert isinstance(old, list)
        if len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True)):
            return SAME
        return Spec("contents", list, None, tuple([taker.take(o, inside=inside) for o in new]))
    assert isinstance(old, dict)
    if list(new) == list(old) and all(new[k] is old[k] for k in new):
        return SAME
    children = tuple([SAME if k in old and new[k] is old[k] else taker.take(new[k], inside=inside) for k in new])
    return Spec("contents", type(holder), tuple(new), children)


def changes_nothing(spec: Spec) -> bool:
    """Whether the call left its arguments as they were, and its result is none of them."""
    return all(s is SAME for s in spec.children[1:]) and not refers_to_arguments(spec)


def refers_to_arguments(spec: Spec) -> bool:
    """Whether a list, dict or object that the call was given is in its result."""
    return _refers(spec.children[0], len(spec.children) - 1)


def _refers(spec: Spec, known: int) -> bool:
    return (spec.kind == "ref" and spec.detail < known) or any(_refers(c, known) for c in spec.children)


def finish(spec: Spec, leaves: Sequence[Any], holders: Sequence[Any]) -> Any:
    """Do to the holders what the call would have done, and give its result.

    Everything is put together before anything is changed.
    """
    builder = StructureBuilder(leaves, holders)
    result = builder.build(spec.children[0])
    made = [
        (holder, s, [c if c is SAME else builder.build(c) for c in s.children])
        for holder, s in zip(holders, spec.children[1:], strict=True)
        if s is not SAME
    ]
    for holder, s, values in made:
        _write(holder, s, values)
    return result


def _write(holder: Any, spec: Spec, values: list[Any]) -> None:
    if spec.cls is list:
        holder[:] = values
        return
    if spec.cls is dict:
        new = {k: holder[k] if v is SAME else v for k, v in zip(spec.detail, values, strict=True)}
        if tuple(holder) != spec.detail:
            holder.clear()
        holder.update(new)
        return
    for name in attributes(holder) or ():
        if name not in spec.detail:
            object.__delattr__(holder, name)
    for name, value in zip(spec.detail, values, strict=True):
        if value is not SAME:
            object.__setattr__(holder, name, value)
