"""The table of specializations: every row proposes, layers stand in its order, and races move its priors."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hotfuse.cli import app
from hotfuse.ir.text import parse
from hotfuse.runtime.tierup.bets import BranchLayer
from hotfuse.runtime.tierup.layers.layer import with_layer
from hotfuse.runtime.tierup.layers.open_mask import OpenMaskLayer
from hotfuse.runtime.tierup.layers.zero_rows import ZeroRowsLayer
from hotfuse.runtime.tierup.proposals import PROPOSERS
from hotfuse.runtime.tierup.tiers import recurring
from hotfuse.specialize.outcomes import SHARES, BetContext, ModelFamily, SpecializationOutcomes, family_of
from hotfuse.specialize.table import BRANCH, REPEATED, ROWS, SIZES, TIER1, AttemptKey, branch_key, row, sizes_key


def test_every_row_has_a_proposer_and_words() -> None:
    assert set(PROPOSERS) == {r.name for r in ROWS} and len({r.name for r in ROWS}) == len(ROWS)
    for r in ROWS:
        assert 0 < r.prior < 1 and 0 <= r.saves < 1 and all((r.evidence, r.proposes, r.guard, r.when_wrong)), r
        assert f"{r.share:.0%}" in r.needs and "{" not in r.needs, "what it says is what proposers ask for"


def test_the_command_line_shows_the_table() -> None:
    text, data = (CliRunner().invoke(app, ["show", "none.onnx", "--stage", "specializations", *more]) for more in ([], ["--json"]))
    assert text.exit_code == data.exit_code == 0, text.output + data.output
    assert [r["name"] for r in json.loads(data.output)["specializations"]] == [r.name for r in ROWS]
    assert all(word in text.output for r in ROWS for word in (r.needs, r.proposes, r.guard, r.when_wrong))


def test_sizes_need_the_share_that_their_row_says() -> None:
    share = row(SIZES).share
    assert [a.value for a in recurring({(2,): share, (3,): share - 0.01}, 100, 4)] == [(2,)]


def test_keys_tell_attempts_apart_and_read_well() -> None:
    branches = [branch_key("%c", outcome=o) for o in (True, False)]
    keys = [TIER1, sizes_key((2, 3)), sizes_key((23,)), *branches, AttemptKey("zero rows")]
    assert len(set(keys)) == len({str(k) for k in keys}) == len(keys)
    assert str(TIER1) == "tier 1" and TIER1.tier == 1 and str(branch_key("%c", outcome=True)) == "branch: %c is true"


def test_layers_stand_in_the_order_of_the_table_whatever_came_first() -> None:
    rows, mask, branch = ZeroRowsLayer(("a",)), OpenMaskLayer("m", 1), BranchLayer("%c", (True,))
    want = (branch, mask, rows)
    for order in ((rows, mask, branch), (branch, rows, mask), (mask, branch, rows)):
        layers = ()
        for layer in order:
            layers = with_layer(layers, layer)
        assert layers == want
    both = BranchLayer("%c", (True, False))
    assert with_layer(want, both) == (both, mask, rows)
    assert both.keys == (branch_key("%c", outcome=True), branch_key("%c", outcome=False))
    assert with_layer(want, OpenMaskLayer("n", 1))[1:3] == (mask, OpenMaskLayer("n", 1))


def test_races_move_the_prior_of_a_row_and_of_its_context_more() -> None:
    outcomes, often, seldom = SpecializationOutcomes(), BetContext(0.9), BetContext(0.1)
    assert outcomes.promise(SIZES, often) == row(SIZES).prior
    for _ in range(8):
        outcomes.learn(SIZES, often, 1.0, 2.0, won=False)
    assert outcomes.promise(SIZES, often) < outcomes.promise(SIZES, seldom) < row(SIZES).prior == 0.4
    assert outcomes.promise(BRANCH, often) == row(BRANCH).prior, "rows do not teach each other"
    again = SpecializationOutcomes()
    again.restore(outcomes.state())
    assert again.promise(SIZES, often) == outcomes.promise(SIZES, often)
    again.restore({"of a newer program, mostly, other, longer": [3.0, 1.0, 0.0], f"{SIZES}, {SHARES[0][0]}": [3.0, 1.0, 0.0]})
    assert not again.rows, "of other programs"
    with pytest.raises(ValueError, match="5"):
        again.restore({seldom.name(SIZES): [3.0, 5.0, 0.0]})


def test_what_kind_of_model_it_is_and_what_its_calls_take_is_part_of_the_context() -> None:
    outcomes, small = SpecializationOutcomes(), BetContext(0.9, ModelFamily.OTHER, 30.0)
    for _ in range(4):
        outcomes.learn(REPEATED, small, 30.0, 40.0, won=False)
    others = (BetContext(0.9, ModelFamily.OTHER, 5e3), BetContext(0.9, ModelFamily.ATTENTION, 30.0))
    promises = [outcomes.promise(REPEATED, c) for c in (small, *others)]
    assert promises[0] < promises[1] == promises[2] < row(REPEATED).prior
    contexts = [BetContext(0.5, us=us).name(SIZES) for us in (None, 99.0, 100.0, 9e9)]
    assert len(set(contexts)) == 4 and contexts[0].endswith("not known")
    text = "graph g(%x: f32[2, 4, 8, 8], %w: f32[4, 4, 1, 1]) {\n  %y: f32[2, 4, 8, 8] = OP\n  return %y\n}"
    families = {"aten.conv2d.default(%x, %w)": ModelFamily.CONVOLUTION, "aten.softmax.int(%x, -1)": ModelFamily.ATTENTION,
                "aten.relu.default(%x)": ModelFamily.OTHER}  # fmt: skip
    assert {op: family_of(parse(text.replace("OP", op))) for op in families} == families
