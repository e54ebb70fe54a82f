"""LLVM IR text to object bytes, and object bytes to addresses. The two may happen in different processes.

    text --compile_object--> bytes --load_object--> Loaded(addresses)

Generating and compiling holds the interpreter lock for milliseconds, so it belongs in a worker; loading takes a fraction
of a millisecond. Code lives as long as its `Loaded` handle.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm

from hotfuse.base.errors import InternalError
from hotfuse.native.target import CpuTarget

EACH = 8
"""Pieces of code that one linker takes. It keeps about 9 kB of every piece that was ever linked into it, so it has to go in its
turn; making one takes as long as linking."""

_lock = threading.Lock()


@functools.cache
def _initialize() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    # Index arithmetic is already hoisted to where it changes; looking for better takes LLVM longer than all the rest.
    llvm.set_option("", "-disable-lsr")


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Around a fork: no thread is inside LLVM, so that the child may use it."""
    with _lock, llvm.ffi.lib._lock:  # pyright: ignore[reportPrivateUsage]
        yield


@dataclass(frozen=True, slots=True)
class Compiled:
    """Object code with what it took to make it."""

    code: bytes
    """An ELF object."""
    seconds: Mapping[str, float]
    """Time per phase: parse, passes, codegen."""


@functools.cache
def _machine(target: CpuTarget) -> Any:
    """LLVM's description of a target, which takes about a millisecond to make."""
    _initialize()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.feature_text, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )


def _parse(text: str) -> Any:
    """A verified module in a context of its own, so that its types are freed with it. Whoever asked for it closes it: left to the
    collector of cycles, the context might go first, and LLVM would free the module's types twice.
    """
    try:
        module = llvm.parse_assembly(text, context=llvm.create_context())
        module.verify()
    except RuntimeError as e:
        raise InternalError("generated LLVM IR is not well formed", because=str(e).strip()) from e
    return module


def _light_passes(module: Any, machine: Any) -> None:
    """Clean up what generating leaves behind; nothing is vectorized or unrolled.

    Off by default: emission already hoists and shares index arithmetic, so on GEMM, softmax and elementwise kernels these passes
    cost 1 to 3 ms and gained nothing.
    """
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    manager = llvm.create_new_function_pass_manager()
    manager.add_instruction_combine_pass()
    manager.add_simplify_cfg_pass()
    for function in module.functions:
        if not function.is_declaration:
            manager.run(function, builder)


def _prepared(text: str, target: CpuTarget, passes: bool) -> tuple[Any, Any, dict[str, float]]:
    start = time.perf_counter()
    machine = _machine(target)
    module = _parse(text)
    parsed = time.perf_counter()
    if passes:
        _light_passes(module, machine)
    return module, machine, {"parse": parsed - start, "passes": time.perf_counter() - parsed}


def compile_object(text: str, target: CpuTarget, *, passes: bool = False) -> Compiled:
    """Object code of a module's text, for any target LLVM knows."""
    module, machine, seconds = _prepared(text, target, passes)
    start = time.perf_counter()
    with contextlib.closing(module):
        code = bytes(machine.emit_object(module))
    seconds["codegen"] = time.perf_counter() - start
    return Compiled(code, seconds)


def assembly(text: str, target: CpuTarget, *, passes: bool = False) -> str:
    """The machine code of a module as assembler text, for a reader."""
    module, machine, _ = _prepared(text, target, passes)
    with contextlib.closing(module):
        return str(machine.emit_assembly(module))


class Loaded:
    """Code in this process: addresses by name. Dropping the handle, or `release`, frees the code."""

    def __init__(self, tracker: Any, names: Sequence[str]) -> None:
        self._tracker = tracker
        self._addresses = {n: int(tracker[n]) for n in names}

    def address(self, name: str) -> int:
        """Where a function starts."""
        if self._tracker is None:
            raise InternalError(f"the code of {name!r} has been released")
        return self._addresses[name]

    def release(self) -> None:
        """Free the code now; no call may be in it."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with _lock:
                tracker.close()

    @property
    def released(self) -> bool:
        """Whether the code is gone."""
        return self._tracker is None


class _Linkers:
    """The linker that takes the next piece of code. Those before it go with the last code that they linked."""

    def __init__(self) -> None:
        self._current: Any = None
        self._room = 0
        self._names = itertools.count(1)

    def next(self) -> tuple[Any, str]:
        """A linker, and what the piece is called there; under the lock."""
        if not self._room:
            _initialize()
            machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
                opt=3, reloc="pic", codemodel="jitdefault", jit=True
            )
            self._current, self._room = llvm.create_lljit_compiler(machine), EACH
        self._room -= 1
        return self._current, f"hotfuse{next(self._names)}"


_linkers = _Linkers()


def load_object(code: bytes, names: Sequence[str], symbols: Mapping[str, int] | None = None) -> Loaded:
    """Link object code into this process; `symbols` are addresses it may refer to, beside the C library's functions."""
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    for name, address in (symbols or {}).items():
        builder.import_symbol(name, address)
    for name in names:
        builder.export_symbol(name)
    with _lock:
        try:
            tracker = builder.link(*_linkers.next())
        except RuntimeError as e:
            raise InternalError("object code does not link", because=str(e).strip()) from e
    return Loaded(tracker, names)
