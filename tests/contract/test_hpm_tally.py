"""Rows of batches, summed natively: the same as rows one by one, and as sums over nodes and values done with arrays."""

from __future__ import annotations

import itertools

import numpy as np

from hotfuse.compile.learn import measure
from hotfuse.hpm.compiled import row_sums
from hotfuse.hpm.drawn_problems import draws
from hotfuse.hpm.recompute_factor import OTHER, POINTWISE
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.work import COLUMN, MAXIMA, NAMES, SUMS, Candidate
from hotfuse.lower.cpu.tiling import Core


def test_a_batch_says_what_its_candidates_say() -> None:
    found = [
        Candidate(p.graph, s, core)
        for p in itertools.islice(draws(31), 60)
        for s in p.sizes
        for core in (Core(16, 32), Core(8, 32), None)
    ]
    row_cache = RowCache(measure.tile_of)
    assert np.array_equal(row_cache.rows(found), np.vstack([row_cache.rows([c]) for c in found]))
    assert row_cache.rows([]).shape == (0, len(NAMES))


def test_sums_maxima_and_edges() -> None:
    rng = np.random.default_rng(3)
    nodes = np.floor(rng.uniform(0, 9, (12, row_sums.NODE_WIDTH)))
    nodes[:, row_sums.KIND] = rng.choice([float(OTHER), float(POINTWISE)], 12)
    values = np.floor(rng.uniform(1, 100, (9, row_sums.VALUE_WIDTH)))
    counts = np.array([[3, 2, 1, 1], [1, 0, 0, 2], [2, 3, 2, 0]], np.int64)
    places = [
        rng.integers(0, 12 if role == 0 else 9, counts[i, role]) for i, role in itertools.product(range(3), range(4))
    ]
    table = np.zeros((3, len(NAMES)))
    told = row_sums.fill(table, np.concatenate(places), counts.ravel(), nodes, values)
    for i in range(3):
        own = [nodes[places[4 * i]], *(values[places[4 * i + role]] for role in (1, 2, 3))]
        row = dict(zip(NAMES, table[i], strict=True))
        assert [row[n] for n in SUMS] == own[0][:, : len(SUMS)].sum(0).tolist()
        assert [row[n] for n in MAXIMA] == own[0][:, len(SUMS) : row_sums.KIND].max(0).tolist()
        assert [row[n] for n in ("bytes_in", "bytes_const", "bytes_out")] == [v[:, 0].sum() for v in own[1:]]
        most = max(own[3][:, 0].sum(), own[1][:, 0].max(initial=0))
        large = int((own[1][:, 0] >= row_sums.BROADCAST * most).sum())
        assert (row["streams"], row["small_inputs"]) == (1 + large, counts[i, 1] - large)
        assert row["strided"] == own[1][:, 1].sum()
        assert row["element_bytes"] == (own[3][-1, 2] if counts[i, 3] else 4.0)
        less = (own[0][:, row_sums.KIND] == POINTWISE) & (own[0][:, row_sums.SIZE] < row["elements"])
        assert told.smaller[i] == less.any()
    of_nodes = np.concatenate(places[::4])
    assert np.array_equal(told.places, of_nodes) and np.array_equal(told.kinds, nodes[of_nodes, row_sums.KIND])
    assert np.array_equal(told.sizes, nodes[of_nodes, row_sums.SIZE])
    assert not table[:, COLUMN["lanes"] :].any()
