"""One question to a profile store that needs no database library: whether it may know anything of a graph.

Loading that library takes a fifth of a second of a process that serves (decision 205), and a first plan of kernels waited for it,
mostly to learn that nobody had tried any. A file that is not as expected is left to the process that opens the store.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

WAIT_S = 0.2
"""Longest wait for a process that writes."""


def may_know(path: str, graph: str) -> bool:
    """Whether decisions about a graph may be kept in the store at a path; False only where there are none for certain."""
    try:
        if "://" in path or set("?%") & set(path):  # a database that is no file, or a name that stands for another one
            return True
        if not Path(path).is_file():
            return False
        with closing(sqlite3.connect(f"file:{quote(str(Path(path).absolute()))}?mode=ro", timeout=WAIT_S, uri=True)) as file:
            if file.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None:
                return False  # a worker is about to make its tables
            return file.execute("SELECT 1 FROM decisions WHERE graph = ? LIMIT 1", (graph,)).fetchone() is not None
    except (OSError, sqlite3.Error):
        return True
