"""Probes against NumPy: every statistic, every element type, awkward shapes and numbers; interpreter against native code."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from hotfuse.backends.llvm.probe_pass import MAX_ELEMENTS_LOOKED_AT, Probes, compile_all, symbols, view_of
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.profile.records import COUNTS, RANGES, Batch, Flag, RecordKind, Subject, split
from hotfuse.tile.probe_kernels import DTYPES, MASKED, probe
from tests.contract import native
from tests.seeds import generator

SUBJECT = Subject(graph=3, signature=5, call=7, at=11)


@functools.cache
def probes() -> Probes:
    return Probes(compile_all())


def numpy_stats(x: np.ndarray) -> dict[str, float]:
    """The statistics of a matrix, said another way."""
    floats = x.dtype.kind == "f" or x.dtype == ml_dtypes.bfloat16
    wide = x.astype(np.float64) if floats else x
    finite = np.isfinite(wide) if floats else np.ones(x.shape, bool)
    valid = wide > MASKED if floats else wide != 0
    zero = wide == 0
    seen = wide[finite].astype(np.float64)
    return {
        "zeros": zero.sum(), "zero_rows": zero.all(1).sum(), "zero_cols": zero.all(0).sum(), "nonfinite": (~finite).sum(),
        "constant_rows": (wide == wide[:, :1]).all(1).sum() if x.size else 0,
        "valid": valid.sum(), "valid_rows": valid.any(1).sum(),
        "min": seen.min(initial=math.inf), "max": seen.max(initial=-math.inf), "absmax": np.abs(seen).max(initial=0.0),
    }  # fmt: skip


def look(t: torch.Tensor, keep: int = 1, flags: int = 0) -> np.void:
    batch = Batch(1)
    assert probes().look(t, batch, SUBJECT, 9, flags, keep)
    raw = np.frombuffer(batch.record(0), np.uint8)[None]
    return split(raw)[RecordKind.VALUE][0]


def as_rows(t: torch.Tensor, cols: int) -> np.ndarray:
    flat = t.contiguous()
    array = flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype is torch.bfloat16 else flat.numpy()
    return array.reshape(-1, cols)


def agree(found: np.void, want: dict[str, float]) -> None:
    for name in (*COUNTS, *RANGES):
        assert found[name] == want[name], f"{name}: {found[name]} for {want[name]}"


def made(rng: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random numbers with zero rows, zero columns and constant rows among them."""
    ir = next(d for d in DTYPES if torch_dtype(d) is dtype)
    x = native.numbers(rng, ir, shape)
    x[rng.random(shape) < 0.4] = 0
    if x.ndim >= 2 and x.size:
        x[rng.random(shape[:-1]) < 0.2] = 0
        x[..., rng.random(shape[-1]) < 0.2] = 0
        x[rng.random(shape[:-1]) < 0.2] = 1
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if dtype is torch.bfloat16 else torch.from_numpy(x)


@pytest.mark.parametrize("dtype", [torch_dtype(d) for d in DTYPES], ids=[d.value for d in DTYPES])
def test_every_statistic(dtype: torch.dtype) -> None:
    rng = generator()
    for shape in ((1, 1), (3, 7), (5, 16), (17, 33), (2, 3, 31), (64, 100), (1, 257), (300, 1), (40,)):
        t = made(rng, dtype, shape)
        found = look(t)
        agree(found, numpy_stats(as_rows(t, shape[-1])))
        assert tuple(found["shape"][: len(shape)]) == shape and found["rank"] == len(shape)
        assert (found["rows"], found["cols"]) == (t.numel() // shape[-1], shape[-1])
        assert torch_dtype(DTYPES[int(found["dtype"])]) is dtype
        assert (found["graph"], found["signature"], found["call"], found["at"], found["item"]) == (3, 5, 7, 11, 9)


@pytest.mark.parametrize("dtype", DTYPES, ids=[d.value for d in DTYPES])
@native.levels
def test_interpreter_and_native_code_agree(dtype, target) -> None:  # type: ignore[no-untyped-def]
    rng = generator()
    for rows, cols in ((1, 1), (3, 5), (4, 67)):
        x = native.numbers(rng, dtype, (rows, cols))
        arrays = {"x": x, "seen": np.full(cols, 7, np.uint8), "counts": np.full(7, -1, np.int64), "ranges": np.zeros(3)}
        native.check(probe(dtype), arrays, {"R": rows, "C": cols, "S": cols}, target)


def test_views_without_a_copy() -> None:
    rng = generator()
    before = probes().copies
    base = made(rng, torch.float32, (6, 5, 20))
    agree(look(base[:, :, :13].transpose(0, 1)[:1]), numpy_stats(base[:, :1, :13].contiguous().numpy().reshape(-1, 13)))
    image = made(rng, torch.float32, (2, 4, 4, 8)).permute(0, 3, 1, 2)  # channels last
    agree(look(image), numpy_stats(image.permute(0, 2, 3, 1).contiguous().numpy().reshape(-1, 8)))
    agree(look(base[1:4]), numpy_stats(base[1:4].contiguous().numpy().reshape(-1, 20)))
    planes = made(rng, torch.float32, (2, 3, 4, 5))
    agree(look(planes, keep=2), numpy_stats(planes.numpy().reshape(6, 20)))
    assert probes().copies == before


def test_views_that_are_copied_and_counted() -> None:
    rng = generator()
    before = probes().copies
    base = made(rng, torch.float32, (6, 5, 20))
    for t in (base[:, ::2, ::3], base[:, :1, :].expand(6, 9, 20), base.transpose(1, 2)[..., 1:4], torch._neg_view(base)):
        agree(look(t), numpy_stats(as_rows(t.resolve_neg(), t.shape[-1])))
    assert probes().copies == before + 4


def test_nothing_in_it_and_single_numbers() -> None:
    for shape in ((0,), (0, 4), (4, 0), (2, 0, 3)):
        found = look(torch.zeros(shape))
        assert [found[n] for n in COUNTS] == [0] * len(COUNTS)
        assert (found["min"], found["max"], found["absmax"]) == (math.inf, -math.inf, 0.0)
    found = look(torch.tensor(-2.5))
    assert (found["rows"], found["cols"], found["min"], found["absmax"], found["constant_rows"]) == (1, 1, -2.5, 2.5, 1)


def test_only_nan_and_infinity() -> None:
    found = look(torch.tensor([[math.nan, math.inf], [-math.inf, math.nan]]))
    assert found["nonfinite"] == 4 and found["min"] == math.inf and found["max"] == -math.inf and found["absmax"] == 0
    assert found["constant_rows"] == 0 and found["valid"] == 1 and found["valid_rows"] == 1


def test_extremes_of_integers() -> None:
    found = look(torch.tensor([-(2**63), 2**63 - 1]))
    assert found["min"] == -(2.0**63) and found["max"] == 2.0**63 and found["absmax"] == 2.0**63
    assert look(torch.tensor([0, 255], dtype=torch.uint8))["max"] == 255


def test_masks_say_what_is_valid() -> None:
    kept = torch.zeros(4, 6)
    kept[0, 3:], kept[1, 1:], kept[2] = torch.finfo(torch.float32).min, -10000.0, -math.inf
    found = look(kept, flags=Flag.MASK)
    assert (found["valid"], found["valid_rows"], found["flags"]) == (3 + 1 + 0 + 6, 3, Flag.MASK)
    found = look((kept > -1).to(torch.int64))
    assert (found["valid"], found["valid_rows"], found["zero_rows"]) == (10, 3, 1)
    padded = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    assert look(padded)["zero_cols"] == 2


def test_large_values_show_part_of_their_rows() -> None:
    t = torch.zeros(4 * MAX_ELEMENTS_LOOKED_AT // 64, 64)
    t[::4] = 1.0
    v = view_of(t)
    assert v.partial and v.rows * v.cols <= MAX_ELEMENTS_LOOKED_AT
    found = look(t)
    assert found["flags"] & Flag.PARTIAL and found["zeros"] == 0 and found["valid"] == found["rows"] * 64
    assert look(torch.ones(3 * MAX_ELEMENTS_LOOKED_AT))["cols"] == MAX_ELEMENTS_LOOKED_AT
    wide = torch.ones(64, 4 * MAX_ELEMENTS_LOOKED_AT // 64).t()[:, ::2]
    assert look(wide)["nonfinite"] == 0 and look(wide)["rows"] * look(wide)["cols"] <= MAX_ELEMENTS_LOOKED_AT


def test_ranks_beyond_the_limit_fold() -> None:
    found = look(torch.ones(2, 3, 1, 2, 1, 2, 2, 5))
    assert found["rank"] == 8 and tuple(found["shape"]) == (6, 2, 1, 2, 2, 5)


def test_what_has_no_probe_is_counted() -> None:
    before = probes().refused
    batch = Batch(1)
    for t in (torch.zeros(2, dtype=torch.complex64), torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), 3):
        assert not probes().look(t, batch, SUBJECT, 0)
    assert probes().refused == before + 4 and batch.count == 0


def test_the_symbols_are_those_of_the_kernels() -> None:
    assert symbols() == list(compile_all())
