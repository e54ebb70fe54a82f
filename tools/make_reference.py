"""Write docs/reference/*.md from the code: public names, settings, reasons, commands.

    python tools/make_reference.py            write
    python tools/make_reference.py --check    exit status 1 where a file is not what would be written
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- written by tools/make_reference.py; edit the code, then run it again -->\n"


def _doc(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


def _source_signature(function: Any) -> str:
    """The parameters as the code writes them: the same on every version of Python."""
    code = inspect.unwrap(function).__code__
    node = _functions(code.co_filename)[code.co_firstlineno]
    args, drop = copy.copy(node.args), {"self", "cls"}
    args.posonlyargs = [a for a in args.posonlyargs if a.arg not in drop]
    args.args = [a for a in args.args if a.arg not in drop]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"({ast.unparse(args)}){returns}"


@functools.cache
def _functions(path: str) -> dict[int, ast.FunctionDef | ast.AsyncFunctionDef]:
    """A file's functions by the line that each begins in, decorators included: `inspect.getsource` looks through every module that
    the process has imported, of which a process of tests has thousands.
    """
    found = (n for n in ast.walk(_parsed(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {min(n.lineno, *(d.lineno for d in n.decorator_list), n.lineno): n for n in found}


@functools.cache
def _parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def _members(kind: type) -> list[str]:
    """Public methods and properties that the class itself defines."""
    out: list[str] = []
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            out.append(f"- `{name}`: {_doc(member)}")
            continue
        function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if inspect.isfunction(function) and function.__doc__:
            out.append(f"- `{name}{_source_signature(function)}`: {' '.join(_doc(function).split())}")
    return out


def api() -> str:
    """Every public name of the package."""
    import hotfuse

    out = ["# Python\n", NOTE, _doc(hotfuse) and f"```text\n{_doc(hotfuse)}\n```\n"]
    for name in hotfuse.__all__:
        thing = getattr(hotfuse, name)
        if inspect.isfunction(thing):
            out.append(f"## `hotfuse.{name}{_source_signature(thing)}`\n\n{_doc(thing)}\n")
        elif isinstance(thing, type):
            made = vars(thing).get("__init__")
            plain = dataclasses.is_dataclass(thing) or not inspect.isfunction(made)
            out.append(f"## `hotfuse.{name}{'' if plain else _source_signature(made)}`\n\n{_doc(thing)}\n")
            out += [*_members(thing), ""] if not issubclass(thing, BaseException) else []
    return "\n".join(out).rstrip() + "\n"


def settings() -> str:
    """Fields of `Settings`, with what the source says below each of them."""
    import hotfuse
    from hotfuse.base import settings as home

    tree = _parsed(str(home.__file__))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Settings").body
    told: dict[str, str] = {}
    for field, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            told[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    rows: list[str] = []
    for f in dataclasses.fields(hotfuse.Settings):
        variable = f"`{f.metadata['variable']}`" if "variable" in f.metadata else ""
        rows.append(f"| `{f.name}` | {variable} | `{f.metadata.get('default', f.default)}` | {told.get(f.name, '')} |")
    told_first = (
        "`hotfuse.Settings(...)`, for `hotfuse.jit(settings=...)` and `InferenceSession(settings=...)`. A field that is not given "
        "takes the value of its environment variable, if that is set, and its default otherwise.\n"
    )
    head = ["# Settings\n", NOTE, told_first,
            "| field | environment | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows]) + "\n"


def decisions() -> str:
    """Every action and reason that `explain()` can show."""
    from hotfuse.base.events import Action, Why

    rows = [f"| `{w.name}` | {w.value} |" for w in Why]
    actions = ", ".join(f"`{a.value}`" for a in Action)
    return "\n".join(["# Decisions\n", NOTE, f"Actions: {actions}.\n", "| reason | in words |", "| --- | --- |", *rows]) + "\n"


def cli() -> str:
    """Every command with its options."""
    import typer.main

    from hotfuse.cli import app

    out = ["# Command line\n", NOTE]
    _commands("hotfuse", typer.main.get_command(app), out)
    return "\n".join(out).rstrip() + "\n"


def _commands(name: str, command: Any, out: list[str]) -> None:
    out.append(f"## `{name}`\n\n{inspect.cleandoc(command.help or '')}\n")
    rows: list[str] = []
    for p in command.params:
        shown = ", ".join(p.opts) if p.param_type_name == "option" else p.name.upper()
        told = " ".join((getattr(p, "help", None) or "").split())
        rows.append(f"| `{shown}` | {told} |")
    if rows:
        out += ["| option | meaning |", "| --- | --- |", *rows, ""]
    for sub, inner in getattr(command, "commands", {}).items():
        _commands(f"{name} {sub}", inner, out)


PAGES = {"python.md": api, "settings.md": settings, "decisions.md": decisions, "cli.md": cli}


def stale() -> list[str]:
    """Pages that are not what the code says."""
    return [n for n, make in PAGES.items() if not (FOLDER / n).is_file() or (FOLDER / n).read_text(encoding="utf-8") != make()]


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        found = stale()
        print("\n".join(f"docs/reference/{n} is not current: python tools/make_reference.py" for n in found) or "current")
        return 1 if found else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
