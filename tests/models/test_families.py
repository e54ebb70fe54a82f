"""A few of the families of `benchmarks.families`: the same results and tokens as the models', from plans of tier 1.

`python -m benchmarks.programs families` serves all of them. Those here were once refused or left at tier 0, or are unlike the rest:
layers that draw random numbers, products of what was concatenated, a series, numbers in buffers that say how much to pad by.
"""

from __future__ import annotations

import pytest

from hotfuse import Settings

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from benchmarks.families import FAMILIES  # noqa: E402
from benchmarks.programs import family  # noqa: E402

ROWS = {row.name: row for row in FAMILIES}


def test_there_are_sixty_families_under_names_of_their_own() -> None:
    assert len(ROWS) == len(FAMILIES) >= 60 and sum(row.generates for row in FAMILIES) >= 30


@pytest.mark.budget_s(5)
@pytest.mark.parametrize("name", ["wav2vec2", "mamba", "patchtst", "encodec"])
def test_forward_at_tier_1(name: str) -> None:
    found = family(ROWS[name], Settings(capture="inline", watch=False), calls=12, runs=0)
    assert not found["wrong"], found
    assert found["forward"], found
