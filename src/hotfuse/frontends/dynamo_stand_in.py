"""Tracing without loading Dynamo: a file of operators has no Python code that it could compile.

Torch's tracer imports Dynamo for two questions: whether its check of sizes by a theorem prover is on, and how to keep Dynamo from
compiling the tracer's own functions; and Inductor for a setting. Loading them takes longer than capturing a small model. In a
process that has not loaded them the answers are known: modules stand in that give these, and become the real ones when asked for
anything else. Sizes that are symbols ask which files are torch's own, and that is known too. What fails meanwhile is done again
with the real ones (`compile.requests`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

import torch
from torch.fx.experimental import _config as sizes_config

_TORCH = os.path.dirname(torch.__file__) + os.sep
DYNAMO, INDUCTOR, VALIDATOR = "torch._dynamo", "torch._inductor", "torch.fx.experimental.validator"

SPREAD = "torch.distributed.tensor"


class UnloadedModule(ModuleType):
    """A module that is loaded when something is asked of it that is not known without."""

    def __init__(self, name: str, known: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(name, "Stands in until it is needed.")
        found = find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            self.__path__ = list(found.submodule_search_locations)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # every import asks, and so do loops over all modules
            raise AttributeError(name)
        if self.__name__ == INDUCTOR and find_spec(f"{INDUCTOR}.{name}") is not None:
            raise AttributeError(name)  # a part that nobody has imported; an import that asks goes on to do it
        return getattr(loaded(self.__name__), name)


class _Parts(MetaPathFinder):
    """Dynamo's parts import each other in circles that only its beginning gets through: for a part, the whole is loaded first."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a submodule that loading the package loaded as well; None for whatever is found as usual."""
        if fullname.rpartition(".")[0] != DYNAMO or not isinstance(sys.modules.get(DYNAMO), UnloadedModule):
            return None
        loaded(DYNAMO)
        return spec_from_loader(fullname, _There(sys.modules[fullname])) if fullname in sys.modules else None


class _There(Loader):
    """Loads nothing: its module exists already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Itself."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It has run."""
        module.__spec__ = self._spec


def loaded(name: str) -> ModuleType:
    """The real module, in the place of what stands in for it."""
    if not isinstance(sys.modules.get(name), UnloadedModule):
        return import_module(name)
    del sys.modules[name]
    parent, _, child = name.rpartition(".")
    vars(sys.modules[parent]).pop(child, None)
    made = import_module(name)
    for part in [n for n in sys.modules if n.rpartition(".")[0] == name]:
        vars(made).setdefault(part[len(name) + 1 :], sys.modules[part])  # what was imported before it was
    return made


def _disable(fn: Any = None, recursive: bool = True, **more: Any) -> Any:  # noqa: FBT001, FBT002  (as torch has it)
    """What the tracer's own functions are called through: themselves, as nothing here compiles what is called."""
    if fn is not None and more == {"wrapping": False}:
        return fn
    return loaded(DYNAMO).disable(fn, recursive, **more)


def _validates() -> bool:
    return bool(sizes_config.translation_validation) and loaded(VALIDATOR).translation_validation_enabled()


def stand_in_installed() -> bool:
    """Whether anything stands in for what is not loaded."""
    return any(isinstance(sys.modules.get(name), UnloadedModule) for name in (DYNAMO, INDUCTOR, VALIDATOR))


def remove_stand_in() -> None:
    """Load what was stood in for, if anything was: Python code of a model may ask for all of it."""
    for name in (DYNAMO, INDUCTOR, VALIDATOR):
        if isinstance(sys.modules.get(name), UnloadedModule):
            loaded(name)


class _NoTensor:
    """What no tensor is."""


class _TorchsFiles:
    """Torch's own source files, told by where they lie. Torch asks of each frame whether its file is one."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name == "<string>" or name.startswith(_TORCH))


def _in_a_group() -> bool:
    """Whether this process, or the one that it was forked from, works together with others."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def symbols_without_dynamo() -> Generator[None]:
    """While a file is traced: for every symbol, and for what is asked of it, torch notes the line of code that is not its own. To
    tell which files are its own it imports Dynamo, Inductor and `torch.export`, for messages alone.

    And its dispatcher asks once in a process, and for good, for the class of tensors that are spread over processes, to treat them
    in its own way: it gets one that no tensor has. Such tensors raise in this process from then on, so it is not done in a worker
    of a process that belongs to a group; others have none.
    """
    if not isinstance(sys.modules.get(DYNAMO), UnloadedModule):
        yield
        return
    from torch.fx.experimental import symbolic_shapes

    import_module("torch._higher_order_ops.triton_kernel_wrap")  # the tracer takes it for loaded, as Dynamo does that
    real = symbolic_shapes.uninteresting_files
    symbolic_shapes.uninteresting_files = _TorchsFiles  # type: ignore[assignment]
    spread = None if SPREAD in sys.modules or _in_a_group() else UnloadedModule(SPREAD, {"DTensor": _NoTensor})
    if spread is not None:
        sys.modules[SPREAD] = spread
    try:
        yield
    finally:
        symbolic_shapes.uninteresting_files = real
        if spread is not None and sys.modules.get(SPREAD) is spread:
            del sys.modules[SPREAD]  # who asks for it behind this gets the real one


def install_stand_in() -> None:
    """From now on, where it is not loaded yet. For workers: nothing is compiled by Dynamo there."""
    answers = {DYNAMO: {"disable": _disable}, INDUCTOR: {}, VALIDATOR: {"translation_validation_enabled": _validates}}
    for name, known in answers.items():
        if name not in sys.modules:
            sys.modules[name] = UnloadedModule(name, known)
    if isinstance(sys.modules[DYNAMO], UnloadedModule):
        import_module(f"{DYNAMO}.config")  # a table of settings, which is asked for by itself
        if not any(isinstance(f, _Parts) for f in sys.meta_path):
            sys.meta_path.insert(0, _Parts())
