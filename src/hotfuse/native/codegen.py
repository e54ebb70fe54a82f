"""LLVM: text to object bytes. Importing this module loads LLVM, 75 MB: `native.jit` does it where something is to be compiled.

Linking is LLVM's business only where `native.link` does not know the machine.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Generator, Mapping, Sequence
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
    # The same holds for sinking addresses, compares and casts to where they are used: an eighth of the time, and no kernel faster.
    llvm.set_option("", "-disable-cgp")


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Around a fork: no thread is inside LLVM, so that the child may use it."""
    with _lock, llvm.ffi.lib._lock:  # pyright: ignore[reportPrivateUsage]
        yield


@functools.cache
def _machine(target: CpuTarget) -> Any:
    """LLVM's description of a target, which takes about a millisecond to make."""
    _initialize()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.feature_text, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )


def _parse(text: str) -> Any:
    """A verified module in a context of its own, so that its types are freed with it. The caller closes it: left to the
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


def _prepared(text: str, target: CpuTarget, *, passes: bool) -> tuple[Any, Any, dict[str, float]]:
    start = time.perf_counter()
    machine = _machine(target)
    module = _parse(text)
    parsed = time.perf_counter()
    if passes:
        _light_passes(module, machine)
    return module, machine, {"parse": parsed - start, "passes": time.perf_counter() - parsed}


def compile_object(text: str, target: CpuTarget, *, passes: bool) -> tuple[bytes, Mapping[str, float]]:
    """Object code of a module's text, for any target LLVM knows, and seconds per phase."""
    module, machine, seconds = _prepared(text, target, passes=passes)
    start = time.perf_counter()
    with contextlib.closing(module):
        code = bytes(machine.emit_object(module))
    seconds["codegen"] = time.perf_counter() - start
    return code, seconds


def assembly(text: str, target: CpuTarget, *, passes: bool) -> str:
    """The machine code of a module as assembler text, for a reader."""
    module, machine, _ = _prepared(text, target, passes=passes)
    with contextlib.closing(module):
        return str(machine.emit_assembly(module))


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


class _LinkedByLlvm:
    """Addresses by name; closing it frees the code."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def __getitem__(self, name: str) -> int:
        return int(self._tracker[name])

    def close(self) -> None:
        with _lock:
            self._tracker.close()


def link_object(code: bytes, names: Sequence[str], symbols: Mapping[str, int]) -> _LinkedByLlvm:
    """Object code linked by LLVM."""
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    for name, address in symbols.items():
        builder.import_symbol(name, address)
    for name in names:
        builder.export_symbol(name)
    with _lock:
        try:
            return _LinkedByLlvm(builder.link(*_linkers.next()))
        except RuntimeError as e:
            raise InternalError("object code does not link", because=str(e).strip()) from e
