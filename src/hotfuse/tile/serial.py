"""A kernel whose loops all run on the thread that calls it: for work that is too small to be worth waking others for."""

from __future__ import annotations

from dataclasses import replace

from hotfuse.tile.program import Instr, Kernel, Loop, LoopKind, Stmt, When

SUFFIX = "_one_thread"


def one_thread(kernel: Kernel) -> Kernel | None:
    """The same kernel without parallel loops, under a name of its own; None where it has none."""
    body = _serial(kernel.body)
    return None if body == kernel.body else replace(kernel, name=f"{kernel.name}{SUFFIX}", body=body)


def _serial(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    made: list[Stmt] = []
    for stmt in stmts:
        match stmt:
            case Instr():
                made.append(stmt)
            case When():
                made.append(replace(stmt, body=_serial(stmt.body)))
            case Loop():
                kind = LoopKind.SERIAL if stmt.kind is LoopKind.PARALLEL else stmt.kind
                made.append(replace(stmt, kind=kind, body=_serial(stmt.body)))
    return tuple(made)
