"""Random groups: the kernel's meaning and the machine's result against torch in double precision."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hotfuse.ir.text import show as show_graph
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.cpu.group import lower_group
from hotfuse.tile.text import show as show_kernel
from tests.contract.lowering import group_of, interpret, run_native
from tests.fuzz.groups import RandomGroup, random_group

COUNT = int(os.environ.get("HOTFUSE_FUZZ_GROUPS", "240"))
FIRST = int(os.environ.get("HOTFUSE_FUZZ_SEED", "0"))
BATCH = 40
LARGE = 8000
"""Elements; larger groups are run natively only: the interpreter takes a minute for a sort of some ten thousand."""
RTOL, ATOL = 2e-4, 2e-4
"""Chains of up to eight ops, sums of up to some thousand terms, exponentials among them."""


def close(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> None:
    """Near the exact result, or as near as torch itself comes (a chain may amplify any rounding)."""
    for g, w, p in zip(got, want, plain, strict=True):
        assert g.shape == w.shape and g.dtype == p.dtype
        g, p = g.double(), p.double()
        allowed = ATOL + RTOL * w.abs() + 8 * (p - w).abs().nan_to_num(posinf=0.0, neginf=0.0)
        allowed = torch.where(torch.isfinite(w) & torch.isfinite(p), allowed, torch.inf)
        bad = ~((g - w).abs() <= allowed) & ~((g == w) | (torch.isnan(g) & torch.isnan(w)) | ~torch.isfinite(p))
        assert not bad.any(), f"{int(bad.sum())} elements differ, at first {g[bad][0]} for {w[bad][0]}"


def check(group: RandomGroup, symbolic: bool, folder: Path) -> bool:
    """Whether it was lowered; fails with the seed, the group and the kernel when a result is wrong."""
    traced = group_of(group, group.inputs, symbolic)
    try:
        lowered = lower_group(traced.graph)
    except CannotLower:
        return False
    want = group(*(t.double() for t in group.inputs))
    plain = group(*group.inputs)
    try:
        if max(t.numel() for t in (*group.inputs, *plain)) <= LARGE:
            close(interpret(lowered, traced, group.inputs), want, plain)
        close(run_native(lowered, traced, group.inputs), want, plain)
    except Exception as e:
        saved = folder / f"group_{group.seed}.txt"
        saved.write_text(f"{group}\n\n{show_graph(traced.graph)}\n\n{show_kernel(lowered.kernel)}\n")
        raise AssertionError(f"seed {group.seed}, symbolic {symbolic}, saved as {saved}: {e}\n{group}") from e
    return True


def borders_of_floor(group: RandomGroup) -> bool:
    """floor may fall to either side when its argument is rounded differently: such groups prove nothing."""
    return any(s.name in ("unary12",) for s in group.steps)


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, BATCH))
def test_random_groups(first: int, tmp_path: Path) -> None:
    lowered = total = 0
    for seed in range(first, min(first + BATCH, FIRST + COUNT)):
        group = random_group(seed)
        if borders_of_floor(group):
            continue
        total += 1
        lowered += check(group, symbolic=seed % 3 == 0, folder=tmp_path)
    assert lowered >= total * 0.6, f"only {lowered} of {total} groups from seed {first} became kernels"


def test_a_seed_gives_one_group() -> None:
    assert str(random_group(7)) == str(random_group(7)) != str(random_group(8))
