"""Text that a model's code makes for nobody but a reader: what a check says where it fails, what a log or a warning says.

    torch_compilable_check(found == wanted, f"tokens: {found}, features: {wanted}")

Libraries make it in every call and show it in none, so nothing rests on the numbers in it. The source shows which text is a
message: an argument of a function whose name says that it checks or tells, and whose result nobody uses. Without a source, no text
counts as one.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
from types import FrameType

from hotfuse.frontends.process_effects import unwatched

_TELLS = re.compile(r"(^|_)(check|assert|warn|warning|deprecate|deprecated|debug|info|error|exception|log)(_|s?$)")
Span = tuple[tuple[int, int], tuple[int, int]]


def in_message(frame: FrameType) -> bool:
    """Whether the expression that a frame is at is a part of a message."""
    line, last, column, end = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if line is None or last is None or column is None or end is None:
        return False
    return any(begin <= (line, column) and (last, end) <= stop for begin, stop in _messages(frame.f_code.co_filename))


@functools.lru_cache(maxsize=64)
def _messages(file: str) -> tuple[Span, ...]:
    """Where a file has arguments of such calls."""
    with unwatched():  # it is not the model that reads its source
        source = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    found: list[Span] = []
    for node in ast.walk(tree):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and _TELLS.search(_name(call.func)):
            for arg in (*call.args, *(k.value for k in call.keywords)):
                if arg.end_lineno is not None and arg.end_col_offset is not None and not isinstance(arg, ast.Compare):
                    found.append(((arg.lineno, arg.col_offset), (arg.end_lineno, arg.end_col_offset)))
    return tuple(found)


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
