"""What is read off instructions is what `dis` says of them."""

from __future__ import annotations

import dis
import json
import types
from typing import Any

import torch

from hotfuse.base.bytecode import globals_of


def test_globals_are_read_off_the_instructions_as_dis_does() -> None:
    """With arguments that look like the instruction, and so many names that one byte does not hold their number."""
    names = [f"name{i}" for i in range(600)]
    made: dict[str, Any] = {}
    exec("def many(x):\n" + "".join(f"    x = x.{n} + {n}(x, 116, 0x7474)\n" for n in names) + "    return lambda: other", made)
    functions = [made["many"], *(f for f in vars(torch.nn.functional).values() if isinstance(f, types.FunctionType))]
    functions += [f for f in vars(json.JSONEncoder).values() if isinstance(f, types.FunctionType)]
    assert len(functions) > 100
    for f in functions:
        codes = [f.__code__]
        for code in codes:
            codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        expected = {i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
        assert set(globals_of(f.__code__)) == expected
    assert {*names, "other"} == set(globals_of(made["many"].__code__))
