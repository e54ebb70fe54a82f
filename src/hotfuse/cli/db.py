"""`hotfuse db`: what the profile store or the fleet's database holds, making it smaller, taking everything out and in."""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from hotfuse.base.errors import InputError
from hotfuse.base.settings import from_env
from hotfuse.cli.output import heading, print_json, reports_errors, rows

if TYPE_CHECKING:
    from hotfuse.profile.store import Store

db = typer.Typer(
    help="The profile store: what it holds, making it smaller, taking everything out and in.", no_args_is_help=True
)

At = Annotated[
    str | None, typer.Option("--store", help="A path, sqlite:///path or postgresql://…; the default is that of the settings.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
OnMachine = Annotated[str | None, typer.Option("--machine", help="Only this one, by how its name begins.")]
MOST_COMPARED = 10_000
"""Pieces of a machine that are looked at for a comparison."""


def _open(at: str | None, *, begin: bool = False) -> Store:
    """A store that exists: looking at one must not begin it, nor put a damaged one aside unseen. `begin`: or a new one."""
    from hotfuse.profile.database import damaged
    from hotfuse.profile.place import central, location
    from hotfuse.profile.store import Store, store_place

    place = at or central(from_env()) or location(from_env())
    if not begin and "://" not in place and not Path(place).expanduser().exists():
        raise InputError(f"there is no profile store at {place}", hint="--store, or HOTFUSE_PROFILES")
    if isinstance(file := store_place(place), Path) and damaged(file):
        raise InputError(f"{file} is no profile store, or a damaged one", because="SQLite finds fault with it",
                         hint="nothing was done to it; a process that serves puts its own aside and begins a new one")
    return Store.open(place)


@db.command()
@reports_errors
def info(at: At = None, as_json: AsJson = False) -> None:
    """Where the store is, its version and size, rows per table, and what went wrong with it."""
    with _open(at) as store:
        found = store.info()
    if as_json:
        print_json(found)
        return
    facts = [
        ("place", found["path"]),
        ("bytes", found["bytes"]),
        ("schema", found["version"]),
        ("journal", found["journal"]),
    ]
    rows(("fact", "value"), facts, header=False)
    heading("\nrows")
    rows(("table", "rows"), found["rows"].items(), header=False)
    for note in found["notes"]:
        heading(note)


@db.command()
@reports_errors
def vacuum(
    at: At = None,
    keep: Annotated[
        int | None, typer.Option(help="Keep only the newest rows of tables that grow with use.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Give unused room back to the system."""
    with _open(at) as store:
        before = store.info()["bytes"]
        dropped = {} if keep is None else store.prune(keep)
        store.vacuum()
        after = store.info()["bytes"]
    report = {"bytes_before": before, "bytes_after": after, "dropped": dropped}
    if as_json:
        print_json(report)
        return
    rows(
        ("fact", "value"),
        [("before", before), ("after", after), *((f"dropped {t}", n) for t, n in dropped.items())],
        header=False,
    )


def _target(out: Path | None) -> AbstractContextManager[TextIO]:
    if out is None:
        return nullcontext(sys.stdout)
    try:
        return out.open("w")
    except OSError as e:
        raise InputError(f"{out} cannot be written", because=e.strerror or str(e)) from e


@db.command()
@reports_errors
def export(
    at: At = None,
    out: Annotated[Path | None, typer.Option("--out", help="A file; the default is standard output.")] = None,
) -> None:
    """Every row as one line of JSON: {"table": ..., "row": {...}}."""
    from hotfuse.profile.exchange import own_uid

    with _open(at) as store, _target(out) as target:
        store.database.write(own_uid)  # whoever imports the rows knows whose they are
        for table, values in store.export():
            target.write(json.dumps({"table": table, "row": values}) + "\n")


@db.command("import")
@reports_errors
def import_(
    file: Annotated[Path, typer.Argument(help="What `hotfuse db export` wrote.")], at: At = None, as_json: AsJson = False
) -> None:
    """Add the rows of another store to one that may be new; those that were imported before are left out."""
    import rich.progress

    from hotfuse.profile.importing import import_rows

    try:
        if not file.is_file():
            raise InputError(f"there is no file {file}", hint="hotfuse db export writes one")
        with _open(at, begin=True) as store:
            quiet = as_json or not sys.stdout.isatty()
            with file.open() if quiet else rich.progress.open(file, "r", description="importing", transient=True) as lines:
                added = import_rows(store, lines)
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{file} cannot be read", because=str(e)) from e
    if as_json:
        print_json({"added": added})
    else:
        rows(("table", "rows"), added.items(), header=False)


@db.command()
@reports_errors
def machines(at: At = None, as_json: AsJson = False) -> None:
    """The machines that rows came from: what they are, what was measured there, when they were last seen."""
    with _open(at) as store:
        found, counts = store.machines(), store.rows_by_machine()
    listed = [
        {"machine": m.name, "cpu": m.tuning.get("cpu", ""), "cores": m.tuning.get("cores", ""), "arch": m.identity.get("arch", ""),
         "features": m.identity.get("features", ""), "peaks": "measured" if m.peaks else "unknown",
         "measurements": counts.get(m.id, 0), "seen": _when(m.seen_at)}
        for m in found
    ]  # fmt: skip
    if as_json:
        print_json(listed)
    else:
        shown = ("machine", "cpu", "cores", "peaks", "measurements", "seen")
        rows(shown, [[d[c] for c in shown] for d in listed])


@db.command()
@reports_errors
def top(
    at: At = None, machine: OnMachine = None, limit: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """The pieces of models that take most time: what they compute, where, how often, what limits them."""
    with _open(at) as store:
        found = store.top_subgraphs(_machine(store, machine), limit)
        names = {m.id: m.name for m in store.machines()}
    listed = [
        {"subgraph": p.subgraph, "machine": names.get(p.machine or -1, ""), "ms": round(total / 1e6, 3), "calls": calls,
         "us": round(p.p50_ns / 1e3, 2), "share": round(p.share, 3), "tier": p.tier, "threads": p.threads,
         "bound": p.bottleneck, "sizes": p.sizes, "ops": p.ops}
        for p, total, calls in found
    ]  # fmt: skip
    if as_json:
        print_json(listed)
    else:
        shown = ("subgraph", "machine", "ms", "calls", "us", "tier", "threads", "bound", "ops")
        rows(shown, [[str(d[c])[:48] for c in shown] for d in listed])


@db.command("show")
@reports_errors
def show_subgraph(
    subgraph: Annotated[str, typer.Argument(help="The hash of a piece, or how it begins.")], at: At = None,
    machine: OnMachine = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """The history of a piece: what it took, for which sizes, on which machine, who saw it when, and the evidence."""
    with _open(at) as store:
        found = store.subgraphs(subgraph, _machine(store, machine))
        names, hosts = {m.id: m.name for m in store.machines()}, store.origins()
    if not found:
        raise InputError(f"no piece is called {subgraph!r}", hint="hotfuse db top")
    listed = [
        {"subgraph": p.subgraph, "machine": names.get(p.machine or -1, ""), "sizes": p.sizes, "threads": p.threads, "tier": p.tier,
         "calls": p.calls, **{f"{q}_us": round(getattr(p, f"{q}_ns") / 1e3, 2) for q in ("p10", "p50", "p90")},
         "bound": p.bottleneck, "host": hosts.get(p.origin, ("here", "", 0.0))[0], "version": hosts.get(p.origin, ("", "", 0.0))[1],
         "seen": _when(p.at), "ops": p.ops, "evidence": dict(p.evidence)}
        for p in found
    ]  # fmt: skip
    if as_json:
        print_json(listed)
    else:
        typer.echo(f"{found[0].subgraph}: {found[0].ops}")
        shown = ("machine", "sizes", "threads", "tier", "calls", "p10_us", "p50_us", "p90_us", "bound", "host", "seen")
        rows(shown, [[d[c] for c in shown] for d in listed])


@db.command()
@reports_errors
def diff(
    first: Annotated[str, typer.Argument(help="A machine.")], second: Annotated[str, typer.Argument(help="Another one.")],
    at: At = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """What both machines have run: how long each took, and what limited it there; the largest differences first."""
    with _open(at) as store:
        a, b = (store.top_subgraphs(_machine(store, name), MOST_COMPARED) for name in (first, second))
    there = {(p.subgraph, p.sizes, p.threads, p.tier): p for p, _, _ in b}
    pairs = [(p, q) for p, _, _ in a if (q := there.get((p.subgraph, p.sizes, p.threads, p.tier))) is not None]
    listed = [
        {"subgraph": p.subgraph, "sizes": p.sizes, "threads": p.threads, "tier": p.tier, "first_us": round(p.p50_ns / 1e3, 2),
         "second_us": round(q.p50_ns / 1e3, 2), "ratio": round(q.p50_ns / max(p.p50_ns, 1.0), 3), "first_bound": p.bottleneck,
         "second_bound": q.bottleneck, "ops": p.ops}
        for p, q in sorted(pairs, key=lambda pq: -abs(pq[0].p50_ns - pq[1].p50_ns))
    ]  # fmt: skip
    if as_json:
        print_json(listed)
    else:
        shown = ("subgraph", "sizes", "threads", "first_us", "second_us", "ratio", "first_bound", "second_bound", "ops")
        rows(shown, [[str(d[c])[:40] for c in shown] for d in listed])


@db.command()
@reports_errors
def prune(
    at: At = None, keep: Annotated[int, typer.Option(help="Rows to keep of tables that grow with use.", min=0)] = 1_000_000,
    days: Annotated[float | None, typer.Option(help="Also drop what is older.", min=0)] = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Drop the oldest rows."""
    with _open(at) as store:
        dropped = store.prune(keep, None if days is None else time.time() - days * 86_400)
    if as_json:
        print_json({"dropped": dropped})
    else:
        rows(("table", "rows dropped"), dropped.items())


@db.command()
@reports_errors
def learn(at: At = None, as_json: AsJson = False) -> None:
    """Train the performance model of all machines: what one that nobody measured begins with. Says how far it is off on each
    when it saw nothing of that one."""
    from hotfuse.hpm import fleet
    from hotfuse.hpm.trust import judged

    with _open(at) as store:
        made = fleet.train(store)
    if made is None:
        raise InputError(
            "there is too little to learn from",
            because=f"no {fleet.LEAST_ROWS} rows of a machine whose peaks were measured",
            hint="hotfuse calibrate, or serve models with --store or HOTFUSE_PROFILES",
        )
    facts, stands = made.facts, judged(made.facts)
    found = {"version": made.version, "samples": facts["samples"], "machines": facts["machines"], "left_out": facts["left_out"],
             "knows_machines": facts["knows_machines"], "standing": stands.standing.value, "because": stands.because}  # fmt: skip
    if as_json:
        print_json(found)
        return
    heading(f"version {made.version}: {facts['samples']} kernels of {facts['machines']} machines")
    scores = [(n, f"{int(s['n'])}", f"{s['mape']:.1%}", f"{s['within20']:.0%}") for n, s in facts["left_out"].items()]
    if scores:
        rows(("machine left out", "kernels", "MAPE", "within 20%"), scores)
    heading(f"the model is {stands.standing.value}: {stands.because}")


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def _machine(store: Store, name: str | None) -> int | None:
    """The number of a machine by how its name begins."""
    if name is None:
        return None
    found = [m for m in store.machines() if m.name.startswith(name)]
    if len(found) != 1:
        raise InputError(f"{name!r} names {len(found)} machines", hint="hotfuse db machines")
    return found[0].id
