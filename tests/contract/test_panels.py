"""Weights as panels by native code: the same bytes as element by element, whatever the sizes, and nothing beyond."""

from __future__ import annotations

import numpy as np
import pytest

from hotfuse.ir.types import DType
from hotfuse.lower.common import pack as packing
from hotfuse.lower.common.pack import PackSource, PackSpec, WeightOrder, pack

SIZES = [(1, 1), (15, 17), (16, 16), (48, 768), (50, 31), (97, 64), (130, 100), (3, 200)]


def _both(monkeypatch: pytest.MonkeyPatch, spec: PackSpec, weights: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    calls: list[object] = []
    fill = packing.fill_panels
    monkeypatch.setattr(packing, "fill_panels", lambda *a: (calls.append(a), fill(*a)))
    monkeypatch.setattr(packing, "NATIVE_BYTES", 0)
    native = pack(spec, weights)
    assert len(calls) == len(spec.sources)
    monkeypatch.setattr(packing, "NATIVE_BYTES", 1 << 62)
    return native, pack(spec, weights)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("nr", [8, 16, 48, 64])
def test_same_bytes(monkeypatch: pytest.MonkeyPatch, n: int, k: int, nr: int) -> None:
    bits = np.random.default_rng(n * 1000 + k).integers(0, 1 << 32, (n, k), np.uint32)  # NaN with payloads, infinities, anything
    spec = PackSpec((PackSource("w", WeightOrder.NK, n),), k, nr)
    native, plain = _both(monkeypatch, spec, {"w": bits.view(np.float32)})
    assert native.tobytes() == plain.tobytes()


@pytest.mark.parametrize("together", [False, True])
def test_several_weights(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    rng = np.random.default_rng(3)
    weights = {name: rng.standard_normal((n, 70), np.float32) for name, n in (("a", 40), ("b", 33))}
    spec = PackSpec(tuple(PackSource(k, WeightOrder.NK, w.shape[0]) for k, w in weights.items()), 70, 32, together=together)
    native, plain = _both(monkeypatch, spec, weights)
    assert native.tobytes() == plain.tobytes()


def test_rows_with_gaps_and_a_part_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = np.random.default_rng(4).standard_normal((60, 90), np.float32)
    spec = PackSpec((PackSource("w", WeightOrder.NK, 60),), 50, 16)
    native, plain = _both(monkeypatch, spec, {"w": wide[:, 7:57]})
    assert native.tobytes() == plain.tobytes()
    spec = PackSpec((PackSource("w", WeightOrder.ROWS, 21, first=9),), 90, 16)
    native, plain = _both(monkeypatch, spec, {"w": wide})
    assert native.tobytes() == plain.tobytes()


def test_others_stay_element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that lie as columns, and elements of other sizes."""
    monkeypatch.setattr(packing, "NATIVE_BYTES", 0)
    monkeypatch.setattr(packing, "fill_panels", lambda *a: pytest.fail("native code for what it does not take"))
    rng = np.random.default_rng(5)
    pack(PackSpec((PackSource("w", WeightOrder.KN, 40),), 30, 16), {"w": rng.standard_normal((30, 40), np.float32)})
    pack(PackSpec((PackSource("w", WeightOrder.NK, 40),), 30, 16, DType.F64), {"w": rng.standard_normal((40, 30))})
