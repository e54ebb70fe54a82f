"""Kernels at rest are the kernels they were."""

from __future__ import annotations

import random

import pytest

from hotfuse.lower.common.codec import from_json, header_from_json, to_json
from hotfuse.lower.common.lowered import Lowered
from hotfuse.tile.compressed import StoredKernel, StoredKernels, header
from hotfuse.tile.program import instructions
from hotfuse.tile.text import show
from tests.fuzz.kernels import random_kernel


@pytest.mark.parametrize("seed", range(8))
def test_what_is_stored_is_read_again(seed: int) -> None:
    kernel = random_kernel(random.Random(seed))
    kept = StoredKernels({3: StoredKernel.of(kernel.name, show(kernel)), 5: StoredKernel.of("other", show(kernel))})
    assert show(kept[3]) == show(kernel) and kept.names() == {3: kernel.name, 5: "other"}
    assert list(kept.only({5, 9})) == [5] and not kept.only(set())
    assert header(kernel).body == () and header(kernel).buffers == kernel.buffers
    assert header(kernel).ops == kernel.ops == frozenset(i.op for i in instructions(kernel.body)) and kernel.ops


@pytest.mark.parametrize("seed", range(8))
def test_headers_are_read_without_statements(seed: int) -> None:
    kernel = random_kernel(random.Random(seed))
    said = to_json(Lowered(kernel, (), ()))
    read = header_from_json(said)
    assert read == header(kernel) and read.ops == kernel.ops and show(from_json(said).kernel) == show(kernel)
