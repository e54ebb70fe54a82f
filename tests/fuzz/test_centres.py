"""Random groups around heavy centres: native code against torch in double precision, as near as torch's own result comes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hotfuse.ir.text import show as show_graph
from hotfuse.lower import CannotLower, Core, lower
from hotfuse.tile.text import show as show_kernel
from tests.contract.lowering import group_of, run_native
from tests.fuzz.centres import HALVES, Centre, random_centre

COUNT = int(os.environ.get("HOTFUSE_FUZZ_CENTRES", "60"))
FIRST = int(os.environ.get("HOTFUSE_FUZZ_SEED", "0"))
BATCH = 20
BOUND = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest element; sums of at most some hundred terms in f32, one rounding to the result's type."""


def check(centre: Centre, symbolic: bool, folder: Path) -> bool:
    """Whether it was lowered; fails with the seed, the group and the kernel when a result is wrong."""
    tensors = centre.tensors
    traced = group_of(centre, tensors, symbolic, constants=True)
    try:
        lowered = lower(traced.graph, Core(16, 32))
    except CannotLower:
        return False
    exact = centre(*(t.double() if t.is_floating_point() else t for t in tensors))
    plain = centre(*tensors)
    try:
        (got,) = run_native(lowered, traced, tensors)
        assert got.shape == plain.shape and got.dtype is plain.dtype
        scale = exact.double().abs().amax().item() if exact.numel() else 0.0
        dtype = next((t.dtype for t in tensors if t.dtype in HALVES), torch.float32)
        allowed = BOUND.get(dtype, 1e-5) * (1 + scale) + 4 * (plain.double() - exact.double()).abs().amax().item()
        worst = (got.double() - exact.double()).abs().amax().item()
        assert worst <= allowed, f"off by {worst}, allowed {allowed}"
    except Exception as e:
        saved = folder / f"centre_{centre.seed}.txt"
        saved.write_text(f"{centre}\n\n{show_graph(traced.graph)}\n\n{show_kernel(lowered.kernel)}\n")
        raise AssertionError(f"symbolic {symbolic}, saved as {saved}: {e}\n{centre}") from e
    return True


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, BATCH))
def test_random_centres(first: int, tmp_path: Path) -> None:
    seeds = range(first, min(first + BATCH, FIRST + COUNT))
    lowered = sum(check(random_centre(seed), symbolic=seed % 3 == 0, folder=tmp_path) for seed in seeds)
    assert lowered >= len(seeds) * 0.5, f"only {lowered} of {len(seeds)} groups from seed {first} became kernels"


def test_a_seed_gives_one_centre() -> None:
    assert str(random_centre(7)) == str(random_centre(7)) != str(random_centre(8))
