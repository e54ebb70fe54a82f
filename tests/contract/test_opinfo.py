"""PyTorch's own OpInfo database as an oracle: what `hotfuse.jit` serves is what eager gives.

Every sample is called three times: the first call runs the op itself and captures it, the second must run in the captured
graph, the third must be right for other data. An op on the list of known failures must still fail, or be taken off.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

import hotfuse
from hotfuse.base.events import Why
from hotfuse.base.settings import Settings
from tests.contract.opinfo import Case, cases, op_names
from tests.seeds import seed

PER_DTYPE = 2
INLINE = Settings(capture="inline")
OPS = [op for op in op_names() if not op.startswith(("empty", "new_empty"))]
"""What `empty` gives is whatever the memory held: nothing to compare."""

RANDOM = "draws random numbers, which a captured graph would repeat"
DATA_SIZED = "torch cannot size its result without its data"
DATA_BRANCH = "branches in C++ on its data"
STATEFUL = "writes into its input"
HELPER_SYMBOL = "torch.export loses a size that the op reads from data and does not return"
NESTED = "gives a tensor and a list of tensors: the converter knows one level of results"

_REASONS: dict[str, str] = {
    RANDOM: """bernoulli cauchy exponential geometric log_normal multinomial normal normal.in_place normal.number_mean
        nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d nn.functional.rrelu pca_lowrank rand_like
        randint randint_like randn randn_like svd_lowrank uniform""",
    DATA_BRANCH: "corrcoef cov nn.functional.gaussian_nll_loss"
    + (" nanquantile quantile" if torch.__version__ < "2.13" else ""),
    DATA_SIZED: "linalg.lstsq linalg.lstsq.grad_oriented nn.functional.ctc_loss nn.functional.one_hot",
    STATEFUL: """_batch_norm_with_update _native_batch_norm_legit""",
    HELPER_SYMBOL: "combinations narrow",
    NESTED: "histogramdd",
}
_SAYS: dict[str, str] = {  # what the refusal must say, so that no op hides behind another's reason
    RANDOM: "draws random numbers",
    DATA_BRANCH: "DataDependent",
    DATA_SIZED: "DynamicOutputShapeException|GuardOnDataDependentSymNode",
    STATEFUL: "writes memory|changes its own state",
    HELPER_SYMBOL: "PendingUnbackedSymbolNotFound",
    NESTED: "returns a list inside its results",
}
KNOWN = {op: reason for reason, ops in _REASONS.items() for op in ops.split()}


def _copies(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


def _same(got: Any, want: Any, what: str) -> None:
    (got_leaves, got_spec), (want_leaves, want_spec) = tree_flatten(got), tree_flatten(want)
    assert got_spec == want_spec, f"{what}: structure {got_spec} instead of {want_spec}"
    for g, w in zip(got_leaves, want_leaves, strict=True):
        assert type(g) is type(w), f"{what}: {type(g)} instead of {type(w)}"
        if isinstance(w, torch.Tensor):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m: f"{what}: {m}")
        else:
            assert g == w or g != g, what


def run_sample(case: Case) -> str:
    """Serve one sample; gives why it did not run in a captured graph, or nothing."""
    fast = hotfuse.jit(case.fn, settings=INLINE)
    seed()
    fast(*_copies(case.tensors))
    if fast.explain().to_dict()["decisions"][-1]["why"] in (Why.READS_DATA, Why.OTHER_PATH):  # the next call shows which way
        seed()
        fast(*_copies(case.tensors))
    seed()
    want = case.fn(*_copies(case.tensors))
    seed()
    got = fast(*_copies(case.tensors))
    if fast.stats()["graph_calls"] != 1:
        return str(fast.explain().to_dict()["decisions"][-1])
    _same(got, want, case.id)
    other = [t.flip(0) if t.dim() else t.clone() for t in case.tensors]
    seed()
    try:
        want = case.fn(*[t.clone() for t in other])
    except (RuntimeError, IndexError, ValueError):
        return ""  # the op refuses this data
    seed()
    _same(fast(*other), want, f"{case.id} on other data")
    return ""


@pytest.mark.budget_s(20)
@pytest.mark.parametrize("op", OPS)
def test_served_as_eager(op: str) -> None:
    refused: list[str] = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases(op, PER_DTYPE):
            if why := run_sample(case):
                refused.append(f"{case.id}: {why}")
    if op in KNOWN:
        assert refused, f"{op} passes now: take it off the list"
        other = [why for why in refused if not re.search(_SAYS[KNOWN[op]], why)]
        assert not other, "refused for another reason than the list says:\n" + "\n".join(other)
    else:
        assert not refused, "\n".join(refused)


def test_known_failures_are_ops_of_the_database() -> None:
    assert set(KNOWN) <= set(OPS)
    assert len(OPS) >= 675 and len(KNOWN) <= 40
