"""`hotfuse db`: what the profile store or the fleet's database holds, making it smaller, taking everything out and in."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotfuse.base.errors import InputError
from hotfuse.cli.output import heading, print_json, reports_errors, rows
from hotfuse.cli.stores import At, changed_store, machines_named, name_for_export, open_store

if TYPE_CHECKING:
    from hotfuse.profile.store import Store

db = typer.Typer(
    help="The profile store: what it holds, making it smaller, taking everything out and in.", no_args_is_help=True
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
OnMachine = Annotated[str | None, typer.Option("--machine", help="Only this one, by how its name begins.")]
MAX_COMPARED = 10_000
"""Pieces of a machine that are shown, or looked at for a comparison."""


@db.command()
@reports_errors
def info(at: At = None, as_json: AsJson = False) -> None:
    """Where the store is, its version and size, rows per table, and what went wrong with it."""
    with open_store(at) as store:
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
    with changed_store(at) as store:
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


def _written(out: Path | None, lines: Iterable[str]) -> None:
    """Write lines to a file or to standard output; a file that could not be written wholly is not left there."""
    if out is None:
        sys.stdout.writelines(lines)
        return
    begun = False
    try:
        with out.open("w") as file:
            begun = out.is_file()
            file.writelines(lines)
    except OSError as e:
        if begun:
            out.unlink(missing_ok=True)
        raise InputError(f"{out} cannot be written", because=e.strerror or str(e)) from e


@db.command()
@reports_errors
def export(
    at: At = None,
    out: Annotated[Path | None, typer.Option("--out", help="A file; the default is standard output.")] = None,
) -> None:
    """Every row as one line of JSON: {"table": ..., "row": {...}}."""
    from hotfuse.profile.exchange import own_uid

    with open_store(at) as store:
        # An import of the rows must know whose they are. Where the file cannot be written, this makes it a copy in memory.
        store.database.write(lambda c: own_uid(c, name_for_export(store)))
        _written(out, (json.dumps({"table": table, "row": values}) + "\n" for table, values in store.export()))


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
        with changed_store(at, begin=True) as store:
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
    from hotfuse.native.target import level_of

    with open_store(at) as store:
        found, counts = store.machines(), store.rows_by_machine()
    listed = [
        {"machine": m.name, "cpu": m.tuning.get("cpu", "") or m.identity.get("device", ""), "cores": m.tuning.get("cores", ""),
         "arch": m.identity.get("arch", ""),
         "level": level_of(m.identity.get("features", "")), "features": m.identity.get("features", ""),
         "peaks": "measured" if m.peaks else "unknown", "measurements": counts.get(m.id, 0), "seen": _when(m.seen_at)}
        for m in found
    ]  # fmt: skip
    if as_json:
        print_json(listed)
    else:
        shown = ("machine", "cpu", "cores", "level", "peaks", "measurements", "seen")
        rows(shown, [[d[c] for c in shown] for d in listed])


@db.command()
@reports_errors
def top(
    at: At = None, machine: OnMachine = None, limit: Annotated[int, typer.Option(min=1, max=MAX_COMPARED, help="How many.")] = 20,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """The pieces of models that take most time: what they compute, where, how often, what limits them."""
    with open_store(at) as store:
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
    with open_store(at) as store:
        found = store.subgraphs(subgraph, _machine(store, machine))
        names, hosts = {m.id: m.name for m in store.machines()}, store.origins()
    pieces = {p.subgraph: p.ops for p in found}
    if not pieces:
        raise InputError(f"no piece is called {subgraph!r}", hint="hotfuse db top")
    if len(pieces) > 1:
        begin = ", ".join(name[:12] for name in list(pieces)[:4])
        raise InputError(f"{subgraph!r} names {len(pieces)} pieces", because=f"among them {begin}", hint="more of its hash")
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
    with open_store(at) as store:
        a, b = (store.top_subgraphs(_machine(store, name), MAX_COMPARED) for name in (first, second))
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
    with changed_store(at) as store:
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

    with changed_store(at) as store:
        made = fleet.train(store)
    if made is None:
        raise InputError(
            "there is too little to learn from",
            because=f"no {fleet.MIN_ROWS} rows of a machine whose peaks were measured",
            hint="hotfuse calibrate, or serve models with --store or HOTFUSE_PROFILES",
        )
    facts, believed = made.facts, judged(made.facts)
    found = {"version": made.version, "samples": facts["samples"], "machines": facts["machines"], "left_out": facts["left_out"],
             "knows_machines": facts["knows_machines"], "trust": believed.trust.value, "because": believed.because}  # fmt: skip
    if as_json:
        print_json(found)
        return
    heading(f"version {made.version}: {facts['samples']} kernels of {facts['machines']} machines")
    scores = [(n, f"{int(s['n'])}", f"{s['mape']:.1%}", f"{s['within20']:.0%}") for n, s in facts["left_out"].items()]
    if scores:
        rows(("machine left out", "kernels", "MAPE", "within 20%"), scores)
    heading(f"the model is {believed.trust.value}: {believed.because}")


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def _machine(store: Store, name: str | None) -> int | None:
    """The number of a machine by how its name begins."""
    if name is None:
        return None
    found = machines_named(store.machines(), name)
    if len(found) > 1:
        raise InputError(f"{name!r} names {len(found)} machines", hint="hotfuse db machines")
    return found[0].id
