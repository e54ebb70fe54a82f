"""`hotfuse cache` and `hotfuse keys`: what outlives processes, whether it is believed, making it smaller, and who signs it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.cli.output import heading, print_json, reports_errors, rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotfuse.cache.folder import Folder
    from hotfuse.cache.keys import Verifier

cache = typer.Typer(help="The cache of captured graphs and object code: what it holds, whether it is believed, its size.",
                    no_args_is_help=True)  # fmt: skip
At = Annotated[str | None, typer.Option("--folder", help="The folder; the default is that of the settings.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def _open(at: str | None) -> Folder:
    """A folder that exists: looking at one must not begin it."""
    from hotfuse.cache.place import opened, root_of

    settings = Settings().with_(**({"cache": at} if at else {}))
    root = root_of(settings)
    if root is None:
        raise InputError("the settings keep nothing", hint="--folder, or HOTFUSE_CACHE")
    if not root.exists():
        raise InputError(f"there is no cache at {root}", hint="--folder, or HOTFUSE_CACHE")
    if not root.is_dir():
        raise InputError(f"there is no cache at {root}", because="it is no folder", hint="--folder, or HOTFUSE_CACHE")
    found = opened(root, settings)
    if isinstance(found, str):
        raise InputError(f"the cache at {root} cannot be used", because=found)
    return found


@cache.command()
@reports_errors
def ls(at: At = None, as_json: AsJson = False) -> None:
    """Entries with size and when they were last used, the most recent first."""
    held = _open(at)
    found = held.entries()[::-1]
    if as_json:
        print_json({"place": str(held.root), "limit": held.limit, "bytes": sum(h.bytes for h in found),
                    "entries": [{"name": h.name, "bytes": h.bytes, "used": h.used} for h in found]})  # fmt: skip
        return
    when = "%Y-%m-%d %H:%M:%S"
    rows(("entry", "bytes", "used"), [(h.name, h.bytes, time.strftime(when, time.localtime(h.used))) for h in found])
    rows(("", ""), [(f"{len(found)} entries in {held.root}", f"{sum(h.bytes for h in found)} of {held.limit} bytes")], header=False)


@cache.command()
@reports_errors
def verify(at: At = None, as_json: AsJson = False) -> None:
    """Check every entry's signature, name and features; exits with 1 where one would be refused."""
    held = _open(at)
    reasons = {h.file: held.verify(h) for h in held.entries()}
    refused = {name: why for name, why in reasons.items() if why}
    if as_json:
        print_json({"place": str(held.root), "entries": len(reasons), "refused": refused})
    else:
        rows(("entry", "refused because"), refused.items(), header=bool(refused))
        counts = Counter(refused.values())
        said = ", ".join(f"{n} refused: {why}" for why, n in counts.items()) or "all are believed"
        rows(("", ""), [(f"{len(reasons)} entries", said)], header=False)
    if refused:
        raise typer.Exit(1)


@cache.command()
@reports_errors
def gc(
    at: At = None, limit: Annotated[int | None, typer.Option("--bytes", min=0, help="Keep at most so many; 0 empties it.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Let the least recently used entries leave until the rest is within the limit."""
    held = _open(at)
    gone = held.collect(limit)
    left = held.entries()
    if (size := sum(h.bytes for h in left)) > (held.limit if limit is None else limit):
        raise InputError(f"{size} bytes are left in {held.root}", because="entries cannot be removed there", hint="its permissions")
    found = {"place": str(held.root), "removed_bytes": gone, "entries": len(left), "bytes": sum(h.bytes for h in left)}
    if as_json:
        print_json(found)
    else:
        rows(("fact", "value"), found.items(), header=False)


@reports_errors
def keys(
    make: Annotated[Path | None, typer.Option("--make", help="Make a key in this file, for machines that share a cache.")] = None,
    pair: Annotated[Path | None, typer.Option("--make-pair", help="Make a key pair: this file signs, FILE.pub believes.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """The keys that sign entries and are believed: where they are and what they are called, never what they are."""
    from hotfuse.cache.keys import USER_KEY, make_key, make_pair, public_files, read_key, read_public

    settings = Settings()
    if make is not None and pair is not None:
        raise InputError("two kinds of key are asked for", hint="--make or --make-pair")
    wanted = make or pair
    if wanted is not None and wanted.exists():
        raise InputError(f"{wanted} exists", hint="another name: a key is never replaced")
    places: list[tuple[str, Path, Callable[[Path], Verifier]]] = []
    if wanted is not None:
        places.append(("made", wanted, make_key if make is not None else make_pair))
    else:
        places += [("shared", Path(settings.cache_key).expanduser(), read_key)] if settings.cache_key else []
        own = settings.folder / USER_KEY
        places += [("own", own, read_key)] if own.exists() else []
        places += [("trusted", path, read_public) for path in public_files(settings.trusted_keys)]
    found = [{"kind": kind, "name": read(path).name, "path": str(path)} for kind, path, read in places]
    if as_json:
        print_json(found)
    else:
        rows(("key", "name", "file"), [(f["kind"], f["name"], f["path"]) for f in found])
        if not found:
            heading("none yet: the user's own is made when something is first kept")
