"""Which environment variables a model's code reads.

Most models of transformers come by code that asks for a variable of its own (`os.getenv("FLASH_ATTENTION_DETERMINISTIC")`).
Programs and libraries set others at any time (`torch.compile` does, tokenizers do), which is no change of the model.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Sequence

NAMES = frozenset({"environ", "environb", "getenv", "getenvb"})
"""What code that reads the environment names."""
_LOOK_UPS = frozenset({"get", "__getitem__", "__contains__", "setdefault"})
_BETWEEN = frozenset({"PUSH_NULL", "PRECALL", "KW_NAMES"})


@functools.lru_cache(maxsize=1024)
def variables_of(code: types.CodeType) -> frozenset[str] | None:
    """The variables that code names where it reads the environment, functions inside it included; None where it reads any in
    another way: under a name that it computes, or all of them.
    """
    found: set[str] = set()
    steps = [i for i in dis.get_instructions(code) if i.opname not in _BETWEEN]
    steps += steps[-1:] * 2  # padding: a look behind a read finds the end
    for at, step in enumerate(steps):
        if step.argval in NAMES and step.opname.startswith("LOAD_") and step.opname != "LOAD_CONST":
            if (name := _variable(steps, at)) is None:
                return None
            found.add(name)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if (more := variables_of(inner)) is None:
                return None
            found |= more
    return frozenset(found)


def _variable(steps: Sequence[dis.Instruction], at: int) -> str | None:
    """The variable that the step's environment, or function of it, is asked for."""
    whole = steps[at].argval.startswith("environ")
    asked = at + 1 + (whole and steps[at + 1].argval in _LOOK_UPS)
    if whole and asked == at + 1:
        if steps[asked].opname == "CONTAINS_OP":  # "NAME" in os.environ
            asked = at - 1 - (steps[at].opname == "LOAD_ATTR")
        elif not steps[asked + 1].opname.endswith("_SUBSCR"):
            return None
    elif not _called(steps, asked):
        return None
    name = steps[asked].argval if asked >= 0 and steps[asked].opname == "LOAD_CONST" else None
    return name if isinstance(name, str) else None


def _called(steps: Sequence[dis.Instruction], first: int) -> bool:
    """Whether the constants from there on are all that a function is called with: else it may be handed to another one."""
    behind = first
    while steps[behind].opname == "LOAD_CONST":
        behind += 1
    return steps[behind].opname == "CALL" and steps[behind].arg == behind - first
