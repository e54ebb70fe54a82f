"""Noticing that the user's model is no longer the one that was captured.

Checked on every call, so it is made of a few C-level sweeps: identities of module attributes, parameters, buffers and
hooks; addresses and versions of tensors. Snapshots hold references, so an address or identity cannot be reused. Of a model that
is hot, one native sweep (`unchanged`) answers nearly every call; where it does not, or cannot be had, Python looks.

| what happened | how it shows | what follows |
| --- | --- | --- |
| weights written (`load_state_dict`, an optimizer) | version | tier 0 reads live tensors; copies are stale |
| memory exchanged (`.to()`, `p.data = ...`) | address | the same; a new capture if the type changed |
| parts replaced, `train()`, attributes, hooks | identity, count | a new capture |
| methods and values of its classes exchanged | identity | a new capture |
| another class of a module (`m.__class__ = ...`) | identity | a new capture |
| what its code reads (`containers`): variables, entries of dicts, lists and objects | identity, count | a new capture |
| and defaults, slots, sets, arrays, the environment (`read_values`) | identity, equality | a new capture |
| tensors that it reads from elsewhere (`fixed_tensors`) | version, address | a new capture, where a graph holds such data |
| writes behind torch's back (`p.data`, NumPy, inference mode) | checksums, a chunk a call (`originals`) | copies are stale |
"""

from __future__ import annotations

import itertools
import operator
import sysconfig
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from hotfuse.base.faults import error_text
from hotfuse.frontends.derived_weights import derived_names
from hotfuse.runtime.background import Job
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.weights.class_code import behind, dicts_of, foreign, same_entry, unwrapped
from hotfuse.runtime.weights.containers import ClosureCell, Reads, reads
from hotfuse.runtime.weights.fixed_tensors import FixedTensors
from hotfuse.runtime.weights.read_values import ReadValues

if TYPE_CHECKING:
    from hotfuse.native.model_guard import Noted
    from hotfuse.runtime.weights.originals import Late, Originals

_WRITTEN_BY_PICKLING = frozenset({"_lineno_map", "_prologue_start"})
"""Attributes of an `fx.GraphModule` that no call reads and `__reduce__` replaces."""
_INTERNAL = (frozenset(nn.Module().__dict__) | _WRITTEN_BY_PICKLING) - {"training"}
_DICTS = ("__dict__", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_NOTHING = object()
_HOOKS_OF_ALL: list[dict[Any, Any]] = [
    getattr(torch.nn.modules.module, f"_global_{kind}")
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
]
"""Hooks that every module has (`register_module_forward_hook`)."""
_STANDARD = sysconfig.get_paths()["stdlib"]
_version = operator.attrgetter("_version")
NOTING_SHARE = 0.02
"""Part of the time that may go into noting anew what the native sweep compares with: some models set values in every call."""


class WeightChange(StrEnum):
    """What a check found."""

    NONE = "none"
    VALUES = "values"
    """Weights hold other numbers in the same place, or lie elsewhere with the same type."""
    UNSEEN = "unseen"
    """The same, and nothing but the numbers shows it."""
    MODEL = "model"
    """The captured graph may no longer describe the model."""


def _elsewhere(found: Reads, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules that code reads from somewhere else than its own attributes: out of a class, out of results that a function keeps."""
    known = set(map(id, modules))
    return [m for m in dict.fromkeys(m for top in found.modules for m in top.modules()) if id(m) not in known]


def _equal(new: Any, old: Any) -> bool:
    """Whether two numbers or texts are the same to any code: zeros of one sign, too."""
    return type(new) is type(old) and type(new) in (bool, int, float, str, bytes) and repr(new) == repr(old)


class _ByKey:
    """A dict of another class, asked by key whatever that makes of look-ups, and of keys that are not there."""

    __slots__ = ("_of",)

    def __init__(self, of: dict[Any, Any]) -> None:
        self._of = of

    def __getitem__(self, key: Any) -> Any:
        if (found := dict.get(self._of, key, _NOTHING)) is _NOTHING:
            raise KeyError(key)
        return found


def _installed(space: dict[str, Any]) -> bool:
    """Whether variables are those of a module of torch's, of the standard library or of an installed package."""
    file = space.get("__file__")
    return isinstance(file, str) and ("site-packages" in file or "dist-packages" in file or file.startswith(_STANDARD))


def _always() -> bool:
    """No native sweep: Python looks at every call."""
    return False


class ModelGuard:
    """A snapshot of modules and tensors that can be compared with the present at little cost.

    Global and closure variables count where `functions` and the modules' own `forward` name them. What is in `kept` (a dict and a
    name in it) comes with every call. `values` are classes of arguments and members of enumerations, which code reads as well.
    """

    def __init__(
        self, modules: Sequence[nn.Module], tensors: Sequence[torch.Tensor],
        functions: Sequence[Callable[..., Any]] = (), kept: Sequence[tuple[dict[str, Any], str]] = (),
        values: Sequence[Any] = (), state: Collection[int] = (),
    ) -> None:  # fmt: skip
        found = reads(modules, functions, values)
        if elsewhere := _elsewhere(found, modules):
            modules = (*modules, *elsewhere)
            found = reads(modules, functions, values)
        self._modules = tuple(modules)
        self._dicts: list[dict[Any, Any]] = [getattr(m, d) for m in modules for d in _DICTS]
        if modules:
            self._dicts += _HOOKS_OF_ALL
        derived = {id(m.__dict__): set(derived_names(m)) for m in modules}
        for owner, name in kept:  # every call sets them
            derived.setdefault(id(owner), set()).add(name)
        self._written = frozenset(id(owner) for owner, _ in kept)
        """Dicts whose tags say nothing: every call writes them."""
        places: list[tuple[Any, Any]] = [
            (d, key) for d in self._dicts for key in d if key not in _INTERNAL and key not in derived.get(id(d), ())
        ]
        own = {*map(id, tensors), *state}
        theirs = (itertools.chain(m.parameters(recurse=False), m.buffers(recurse=False)) for m in elsewhere)
        fixed = [*found.tensors, *itertools.chain.from_iterable(theirs)]
        self._fixed = FixedTensors([t for t in fixed if id(t) not in own])
        known = set(map(id, self._dicts))
        held, names, self._lists = [d for d in found.dicts if id(d) not in known], found.names, found.lists
        places += [(d, key) for d in held for key in list(d)]
        self._methods = [(d, name, d[name]) for d, name in (*found.entries, *found.methods)]
        kinds = [v for v in values if isinstance(v, type) and not foreign(v)]
        classes = [*behind(torch.Tensor), *(d for cls in dict.fromkeys([*map(type, modules), *kinds]) for d in dicts_of(cls))]
        self._dicts += [*held, *{id(d): d for d in (*(d for d, _ in found.entries), *classes)}.values()]
        methods = {id(unwrapped(f)) for _, _, f in self._methods}
        self._helpers = [f for f in found.functions if id(f) not in methods]
        self._values = ReadValues(found)
        self._take_functions()
        self.blind = found.blind
        """What its code reads whose changes nothing would show; a model with that keeps its own code."""
        self.beyond = "; its code reads more than is followed: changes of what lies beyond are not noticed" if found.cut else ""
        """Where code or data are too many to be watched: that, in words for `explain()`."""
        self._items: list[Any] = list(itertools.chain.from_iterable(self._lists))
        self._lengths = list(map(len, self._lists))
        self._inside = len(places)
        """How many of them are in the model; the others are variables that it names."""
        places += names
        self._owners = [d for d, _ in places]
        self._keys = [k for _, k in places]
        self._entries = [_ByKey(d) if isinstance(d, dict) and type(cast(Any, d)) is not dict else d for d in self._owners]
        """The same, to be asked by key."""
        self._held: list[Any] = list(map(operator.getitem, self._entries, self._keys))
        self._sizes = list(map(len, self._dicts))
        self._classes = [type(m) for m in modules]
        self._tensors = tuple(t for t in tensors if t.layout is torch.strided)
        self._plain = [i for i, t in enumerate(self._tensors) if not isinstance(t, nn.Parameter)]
        self.reads_data = False
        """Whether code reads what tensors hold that are neither arguments nor weights: then their values are the graph's."""
        self._versioned = tuple(t for t in self._tensors if not t.is_inference())
        self.differentiable = tuple(t for t in self._tensors if t.is_floating_point() or t.is_complex())
        """Those that may require gradients, now or later."""
        self.accepted = 0
        """How often other values were accepted: results of calls before that were computed with older ones."""
        self._memory: tuple[int, frozenset[int]] = (0, frozenset())
        self.unchanged: Callable[[], bool] = _always
        """True where nothing changed; False where `check` must tell."""
        self._given = False
        self._beside: Callable[[Job], None] | None = None
        """What runs jobs beside calls, once the model is hot."""
        self._noting, self._note_at = False, 0.0
        """Whether a job notes anew, and when the next one may."""
        self._tagged: Sequence[tuple[dict[Any, Any], int]] = ()
        """Dicts and their tags when all that is in them was as in the snapshot."""
        self._installed_dicts = {id(d): d for d, _ in names if isinstance(d, dict) and _installed(d)}
        """Variables of libraries: nothing happens to them as a rule, so that a tag speaks for all. Those that something happens to
        are looked up one by one from then on."""
        self.native: bool | str = False
        """Whether one native sweep answers most calls, or why it cannot."""
        self.swept = 0
        """Checks that the native sweep left to Python."""
        self.originals: Originals | None = None
        """What compares memory of weights that plans have copies of."""
        self.late: Late | None = None
        """How late the latest change was noticed that only memory shows."""
        self.accept(self.observe())

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Everything whose memory is watched."""
        return self._tensors

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules whose attributes are watched."""
        return self._modules

    @property
    def addresses(self) -> list[int]:
        """Where the tensors lay when they were last accepted."""
        return self._addresses

    def memory(self) -> frozenset[int]:
        """Where their storages begin, as far as was accepted."""
        accepted, found = self._memory
        if accepted != self.accepted:
            found = frozenset(t.untyped_storage().data_ptr() for t in self._tensors if t.numel())
            self._memory = self.accepted, found
        return found

    def observe(self) -> tuple[list[Any], list[int], list[int]]:
        """What the tensors are like now: kinds, versions and addresses."""
        return (
            [(t.dtype, t.shape, t.device, t.stride()) for t in self._tensors],
            list(map(_version, self._versioned)),
            list(map(torch.Tensor.data_ptr, self._tensors)),
        )

    def accept(self, observed: tuple[list[Any], list[int], list[int]]) -> None:
        """From here on, what was observed is no change.

        To be called when everything that held copies of older values is out of the way of calls: until then every thread must
        go on hearing of the change, and what is written after the observation must be heard of too.
        """
        self._kinds, self._versions, self._addresses = observed
        self.accepted += 1
        if self.native is True:
            self._note()

    def hardening_jobs(self, beside: Callable[[Job], None] | None = None) -> list[Job]:
        """A job that makes the check native, for a model that turned out to be hot; given out once. `beside` runs later ones."""
        given, self._given = self._given, True
        if not given:
            self._beside = beside
        return [] if given else [self.harden]

    def harden(self) -> None:
        """Have a native sweep answer from now on; for the background: it loads LLVM, and the first of a process compiles."""
        tagged = self._tags()
        if self.native is not False or self._look() is WeightChange.MODEL:
            return
        self._tagged = tagged
        try:
            self._note()
        except Exception as e:
            self.native = error_text(e)  # Python goes on looking, and nobody waits for more
            raise

    def _tags(self) -> list[tuple[dict[Any, Any], int]]:
        """The dicts whose tags tell of changes, and their tags now; empty where there are none."""
        from hotfuse.native import model_guard

        dicts = [*self._dicts, *self._values.environment, *self._values.kept_dicts, *list(self._installed_dicts.values())]
        dicts = [d for d in dicts if id(d) not in self._written] if self._written else dicts
        return list(zip(dicts, model_guard.tags(dicts), strict=False))

    def _take_functions(self) -> None:
        """Note the code and defaults of functions; methods may have been exchanged for copies."""
        self._values.take([*self._helpers, *(unwrapped(f) for _, _, f in self._methods)])

    def _noted(self) -> Noted:
        from hotfuse.native.model_guard import UNVERSIONED, Noted

        versions = dict(zip(map(id, self._versioned), self._versions, strict=True))
        places = list(zip(self._owners, self._keys, self._held, strict=True))
        tagged = self._tagged
        installed = self._installed_dicts.keys() & {id(d) for d, _ in tagged}
        outside = [(d, k, v) for d, k, v in places[self._inside :] if id(d) not in installed]
        outside += [(d, k, v) for d, k, v in places[: self._inside] if tagged and id(d) in self._written]
        return Noted(
            [d for d, _ in tagged] or [*self._dicts, *self._values.kept_dicts],
            [*places[: self._inside], *self._methods],
            [(d, k, v) for d, k, v in outside if not isinstance(d, ClosureCell)],
            [(c.cell, v) for c, _, v in outside if isinstance(c, ClosureCell)],
            [*((t, a, versions.get(id(t), UNVERSIONED)) for t, a in zip(self._tensors, self._addresses, strict=True)),
             *self._fixed.noted()],
            tuple(zip(self._lists, self._noted_items(), strict=True)),
            self._values.noted(tagged=bool(tagged)),
            [tag for _, tag in tagged],
            [d for d in self._dicts if id(d) in self._written],
            list(zip(self._modules, self._classes, strict=True)),
        )

    def _noted_items(self) -> list[list[Any]]:
        """What the lists held when they were noted."""
        items = iter(self._items)
        return [list(itertools.islice(items, n)) for n in self._lengths]

    def _note(self) -> None:
        """Have the native sweep compare with what is noted now, by one reference store."""
        from hotfuse.native.model_guard import refused, unchanged

        noted = self._noted()
        self.native = refused(noted) or True
        memory = self.originals.address if self.originals is not None else 0
        self.unchanged = unchanged(noted, memory) if self.native is True else _always

    def check(self) -> WeightChange:
        """Compare with the present; a change of values is reported until it is accepted."""
        slot = epochs.slot()
        outer, slot.epoch = slot.epoch, slot.epoch or epochs.now  # memory may be compared without the interpreter lock
        try:
            return WeightChange.NONE if self.unchanged() else self._compared()
        finally:
            slot.epoch = outer

    def _compared(self) -> WeightChange:
        """What Python finds; where that is nothing (a value was replaced by itself), the native sweep starts from here."""
        if self.native is not True:
            return self._with_memory(self._look())
        self.swept += 1
        if self._beside is None:
            return self._with_memory(self._noted_anew())
        change = self._look()
        if change is WeightChange.NONE and not self._noting and time.perf_counter() >= self._note_at:
            self._noting = True
            self._beside(self._note_later)
        return self._with_memory(change)

    def _note_later(self) -> None:
        """For the background: noting takes ten times as long as looking, and programs set values in several calls in a row."""
        begin = time.perf_counter()
        try:
            self._noted_anew()
        finally:
            self._note_at = time.perf_counter() + (time.perf_counter() - begin) / NOTING_SHARE
            self._noting = False

    def _noted_anew(self) -> WeightChange:
        """Look, and have the native sweep start from here where nothing changed."""
        tagged = self._tags()  # before the look: what changes meanwhile is heard of
        change = self._look()
        if change is WeightChange.NONE:
            before = {id(d): tag for d, tag in self._tagged}
            for key in [id(d) for d, tag in tagged if before.get(id(d), tag) != tag]:
                self._installed_dicts.pop(key, None)
            kept = {id(d) for d in (*self._dicts, *self._values.environment, *self._values.kept_dicts)}
            kept |= self._installed_dicts.keys()
            self._tagged = [(d, tag) for d, tag in tagged if id(d) in kept]
            self._note()
        return change

    def _with_memory(self, change: WeightChange) -> WeightChange:
        """The same, or what memory shows where nothing else changed."""
        if change is not WeightChange.NONE or self.originals is None:
            return change
        self.late = self.originals.look(native=self.native is True)
        return WeightChange.NONE if self.late is None else WeightChange.UNSEEN

    def owned(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of some weights that are the user's to write."""
        known = set(map(id, self._tensors))
        return {k: t for k, t in weights.items() if id(t) in known}

    def _look(self) -> WeightChange:
        if list(map(len, self._dicts)) != self._sizes or list(map(type, self._modules)) != self._classes:
            return WeightChange.MODEL
        try:
            if not all(map(operator.is_, map(operator.getitem, self._entries, self._keys), self._held)) and not self._same_values():
                return WeightChange.MODEL
        except KeyError:  # one attribute deleted and another set
            return WeightChange.MODEL
        if self._values.difference():
            return WeightChange.MODEL
        if not all(d.get(name) is f for d, name, f in self._methods):
            if not all(same_entry(d.get(name), f) for d, name, f in self._methods):
                return WeightChange.MODEL
            self._methods = [(d, name, d.get(name)) for d, name, _ in self._methods]
            self._take_functions()
        if (
            list(map(len, self._lists)) != self._lengths
            or not all(map(operator.is_, itertools.chain.from_iterable(self._lists), self._items))
        ):
            return WeightChange.MODEL
        if not self._fixed.same():
            return WeightChange.MODEL
        if (
            list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
            and list(map(_version, self._versioned)) == self._versions
        ):
            return WeightChange.NONE
        if self.reads_data and self._plain_written():
            return WeightChange.MODEL
        return WeightChange.VALUES if self.observe()[0] == self._kinds else WeightChange.MODEL

    def _plain_written(self) -> bool:
        """Whether a tensor was written that is no parameter."""
        versions = dict(zip(map(id, self._versioned), self._versions, strict=True))
        plain = ((self._tensors[i], self._addresses[i]) for i in self._plain)
        return any(t.data_ptr() != a or (not t.is_inference() and t._version != versions[id(t)]) for t, a in plain)

    def rests_on(self, *, data: bool, read: bool) -> None:
        """What graphs of the model hold: `data` of tensors that are none of its weights; and whether its code `read` plain ones."""
        self.reads_data = read
        self._fixed.matter = data or read

    def _same_values(self) -> bool:
        """Whether all that was replaced was replaced by an equal number or text, which is held from here on.

        Programs set what is set already (`model.temperature = float(request["temperature"])`), and pickling an `fx.GraphModule`
        writes its code again.
        """
        held: list[Any] = list(map(operator.getitem, self._entries, self._keys))
        if not all(new is old or _equal(new, old) for new, old in zip(held, self._held, strict=True)):
            return False
        self._held = held
        return True

    def difference(self) -> str:
        """What of the model is another one than in the snapshot, in words; empty where nothing is."""
        names = {id(getattr(m, d)): type(m).__name__ for m in self._modules for d in _DICTS}
        for owner, key, held in zip(self._owners, self._keys, self._held, strict=True):
            inside = isinstance(owner, dict)
            now = dict.get(cast(dict[Any, Any], owner), key, _NOTHING) if inside else owner[key]
            if now is not held and not _equal(now, held):
                return f"{names[id(owner)]}.{key}" if inside and id(owner) in names else f"{key!r} of what its code reads"
        for m, cls in zip(self._modules, self._classes, strict=True):
            if type(m) is not cls:
                return f"the class of a module, {type(m).__name__} where it was {cls.__name__}"
        for d, name, f in self._methods:
            if not same_entry(d.get(name), f):
                return f"the method {name} of a class in {d.get('__module__', '?')}"
        if said := self._values.difference():
            return said
        if not self._fixed.same():
            return "a tensor that its code reads from elsewhere"
        if self.reads_data and self._plain_written():
            return "a tensor whose data its code reads"
        for m, size, d in zip((m for m in self._modules for _ in _DICTS), self._sizes, self._dicts, strict=False):
            if len(d) != size:
                return f"an attribute or hook that {type(m).__name__} has now"
        return "a list or dict that its code reads" if self._look() is WeightChange.MODEL else ""

    def stats(self) -> dict[str, Any]:
        """For `stats()`: who checks, and how many checks the native sweep left to Python."""
        return {"native": self.native is True, "why_not": self.native if isinstance(self.native, str) else "", "left": self.swept}

    def same_now(self) -> bool:
        """Whether nothing at all changed since the snapshot (for captures that take a while)."""
        return self.check() is WeightChange.NONE
