"""Rows of batches that native loops look up: the same as what Python asks objects for, and left to Python where they cannot."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.learn import measure
from hotfuse.hpm import row_cache as books
from hotfuse.hpm.compiled import columns as native
from hotfuse.hpm.compiled import fields, native_writer, recompute_counts, row_lookup
from hotfuse.hpm.drawn_problems import draws
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.work import COLUMN, Candidate, Matrix
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.lower.cpu.tiling import Core

WIDE, NARROW = Core(16, 32), Core(8, 32)


def drawn() -> list[Candidate]:
    return [
        Candidate(p.graph, s, core, threads)
        for p in itertools.islice(draws(17), 80)
        for s in p.sizes
        for core, threads in ((WIDE, 1), (NARROW, 2), (None, 1))
    ]


def asked(candidates: list[Candidate], monkeypatch: pytest.MonkeyPatch) -> Matrix:
    """Rows without native loops."""
    with monkeypatch.context() as m:
        m.setattr(row_lookup, "identities", lambda _: None)
        return RowCache(measure.tile_of).rows(candidates)


def test_fields_are_where_objects_keep_them() -> None:
    """On the interpreters that are supported; without them everything would be slow."""
    assert fields.fields() is not None and native.data_word() is not None


def test_native_loops_find_what_python_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found, row_cache = drawn(), RowCache(measure.tile_of)
    slow = asked(found, monkeypatch)
    assert np.array_equal(row_cache.rows(found), slow), "learned on the way"
    with monkeypatch.context() as m:
        m.setattr(RowCache, "_learned", None)
        m.setattr(RowCache, "_tiled", None)
        assert np.array_equal(row_cache.rows(found[::-1]), slow[::-1]), "nothing is left to learn"


def test_new_graphs_of_known_nodes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found, row_cache = drawn(), RowCache(measure.tile_of)
    rows = row_cache.rows(found)
    again = [replace(c, graph=replace(c.graph), sizes=dict(c.sizes)) for c in found]
    monkeypatch.setattr(RowCache, "_learned", None)
    assert np.array_equal(row_cache.rows(again), rows)


def test_threads_take_turns_with_tables_that_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that one thread looked up must not be read from tables that another one has cleared."""
    found, shared = drawn(), RowCache(measure.tile_of)
    parts = [found[i::4] for i in range(4)]
    right = [RowCache(measure.tile_of).rows(p) for p in parts]
    clears: list[bool] = []
    monkeypatch.setattr(books, "MAX_KEPT", 20)
    inner, clear = shared._placed, shared._clear  # pyright: ignore[reportPrivateUsage]

    def slowly(candidates: Sequence[Candidate], ids: books.Ids) -> tuple[row_lookup.Words, row_lookup.Words]:
        answer = inner(candidates, ids)
        time.sleep(0.01)  # others may go on here
        return answer

    def counted() -> None:
        clears.append(True)
        clear()

    monkeypatch.setattr(shared, "_placed", slowly)
    monkeypatch.setattr(shared, "_clear", counted)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            for one, other in zip(right, threads.map(shared.rows, parts), strict=True):
                assert np.array_equal(one, other)
    assert len(clears) >= 11


@dataclass(frozen=True, slots=True, eq=False)
class Named(Candidate):
    """Not what native loops know."""

    name: str = "another"


def test_other_objects_are_asked_in_python() -> None:
    found = drawn()
    others = [Named(c.graph, c.sizes, c.core, c.threads) for c in found]
    assert row_lookup.identities(others) is None and row_lookup.identities(found) is not None
    assert row_lookup.identities([*found, others[0]]) is None
    row_cache = RowCache(measure.tile_of)
    assert np.array_equal(row_cache.rows(others), row_cache.rows(found))


def test_outputs_inside_others_count() -> None:
    graph = parse("""graph g(%x: f32[8, 64]) {
  %a: f32[8, 64] = aten.tanh.default(%x)
  %b: f32[8, 64] = aten.relu.default(%a)
  return %a, %b
}""")
    nested = replace(graph, outputs=(graph.outputs,))
    row_cache = RowCache(measure.tile_of)
    flat, deep, both = (
        row_cache.rows([Candidate(g, {}, WIDE) for g in given]) for given in ([graph], [nested], [nested, graph])
    )
    assert np.array_equal(flat, deep) and np.array_equal(both, np.vstack([flat, flat]))
    assert flat[0, COLUMN["bytes_out"]] == 2 * 8 * 64 * 4


def long(nodes: int) -> Graph:
    """A chain that is computed for one row and used by all."""
    lines = [f"  %v{i + 1}: f32[1, 64] = aten.add.Tensor(%v{i}, %r)" for i in range(nodes)]
    body = "\n".join(["  %v0: f32[1, 64] = aten.tanh.default(%r)", *lines])
    return parse(f"""graph g(%x: f32[16, 64], %r: f32[1, 64]) {{
{body}
  %y: f32[16, 64] = aten.mul.Tensor(%x, %v{nodes})
  return %y
}}""")


def test_graphs_of_many_values_are_counted_in_python() -> None:
    short, large = long(5), long(recompute_counts.MAX_VALUES)
    rows = RowCache(measure.tile_of).rows([Candidate(g, {}, WIDE) for g in (short, large, short)])
    assert rows[:, COLUMN["tanh"]].tolist() == [16 * 64] * 3
    assert rows[:, COLUMN["light"]].tolist() == [16 * 64 * (n + 1) for n in (5, recompute_counts.MAX_VALUES, 5)]


def test_an_index_grows() -> None:
    rng = np.random.default_rng(5)
    keys = rng.choice(1 << 40, 3000, replace=False) + 1
    index = row_lookup.KeyTable(2)
    for part in np.array_split(np.arange(3000), 7):
        index.put(np.stack([keys[part], part % 5, part], 1))
    kept = index.table[index.table[:, 0] != 0]
    assert index.count == 3000 and len(index.table) >= 6000
    assert np.array_equal(kept[np.argsort(kept[:, 2])], np.stack([keys, np.arange(3000) % 5, np.arange(3000)], 1))


def test_loops_and_conditions() -> None:
    """The sum of those of several numbers that are larger than a bar."""

    def body(w: native_writer.FunctionWriter) -> None:
        numbers, count, bar, out = w.args
        total = w.variable(0.0, native_writer.REAL)
        with w.each(count) as i:
            own = w.load(numbers, i, native_writer.REAL)
            with w.when(w.compares(own, "ogt", w.load(bar, 0, native_writer.REAL))):
                total.put(w.real("fadd", total.value, own))
        w.store(total.value, out, 0, native_writer.REAL)

    run = native_writer.compiled("some", [native.ARRAY, native.NUMBER, native.ARRAY, native.ARRAY], body)
    numbers, out = np.array([1.0, 5.0, -3.0, 4.0]), np.zeros(1)
    run(numbers, 4, np.array([2.0]), out)
    assert out[0] == 9.0
    run(numbers, 0, np.array([2.0]), out)
    assert out[0] == 0.0


def test_arrays_are_found_without_looking_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an interpreter that keeps addresses elsewhere, arrays are asked for them."""
    monkeypatch.setattr(native, "data_word", lambda: None)
    lines = ("%x = load i64, ptr %a", "%y = mul i64 %x, %n", "store i64 %y, ptr %a", "ret void")
    text = "define void @twice(ptr %a, i64 %n) {\n" + "\n".join(lines) + "\n}\n"
    made = np.array([21], np.int64)
    native.function(text, "twice", [native.ARRAY, native.NUMBER])(made, 2)
    assert made[0] == 42
