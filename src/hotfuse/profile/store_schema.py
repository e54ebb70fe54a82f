"""The tables of the profile store, on SQLite and PostgreSQL, and the steps by which older ones become newer ones.

A row's `origin` names the store it came from (`origins` says whose that is); it is empty for what was measured here and not sent.
A file says in `schema_version` which steps it has seen. Opening it runs the steps it lacks, in order, in one transaction; a step
never changes once it was released. A file with more steps than this program knows is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    func,
    insert,
    inspect,
    select,
    update,
)

from hotfuse.base.lazy_dataclass import dataclass

metadata = MetaData()

schema_version = Table(
    "schema_version", metadata, Column("version", Integer, primary_key=True), Column("at", Float, nullable=False)
)

machines = Table(
    "machines",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("identity_key", String(64), nullable=False),
    Column("tuning_key", String(64), nullable=False),
    Column("identity", Text, nullable=False),
    Column("tuning", Text, nullable=False),
    Column("peaks", Text),
    Column("seen_at", Float, nullable=False),
    UniqueConstraint("identity_key", "tuning_key"),
)

measurements = Table(
    "measurements",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("machine_id", Integer, ForeignKey("machines.id")),
    Column("kernel", String(128), nullable=False),
    Column("family", String(64), nullable=False),
    Column("features", Text, nullable=False),
    Column("dtype", String(16), nullable=False),
    Column("threads", Integer, nullable=False),
    Column("time_ns", Float, nullable=False),
    Column("noise", Float, nullable=False),
    Column("source", String(16), nullable=False),
    Column("at", Float, nullable=False),
    Column("origin", String(40), nullable=False, server_default=""),
    Index("measurements_by_family", "machine_id", "family", "at"),
    Index("measurements_by_kernel", "kernel", "machine_id"),
)

models = Table(
    "models",
    metadata,
    Column("graph", String(128), primary_key=True),
    Column("name", Text, nullable=False),
    Column("seen_at", Float, nullable=False),
)

partition_profiles = Table(
    "partition_profiles",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("machine_id", Integer, ForeignKey("machines.id")),
    Column("graph", String(128), nullable=False),
    Column("partition", String(128), nullable=False),
    Column("signature", Text, nullable=False),
    Column("calls", Integer, nullable=False),
    Column("mean_ns", Float, nullable=False),
    Column("p10_ns", Float, nullable=False),
    Column("p50_ns", Float, nullable=False),
    Column("p90_ns", Float, nullable=False),
    Column("bytes", Float, nullable=False),
    Column("flops", Float, nullable=False),
    Column("bottleneck", String(32), nullable=False),
    Column("evidence", Text, nullable=False, server_default="{}"),
    Column("at", Float, nullable=False),
    Index("partition_profiles_by_graph", "graph", "partition"),
)

decisions = Table(
    "decisions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("graph", String(128), nullable=False),
    Column("action", String(32), nullable=False),
    Column("why", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("evidence", Text, nullable=False),
    Column("predicted_ns", Float),
    Column("measured_ns", Float),
    Column("at", Float, nullable=False),
    Column("machine_id", Integer),
    Column("origin", String(40), nullable=False, server_default=""),
    Index("decisions_by_graph", "graph", "at"),
)

hpm_models = Table(
    "hpm_models",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("machine_id", Integer, ForeignKey("machines.id")),
    Column("name", String(64), nullable=False),
    Column("version", Integer, nullable=False),
    Column("facts", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("origin", String(40), nullable=False, server_default=""),
    UniqueConstraint("name", "version"),
)

hpm_arrays = Table(
    "hpm_arrays",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("model_id", Integer, ForeignKey("hpm_models.id"), nullable=False),
    Column("name", String(64), nullable=False),
    Column("dtype", String(8), nullable=False),
    Column("shape", Text, nullable=False),
    Column("data", LargeBinary, nullable=False),
    UniqueConstraint("model_id", "name"),
)

drift = Table(
    "drift",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("machine_id", Integer, ForeignKey("machines.id")),
    Column("probe", String(64), nullable=False),
    Column("value", Float, nullable=False),
    Column("baseline", Float, nullable=False),
    Column("at", Float, nullable=False),
    Index("drift_by_probe", "machine_id", "probe", "at"),
)

problems = Table(
    "problems",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("graph", Text, nullable=False),
    Column("sizes", Text, nullable=False),
    Column("seen_at", Float, nullable=False),
)

memories = Table(
    "memories",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("machine_id", Integer, ForeignKey("machines.id")),
    Column("name", String(64), nullable=False),
    Column("key", String(128), nullable=False),
    Column("numbers", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("origin", String(40), nullable=False, server_default=""),
    Index("memories_by_name", "machine_id", "name", "key"),
)

subgraph_profiles = Table(
    "subgraph_profiles",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("machine_id", Integer, ForeignKey("machines.id")),
    Column("subgraph", String(64), nullable=False),
    Column("ops", Text, nullable=False),
    Column("sizes", Text, nullable=False),
    Column("threads", Integer, nullable=False),
    Column("tier", Integer, nullable=False),
    Column("calls", Integer, nullable=False),
    Column("mean_ns", Float, nullable=False),
    Column("p10_ns", Float, nullable=False),
    Column("p50_ns", Float, nullable=False),
    Column("p90_ns", Float, nullable=False),
    Column("bytes", Float, nullable=False),
    Column("flops", Float, nullable=False),
    Column("share", Float, nullable=False),
    Column("bottleneck", String(32), nullable=False),
    Column("evidence", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("origin", String(40), nullable=False, server_default=""),
    Index("subgraph_profiles_by_subgraph", "subgraph", "machine_id", "at"),
)

origins = Table(
    "origins",
    metadata,
    Column("uid", String(40), primary_key=True),
    Column("own", Integer, nullable=False),
    Column("host", String(128), nullable=False),
    Column("version", String(32), nullable=False),
    Column("seen_at", Float, nullable=False),
)

cursors = Table(
    "cursors",
    metadata,
    Column("origin", String(40), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("last", BigInteger, nullable=False),
)

FIRST = (machines, measurements, models, partition_profiles, decisions, hpm_models, hpm_arrays, drift)


@dataclass(frozen=True, slots=True)
class Migration:
    """One change of the schema."""

    version: int
    name: str
    run: Callable[[Connection], None]


def _create(connection: Connection) -> None:
    metadata.create_all(connection, tables=list(FIRST))


def _problems(connection: Connection) -> None:
    metadata.create_all(connection, tables=[problems])


def _memories(connection: Connection) -> None:
    metadata.create_all(connection, tables=[memories])
    if all(c["name"] != "evidence" for c in inspect(connection).get_columns(partition_profiles.name)):
        connection.exec_driver_sql("ALTER TABLE partition_profiles ADD COLUMN evidence TEXT NOT NULL DEFAULT '{}'")


def _fleet(connection: Connection) -> None:
    metadata.create_all(connection, tables=[subgraph_profiles, origins, cursors])
    for table in (measurements, decisions, hpm_models, memories):
        _add_column(connection, table, "origin VARCHAR(40) NOT NULL DEFAULT ''")
    _add_column(connection, decisions, "machine_id INTEGER")


def _add_column(connection: Connection, table: Table, column: str) -> None:
    """Add a column to a table that an older step made without it."""
    if all(c["name"] != column.split()[0] for c in inspect(connection).get_columns(table.name)):
        connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {column}")


def _renamed(connection: Connection) -> None:
    """Facts, arrays and memories have the names that the program uses: rooflines, tilings, breakpoints."""
    for table, column in ((hpm_models, "facts"), (partition_profiles, "evidence"), (subgraph_profiles, "evidence")):
        for old, new in (('"roofs":', '"rooflines":'), ('"tells_ways_apart":', '"tells_tilings_apart":')):
            text = table.c[column]
            connection.execute(update(table).where(text.contains(old)).values({column: func.replace(text, old, new)}))
    part = hpm_arrays.c.name
    connection.execute(update(hpm_arrays).where(part.startswith("ways_", autoescape=True)).values(
        name=func.replace(part, "ways_", "tilings_")))  # fmt: skip
    connection.execute(update(memories).where(memories.c.name == "borders").values(name="breakpoints"))


STEPS: tuple[Migration, ...] = (
    Migration(1, "machines, measurements, profiles, decisions, models, drift", _create),
    Migration(2, "groups that models were cut into, for calibration", _problems),
    Migration(3, "what came true of predictions; why a partition is slow", _memories),
    Migration(4, "profiles by what a partition computes, and where rows come from", _fleet),
    Migration(5, "names of facts, arrays and memories", _renamed),
)
TABLES = (origins, *FIRST, problems, memories, subgraph_profiles, cursors)
"""Every table, for loops over all of them."""
GROWING = (measurements, decisions, drift, subgraph_profiles)
"""Those that grow with use."""


class NewerSchema(Exception):
    """The file was written by a program that knows more steps."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(f"schema version {found}; this program knows up to {known}")


def version_of(connection: Connection) -> int:
    """The last step a database has seen; 0 for an empty one."""
    if not inspect(connection).has_table(schema_version.name):
        return 0
    return connection.execute(select(func.max(schema_version.c.version))).scalar() or 0


def migrate(connection: Connection, steps: Sequence[Migration] = STEPS) -> tuple[int, ...]:
    """Run the missing steps in the caller's transaction, which must exclude other writers; the versions that were run."""
    known = max(s.version for s in steps)
    have = version_of(connection)
    if have > known:
        raise NewerSchema(have, known)
    if have == known:
        return ()
    metadata.create_all(connection, tables=[schema_version])
    done: list[int] = []
    for step in sorted(steps, key=lambda s: s.version):
        if step.version > have:
            step.run(connection)
            connection.execute(insert(schema_version).values(version=step.version, at=time.time()))
            done.append(step.version)
    return tuple(done)
