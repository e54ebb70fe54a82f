"""The names that code reads, off its instructions.

A large model's code has ten thousand instructions. `dis` describes each of them, which took a third of the time in which a known
model is recognized; here the few that are wanted are found by searching for their byte.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator

LOAD_GLOBAL, IMPORT_NAME = dis.opmap["LOAD_GLOBAL"], dis.opmap["IMPORT_NAME"]


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The global names that code reads, functions inside it included; names of attributes are not among them."""
    names = [code.co_names[argument >> 1] for argument in _arguments(code.co_code, LOAD_GLOBAL)]  # the last bit is no name's
    names += [n for inner in _inside(code) for n in globals_of(inner)]
    return tuple(dict.fromkeys(names))


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Names of variables and attributes that code uses, functions inside it included."""
    return frozenset(code.co_names).union(*map(names_of, _inside(code)))


@functools.lru_cache(maxsize=4096)
def texts_of(code: types.CodeType) -> frozenset[str]:
    """Texts among its constants, those of functions inside it included: what `getattr` and `globals()` may be asked for."""
    own = (c for c in code.co_consts if isinstance(c, str))
    return frozenset(own).union(*map(texts_of, _inside(code)))


@functools.lru_cache(maxsize=4096)
def imports_of(code: types.CodeType) -> frozenset[str]:
    """Modules that code imports when it runs, functions inside it included; of relative ones what stands behind the dots."""
    own = (code.co_names[argument] for argument in _arguments(code.co_code, IMPORT_NAME))
    return frozenset(own).union(*map(imports_of, _inside(code)))


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    return (c for c in code.co_consts if isinstance(c, types.CodeType))


def _arguments(instructions: bytes, wanted: int) -> Iterator[int]:
    """The arguments of the instructions of one kind: two bytes each, an instruction and its argument, whose higher bytes stand in
    instructions of their own before it. What the interpreter caches between them reads as zeros."""
    at = -1
    while (at := instructions.find(wanted, at + 1)) >= 0:
        if at % 2:  # an argument that looks like it
            continue
        argument, shift, before = instructions[at + 1], 8, at - 2
        while before >= 0 and instructions[before] == dis.EXTENDED_ARG:
            argument, shift, before = argument | instructions[before + 1] << shift, shift + 8, before - 2
        yield argument
