"""The profile store or the fleet's database that a command looks at, and the machines in it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings

if TYPE_CHECKING:
    from hotfuse.profile.rows import StoredMachine
    from hotfuse.profile.store import Store

At = Annotated[
    str | None, typer.Option("--store", help="A path, sqlite:///path or postgresql://…; the default is that of the settings.")
]


def open_store(at: str | None = None, *, begin: bool = False) -> Store:
    """A store that exists: looking at one must not begin it, nor put a damaged one aside unseen. `begin`: or a new one."""
    from hotfuse.profile.database import damaged
    from hotfuse.profile.store import Store, store_place
    from hotfuse.profile.store_place import central, location

    place = at or central(Settings()) or location(Settings())
    file = store_place(place)
    there = file.exists() if isinstance(file, Path) else file is not None
    if not begin and not there:
        raise InputError(f"there is no profile store at {place}", hint="--store, or HOTFUSE_PROFILES")
    if isinstance(file, Path) and damaged(file):
        raise InputError(f"{file} is no profile store, or a damaged one", because="SQLite finds fault with it",
                         hint="nothing was done to it; a process that serves puts its own aside and begins a new one")
    store = Store.open(place)
    if isinstance(file, Path) and store.path is None and store.database.copied is None:
        store.close()
        raise InputError(f"the profile store {file} cannot be read", because="; ".join(store.notes), hint="hotfuse doctor")
    return store


@contextlib.contextmanager
def changed_store(at: str | None, *, begin: bool = False) -> Generator[Store]:
    """A store that the command changes: where it cannot be written, that is an error, and not a change of a copy in memory."""
    with open_store(at, begin=begin) as store:
        _check_writable(store)
        try:
            yield store
        except sqlite3.Error as e:
            raise _unwritable(store, str(e)) from e
        _check_writable(store)


def _check_writable(store: Store) -> None:
    from hotfuse.profile.postgres import PostgresDatabase

    if isinstance(store.database, PostgresDatabase):
        return
    if store.path is None:
        raise _unwritable(store, "; ".join(store.notes))
    for place in (store.path, store.path.parent):
        if not os.access(place, os.W_OK):
            raise _unwritable(store, f"{place} is read-only for this user")


def _unwritable(store: Store, because: str) -> InputError:
    return InputError(f"the profile store {store.database.place} cannot be written", because=because, hint="hotfuse doctor")


def name_for_export(store: Store) -> str | None:
    """What a store that has no name and cannot be written is called where its rows go: the same as long as they are the same, so
    that they are imported once."""
    file = store.database.copied
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def machines_named(known: Sequence[StoredMachine], name: str) -> list[StoredMachine]:
    """The machines whose names begin so; at least one."""
    found = [m for m in known if name and m.name.startswith(name)]
    if not found:
        there = ", ".join(sorted({m.name for m in known})) or "none"
        raise InputError(f"no machine is called {name!r}", because=f"the profile store knows {there}", hint="hotfuse db machines")
    return found
