"""Kernels at rest are the kernels they were."""

from __future__ import annotations

import random

import pytest

from hotfuse.tile.stored import StoredKernel, StoredKernels, header
from hotfuse.tile.text import show
from tests.fuzz.kernels import random_kernel


@pytest.mark.parametrize("seed", range(8))
def test_what_is_stored_is_read_again(seed: int) -> None:
    kernel = random_kernel(random.Random(seed))
    kept = StoredKernels({3: StoredKernel.of(kernel.name, show(kernel)), 5: StoredKernel.of("other", show(kernel))})
    assert show(kept[3]) == show(kernel) and kept.names() == {3: kernel.name, 5: "other"}
    assert list(kept.only({5, 9})) == [5] and not kept.only(set())
    assert header(kernel).body == () and header(kernel).buffers == kernel.buffers
