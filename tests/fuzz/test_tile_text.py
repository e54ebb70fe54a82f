"""Kernels print and parse back to themselves and run; malformed text is a ModelError with a place, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotfuse.base.errors import ModelError
from hotfuse.tile.interpreter import run
from hotfuse.tile.text import parse, show
from hotfuse.tile.verify import verify
from tests.fuzz.damage import broken, read_or_refused
from tests.fuzz.kernels import random_arrays, random_kernel, random_sizes

SPLINTERS = [
    "", '"', "%", "(", "}", "[", "1e999", "²", "\\", "-", "kernel", "@", "#", "for", "9" * 5000, "\ud800", "..", "yield", "()",
    "float(", "(2 ** -1)", "(1 // 0)", "*", "1.5", "valid(*)", "if", "carry(", "{axis=1}",
]  # fmt: skip
RANDOM = st.randoms(use_true_random=False)


@settings(deadline=None, max_examples=200)
@given(RANDOM)
def test_round_trip(rng: random.Random) -> None:
    kernel = random_kernel(rng, odd=True)
    text = show(kernel)
    back = parse(text)
    assert back == kernel
    # Equality takes 1 and 1.0 for the same, and -0.0 for 0.0; repr and text do not.
    assert repr(back) == repr(kernel)
    assert show(back) == text
    verify(back)


@settings(deadline=None, max_examples=60)
@given(RANDOM, st.integers(0, 2**32 - 1))
def test_kernels_run_in_any_order(rng: random.Random, seed: int) -> None:
    kernel = random_kernel(rng)
    sizes = random_sizes(kernel, seed)
    results: list[dict[str, bytes]] = []
    for order in (1, 2):
        arrays = random_arrays(kernel, sizes, seed)
        run(kernel, arrays, sizes, seed=order)
        results.append({name: np.ascontiguousarray(a).tobytes() for name, a in arrays.items()})
    assert results[0] == results[1]


@settings(deadline=None, max_examples=300)
@given(RANDOM, st.data())
def test_broken_text_is_a_model_error(rng: random.Random, data: st.DataObject) -> None:
    read_or_refused(broken(show(random_kernel(rng, odd=True)), SPLINTERS, data), parse, show, verify)


@pytest.mark.parametrize("opening", ["(", "x[", "max(", "if 1 {", "for i in 0..1 {", "load ", "[", "%", "0..", "carry("])
def test_deep_nesting_is_refused(opening: str) -> None:
    deep = opening * 20_000
    for text in (f"kernel k() {{ load x[{deep}", f"kernel k() {{ {deep}", f"kernel k() {{ input x: f32[{deep}", deep):
        with pytest.raises(ModelError):
            parse(text)


@pytest.mark.parametrize(
    "junk", [" " * 200_000, "#" * 200_000, '"' * 20_000, "%" * 20_000, "\\" * 20_000, '"\\' * 99_000, "1." * 99_000],
    ids=lambda junk: repr(junk[:2]),
)  # fmt: skip
def test_long_junk_ends_quickly(junk: str) -> None:
    with pytest.raises(ModelError):
        parse("kernel k(" + junk)
