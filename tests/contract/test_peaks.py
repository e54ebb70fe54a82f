"""Measured limits: micro kernels do what they are counted for; figures are plain data. No clock decides a test."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotfuse.backends.llvm import peak_kernels as measuring
from hotfuse.backends.llvm import peaks_code
from hotfuse.lower.common.pack import aligned
from hotfuse.machine.peaks import Bandwidth, ForkCost, MachinePeaks, Rate, from_dict
from hotfuse.machine.topology import Cache, Topology, topology
from hotfuse.native.jit import assembly, compile_object
from hotfuse.native.target import CpuTarget, cross_neon, host_levels

GIVEN = MachinePeaks(
    "avx512",
    (Rate("f32", 1, 100e9, 0.01), Rate("f32", 4, 400e9, 0.01)),
    (Bandwidth("memory", "read", 1, 20e9, 0.1, 1 << 20), Bandwidth("L2", "write", 1, 80e9, 0.1, 1 << 10)),
    (ForkCost(4, 1000.0, 50000.0),),
    100.0, 5.0, 1.0, (("L3", "not there"),),
)  # fmt: skip


@pytest.mark.parametrize("target", host_levels(), ids=lambda t: t.name)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_kernels_do_what_they_are_counted_for(target: CpuTarget, threads: int) -> None:
    _, run = measuring._functions(target)
    part = 24 * 64
    memory = aligned(part * threads, np.dtype(np.uint8))
    count = peaks_code.accumulators(target)
    for dtype, kind in (("f32", np.float32), ("f64", np.float64)):
        memory[:] = 0xFF
        for repeats in (1, 3):
            run[f"rate_{dtype}"](memory.ctypes.data, part, repeats, threads)
            for t in range(threads):
                got = memory[t * part : t * part + count * target.vl_bytes].view(kind)
                want = 1.0
                for _ in range(repeats * peaks_code.ROUNDS):
                    want = want * 0.5 + 1.0
                assert (got == want).all()
    if width := peaks_code.dot_width(target):
        run["rate_i8"](memory.ctypes.data, part, 5, threads)
        for t in range(threads):
            got = memory[t * part : t * part + count * 4 * width].view(np.int32)
            assert (got == 5 * peaks_code.ROUNDS * 4).all()
        assert peaks_code.operations(target, "i8") == 8 * width * count * peaks_code.ROUNDS
    else:
        assert "rate_i8" not in run


@pytest.mark.parametrize("target", host_levels(), ids=lambda t: t.name)
@pytest.mark.parametrize("threads", [1, 3])
def test_writing_covers_every_threads_part_and_reading_changes_nothing(target: CpuTarget, threads: int) -> None:
    _, run = measuring._functions(target)
    part = 4 * measuring._UNIT
    memory = aligned(part * threads + 64, np.dtype(np.uint8))
    memory[:] = 7
    before = memory.copy()
    run["read"](memory.ctypes.data, part, 3, threads)
    assert np.array_equal(memory, before)
    run["write"](memory.ctypes.data, part, 2, threads)
    assert not memory[: part * threads].any() and (memory[part * threads :] == 7).all()


@pytest.mark.parametrize("target", host_levels(), ids=lambda t: t.name)
def test_reading_really_reads(target: CpuTarget) -> None:
    text = assembly(peaks_code.module_text(target), target)
    body = text.split("read.part:")[1].split("Lfunc_end")[0]
    moves = sum(
        body.count(op) for op in ("vmovdqa64", "vmovdqa", "vorps", "vpor", "vporq", "vmovaps", "orps", "movaps", "por")
    )
    assert moves >= peaks_code.STREAMS


def test_other_architectures_compile() -> None:
    assert compile_object(peaks_code.module_text(cross_neon()), cross_neon()).code


def test_measuring_gives_every_figure_a_number_and_reasons_for_the_rest() -> None:
    small = replace(topology(), caches=(Cache(1, "data", 16 << 10, 64, 1), Cache(2, "unified", 64 << 10, 64, 1)))
    found = measuring.measure([1, 2], passes=2, top=small)
    assert {(r.dtype, r.threads) for r in found.rates} >= {("f32", 1), ("f32", 2), ("f64", 1), ("f64", 2)}
    assert {(b.level, b.direction, b.threads) for b in found.bandwidths} >= {
        (lv, d, n) for lv in ("L1", "L2") for d in ("read", "write") for n in (1, 2)
    }
    assert {"L3 with 1 threads", "L3 with 2 threads"} <= dict(found.missing).keys()
    assert all(r.per_s > 0 and r.noise >= 0 for r in found.rates) and found.hz is not None and found.hz > 0
    assert [f.threads for f in found.forks] == [2] and found.forks[0].hot_ns > 0 and found.call_ns > 0
    assert from_dict(json.loads(json.dumps(found.to_dict()))) == found
    probe = measuring.MicroProbe(top=small, tries=1)
    assert probe().keys() == {"fma", "l2", "clock"} == probe.baseline(found).keys()


def test_working_sets_lie_in_their_level() -> None:
    top = replace(
        topology(),
        caches=(
            Cache(1, "data", 32 << 10, 64, 1), Cache(1, "instruction", 64 << 10, 64, 1), Cache(2, "unified", 1 << 20, 64, 1),
            Cache(3, "unified", 32 << 20, 64, 8),
        ),
        memory_bytes=64 << 30, memory_limit_bytes=None,
    )  # fmt: skip
    for threads in (1, 2, 8):
        sizes, missing = measuring.level_bytes(top, threads)
        assert sizes["L1"] <= 16 << 10 and sizes["L2"] <= 512 << 10
        assert sizes["L3"] > 1 << 20 and sizes["L3"] * threads <= 16 << 20
        assert sizes["memory"] * threads >= 127 << 20 and not missing
        assert all(n % measuring._UNIT == 0 for n in sizes.values())
    sizes, missing = measuring.level_bytes(top, 64)
    assert "L3" not in sizes and "L3" in missing
    assert "memory" in measuring.level_bytes(replace(top, memory_bytes=256 << 20), 1)[1]


def test_lookups() -> None:
    assert GIVEN.rate("f32") == 100e9 and GIVEN.rate("f32", 2) == 200e9 and GIVEN.rate("f32", 64) == 400e9
    assert GIVEN.rate("f64") is None and GIVEN.bandwidth("L2") is None and GIVEN.bandwidth("L2", "write", 3) == 80e9
    assert GIVEN.fork(1) == 0 and GIVEN.fork(4) == 1000 and GIVEN.fork(4, idle=True) == 50000


@pytest.mark.parametrize(
    "change",
    [{"rates": 3}, {"rates": [{}]}, {"call_ns": "nan"}, {"call_ns": -1}, {"target": None, "forks": [[1]]},
     {"bandwidths": [{**GIVEN.to_dict()["bandwidths"][0], "direction": "sideways"}]}],
)  # fmt: skip
def test_what_is_no_measurement_is_refused(change: dict[str, object]) -> None:
    plain = json.loads(json.dumps(GIVEN.to_dict()))
    assert from_dict(plain) == GIVEN
    with pytest.raises(ValueError):
        from_dict(plain | change)
    with pytest.raises(ValueError):
        from_dict({})


def test_the_highest_clock_is_a_hint(tmp_path: Path) -> None:
    from hotfuse.machine.fingerprint import make_fingerprint

    folder = tmp_path / "devices/system/cpu/cpu0/cpufreq"
    folder.mkdir(parents=True)
    (folder / "cpuinfo_max_freq").write_text("3700000\n")
    top: Topology = topology(sys_root=tmp_path)
    assert top.max_mhz == 3700
    slow = replace(top, max_mhz=1000)
    a, b = (make_fingerprint(t, frozenset({"avx2"})) for t in (top, slow))
    assert a.key == b.key and a.tuning_key != b.tuning_key


def test_without_an_instruction_for_both_kernels_multiply_and_add_apart() -> None:
    """`llvm.fma` there is a call of C's function for every element, and the peak a hundredth of what kernels reach."""
    for target in host_levels():
        assert ("llvm.fma." in peaks_code.module_text(target)) is target.fma
