"""Graphs on live rows alone, against the model in float64: every way to spell a mask, every way to read the result."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.pipeline import compile_tier0, compile_tier1
from hotfuse.runtime.serve import packing as serving
from hotfuse.runtime.serve.packing import PackedRun, Padded
from hotfuse.runtime.tierup.padding import NotPadded, PaddedTraffic, padded_traffic
from hotfuse.specialize.row_demands import CannotPack
from tests.padded import (
    TOKENS,
    Answering,
    AttendingEncoder,
    CausalScores,
    Compared,
    Frames,
    Hiding,
    LibraryEncoder,
    LookedUp,
    MaskedInside,
    PaddedEncoder,
    batch,
    features,
)

CAPTURED = Settings(capture="inline", tiers=0)
Batches = Callable[..., tuple[torch.Tensor, ...]]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def captured(model: nn.Module, batches: Batches, dynamic: bool) -> Any:
    """The graph of a model, for sizes as they come or for any."""
    fast: Any = hotfuse.jit(model.eval(), settings=CAPTURED)
    for i in range(12 if dynamic else 2):
        fast(*batches(*((2 + i % 3, 20 + i) if dynamic else (3, 16))))
    (site,) = fast._engine.sites.values()
    entry = next(e for e in site.entries if bool(e.symbols) is dynamic)
    fast.close()
    return entry


def packed(model: nn.Module, batches: Batches = batch, dynamic: bool = False, ignore: bool = False) -> tuple[PaddedTraffic, Any]:
    entry = captured(model, batches, dynamic)
    found = padded_traffic(entry.baseline.graph, entry.weights, [batches(3, 16) for _ in range(4)], ignore_outputs=ignore)
    return found, compile_tier0(found.packer.graph, entry.weights, CAPTURED)


def in_float64(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return copy.deepcopy(model).double()(*(t.double() if t.is_floating_point() else t for t in inputs))


def assert_right(model: nn.Module, found: PaddedTraffic, plan: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    given = found.packer(inputs)
    assert isinstance(given, tuple), given
    torch.testing.assert_close(plan.run(*inputs, *given)[0].double(), in_float64(model, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "attends",
    ["expanded", "lowest", "indexed", "filled", "filled, low", "chosen, low", "chosen, a tensor", "heads in the batch", "added"],
)
def test_every_spelling_of_a_mask(attends: str) -> None:
    model = PaddedEncoder(attends)
    found, plan = packed(model, dynamic=attends == "indexed")
    assert found.packing.products == 10
    for share in (0.05, 0.4, 1.0):
        assert_right(model, found, plan, batch(3, 16, share))


@pytest.mark.parametrize("attends", ["biased", "biased, chosen", "biased, for each", "biased behind"])
def test_a_bias_is_read_at_live_rows(attends: str) -> None:
    model = PaddedEncoder(attends)
    entry = captured(model, batch, False)
    calls = [batch(3, 16) for _ in range(4)]
    found = padded_traffic(entry.baseline.graph, entry.weights, calls, ignore_outputs=False)
    assert found.packing.products == 10
    given = found.packer(calls[0])
    assert isinstance(given, tuple)
    native = compile_tier1(found.packing.graph, entry.weights, [*calls[0], *given], CAPTURED)
    plain = compile_tier0(found.packing.graph, entry.weights, CAPTURED)
    for share in (0.05, 0.4, 1.0):
        for plan in (plain, native):
            assert_right(model, found, plan, batch(3, 16, share))
    assert native.counters().get("fell_back", 0) == 0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("attends", ["causal", "causal, grouped", "causal, repeated", "causal, a triangle", "causal, a buffer"])
def test_live_rows_keep_their_order(attends: str, dynamic: bool) -> None:
    model = PaddedEncoder(attends)
    found, plan = packed(model, dynamic=dynamic)
    assert found.packing.products == 10
    for share in (0.05, 0.4, 1.0):
        assert_right(model, found, plan, batch(3, 16, share))
    ids, mask = batch(3, 16)
    mask[0, :9], mask[1, 0] = 0, 0  # padding on the left
    if found.packing.first:  # rows that see nothing would be NaN, in the model too
        assert found.packer((ids, mask)) is Padded.POSITION
    else:
        assert_right(model, found, plan, (ids, mask))


def test_other_orders_stay_padded() -> None:
    model = PaddedEncoder("before its place")
    found, plan = packed(model)
    assert found.packing.products < 5, "only what comes behind the last attention"
    assert_right(model, found, plan, batch(3, 16))


@pytest.mark.parametrize("pools", ["expanded mean", "last", "largest", "largest, written", "largest, rows written", "weighed",
                                   "weighed, low", "weighed, lowered", "a product", "a product, turned", "an einsum"])
def test_every_reading_of_the_result(pools: str) -> None:
    model = PaddedEncoder(pools=pools)
    found, plan = packed(model, dynamic=pools == "last")
    assert found.packing.products >= 7
    for sequences, rows in ((3, 16), (2, 2), (5, 30)) if pools == "last" else ((3, 16),):
        assert_right(model, found, plan, batch(sequences, rows))


@pytest.mark.parametrize(("attends", "dynamic"), [("bool", False), ("spelled", False), ("library", True)])
def test_a_decoder_sees_live_rows_of_the_encoder(attends: str, dynamic: bool) -> None:
    model = Answering(attends, asks=0 if dynamic else 4)
    entry = captured(model, model.batch, dynamic)
    sequences = 2 if dynamic else 3
    calls = [model.batch(sequences, 16) for _ in range(4)]
    found = padded_traffic(entry.baseline.graph, entry.weights, calls, ignore_outputs=False)
    assert found.packing.products >= 8, "all of the encoder, and keys and values of the decoder"
    given = found.packer(calls[0])
    assert isinstance(given, tuple)
    plans = [compile_tier0(found.packing.graph, entry.weights, CAPTURED)]
    if attends == "bool":  # others are the same nodes by then
        plans.append(compile_tier1(found.packing.graph, entry.weights, [*calls[0], *given], CAPTURED))
    for rows, share in ((16, 0.05), (16, 1.0), *(((33, 0.4), (7, 0.4)) if dynamic else ())):
        for plan in plans:
            assert_right(model, found, plan, model.batch(sequences, rows, share))
    assert plans[-1].counters().get("fell_back", 0) == 0
    empty = model.batch(sequences, 16)
    empty[1][1] = 0
    assert found.packer(empty) is Padded.EMPTY


def test_scores_that_are_a_result_keep_what_they_are_at_dead_rows() -> None:
    model = PaddedEncoder(pools="lowered scores")
    with pytest.raises(CannotPack):
        packed(model)


@pytest.mark.parametrize("attends", ["causal", "causal, grouped"])
def test_the_last_row_of_sequences_that_are_padded_in_front(attends: str) -> None:
    """Its layer computes one query of each sequence (`simplify.picked_rows`), which no key is ahead of."""

    def behind(sequences: int, rows: int, share: float = 0.4) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(1, max(2, round(2 * share * rows)), (sequences, 1)).clamp(max=rows)
        return batch(sequences, rows)[0], (torch.arange(rows) >= rows - lengths).long()

    class Causal(PaddedEncoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            keys = torch.arange(mask.shape[1])
            seen = (keys[None, :] <= keys[:, None])[None, None] & mask.bool()[:, None, None, :]
            x = self.tokens(ids)
            for layer in self.layers:
                q, k, v = (t.view(*ids.shape, self.heads, -1).transpose(1, 2) for t in layer["qkv"](x).chunk(3, -1))
                x = x + layer["out"](F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))
                x = x + layer["down"](F.gelu(layer["up"](x)))
            return self.head(x[:, -1])

    model = Causal() if attends == "causal" else PaddedEncoder(attends, pools="last")
    found, plan = packed(model, behind)
    assert found.packing.products >= 5 and found.packing.last
    for share in (0.1, 0.4, 1.0):
        inputs = behind(3, 16, share)
        if not found.packing.first or bool(inputs[1][:, 0].all()):
            assert_right(model, found, plan, inputs)
    dead = behind(3, 16)
    dead[1][1, -1] = 0
    assert found.packer(dead) in (Padded.POSITION, Padded.EMPTY)


@pytest.mark.budget_s(2.5)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("made", ["not padding", "both", "neither of two", "longer", "shorter"])
def test_masks_that_a_model_makes_by_itself(made: str, dynamic: bool) -> None:
    model = MaskedInside(made)
    found, plan = packed(model, model.batch, dynamic=dynamic)
    assert found.packing.products == 10 and found.packer.maker is not None
    assert found.packer.maker.tells == ((1,) if made in ("longer", "shorter") else (0,))
    for sequences, rows in ((3, 16), (1, 5), (4, 2)) if dynamic else ((3, 16),):
        for share in (0.05, 0.4, 1.0):
            assert_right(model, found, plan, model.batch(sequences, rows, share))
    empty = tuple(torch.zeros_like(t) if made in ("longer", "shorter") and i else t for i, t in enumerate(model.batch(3, 16)))
    if made in ("longer", "shorter"):
        assert found.packer(empty) is Padded.EMPTY
    else:
        assert found.packer((torch.zeros(3, 16, dtype=torch.int64),)) is Padded.EMPTY


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("pools", "styled"), [("last", False), ("apart", False), ("apart", True)])
def test_frames_and_their_numbers(pools: str, styled: bool, dynamic: bool) -> None:
    """Sizes of real numbers, a `gather` by lengths, and what is the same for all rows of a sequence leave rows packed."""
    model = Frames(pools, styled=styled)
    found, plan = packed(model, model.batch, dynamic=dynamic)
    assert found.packer.maker is not None and found.packer.products == (8 if pools == "last" else 11)
    for sequences, rows in ((3, 16), (1, 5), (4, 2)) if dynamic else ((3, 16),):
        for share in (0.05, 0.4, 1.0):
            assert_right(model, found, plan, model.batch(sequences, rows, share))
    x, lengths, style = model.batch(3, 16)
    lengths[1] = 0
    assert found.packer((x, lengths, style)) is Padded.EMPTY


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_row_at_a_place_that_inputs_tell(dynamic: bool) -> None:
    """Where it is dead, all of it is computed; its mask is an input, or made of one."""
    model = PaddedEncoder(pools="told")
    found, plan = packed(model, dynamic=dynamic)
    assert found.packing.products >= 7 and found.packer.place is not None
    for share in (0.1, 0.4, 1.0):
        assert_right(model, found, plan, batch(3, 16, share))
    inside = MaskedInside("not padding", "told")
    found, plan = packed(inside, inside.batch, dynamic=dynamic)
    assert found.packing.products >= 7 and found.packer.maker is not None and found.packer.place is not None
    for share in (0.1, 0.4, 1.0):
        assert_right(inside, found, plan, inside.batch(3, 16, share))

    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = PaddedEncoder(pools="nothing")

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.encoder(ids, mask)[torch.arange(ids.shape[0]), ids.argmax(1)]

    def ended(sequences: int, rows: int, share: float = 0.4) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = batch(sequences, rows, share)
        return (ids % 40).scatter(1, mask.argmax(1, keepdim=True), 49), mask

    other = Largest()
    found, plan = packed(other, ended, dynamic=dynamic)
    assert_right(other, found, plan, ended(3, 16))
    ids, mask = ended(3, 16)
    mask[1], mask[1, 3:9], ids[1, 12] = 0, 1, 49
    assert found.packer((ids, mask)) is Padded.POSITION, "row 0, which is the first of the largest, is dead"


def test_what_only_looks_like_a_mask_is_none() -> None:
    """Which keys live follows from numbers that an attention computes, or from floats: nothing cheap makes it again."""

    class OfScores(PaddedEncoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            seen = (self.score(self.tokens(ids)).squeeze(-1) > 0).long()
            return super().forward(ids, torch.cat([torch.ones_like(seen[:, :1]), seen[:, 1:]], 1)) + mask.sum()

    with pytest.raises(CannotPack, match="no mask of rows is made of inputs|no attention's keys"):
        packed(OfScores(), lambda b, s, share=0.4: (torch.randint(0, 50, (b, s)), torch.randint(0, 9, (b, s))))


@pytest.mark.parametrize("pools", ["counted", "gathered"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_row_that_the_count_of_live_rows_names(pools: str, dynamic: bool) -> None:
    """It is the last live one where padding stands behind; where that row is dead, all of it is computed."""

    def prefixes(sequences: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(1, rows, (sequences, 1))
        return batch(sequences, rows)[0], (torch.arange(rows) < lengths).long()

    model = PaddedEncoder(pools=pools)
    found, plan = packed(model, prefixes, dynamic=dynamic)
    assert found.packing.products == 7  # three others make one row of each sequence (`simplify.picked_rows`)
    for _ in range(3):
        assert_right(model, found, plan, prefixes(3, 16))
    ids, mask = prefixes(3, 16)
    mask[:] = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])  # four live rows, of which the fourth place holds one
    assert_right(model, found, plan, (ids, mask))
    mask[1] = mask[1].flip(0)
    assert found.packer((ids, mask)) is Padded.POSITION


@pytest.mark.parametrize("pools", ["mean", "first"])
def test_attention_that_also_makes_its_weights(pools: str) -> None:
    model = AttendingEncoder(pools)
    found, plan = packed(model, features)
    assert found.packing.products >= 5
    for share in (0.05, 0.4, 1.0):
        assert_right(model, found, plan, features(3, 16, share))


@pytest.mark.parametrize("attends", ["indexed", "filled"])
@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_a_file_that_spells_attention_out(attends: str) -> None:
    model = PaddedEncoder(attends).eval()
    file = io.BytesIO()
    dynamic = {name: {0: "b", 1: "s"} for name in ("ids", "mask")}
    torch.onnx.export(model, batch(3, 16), file, input_names=["ids", "mask"], dynamic_axes=dynamic, dynamo=False)
    session: Any = hotfuse.InferenceSession(file.getvalue(), settings=CAPTURED)
    ids, mask = batch(3, 16)
    for _ in range(2):
        session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})
    entry = next(iter(session._engine.sites.values())).entries[0]
    found = padded_traffic(entry.baseline.graph, entry.weights, [batch(3, 16) for _ in range(4)], ignore_outputs=False)
    assert found.packing.products == 10
    assert_right(model, found, compile_tier0(found.packing.graph, entry.weights, CAPTURED), batch(3, 16))
    session.close()


def test_layers_of_the_library() -> None:
    model = LibraryEncoder()
    found, plan = packed(model, features)
    assert found.packing.mask.dead is True
    assert_right(model, found, plan, features(3, 16))


def test_outputs_that_show_padded_rows_stay_unless_they_are_ignored() -> None:
    model = PaddedEncoder(pools="nothing")
    with pytest.raises(CannotPack, match="shows padded rows"):
        packed(model)
    found, plan = packed(model, ignore=True)
    inputs = batch(3, 16)
    given = found.packer(inputs)
    assert isinstance(given, tuple)
    (got,) = plan.run(*inputs, *given)
    live = inputs[1].bool()
    assert bool((got[~live] == 0).all())
    torch.testing.assert_close(got[live].double(), in_float64(model, inputs)[live], rtol=1e-4, atol=1e-5)
    (shown,) = found.shown(inputs, (in_float64(model, inputs),))
    torch.testing.assert_close(shown, got.double(), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_packed_says_why() -> None:
    class Both(PaddedEncoder):
        def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = mask.clone()
            hidden[:, 1::2] = 1  # keys that live for attention, and are dead for the mean
            return super()._attend(q, k, v, hidden)

    model = Both()
    found, plan = packed(model)  # what comes behind the last attention, for the mean
    assert 0 < found.packing.products < 5
    assert_right(model, found, plan, batch(3, 16))
    with pytest.raises(CannotPack, match="shows padded rows"):
        packed(Both(pools="nothing"))

    class Open(PaddedEncoder):
        def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    with pytest.raises(CannotPack, match="no attention's keys are hidden"):
        packed(Open(pools="nothing"))
    with pytest.raises(NotPadded, match="100% of all rows live"):
        packed(PaddedEncoder(), lambda b, s: (batch(b, s)[0], torch.ones(b, s, dtype=torch.int64)))


def test_calls_that_stay_padded() -> None:
    found, _ = packed(PaddedEncoder(pools="first"))
    ids, mask = batch(3, 16)

    def why(mask: torch.Tensor, ids: torch.Tensor = ids) -> object:
        made = found.packer((ids, mask))
        return None if isinstance(made, tuple) else made

    assert why(mask) is None
    empty, other, left, wrong = mask.clone(), mask.clone(), mask.clone(), ids.clone()
    empty[1] = 0
    other[0, 3] = 2
    left[2, 0], left[2, 5], wrong[0, 0] = 0, 1, 50
    assert why(empty) is Padded.EMPTY
    assert why(other) is Padded.NUMBERS
    assert why(left) is Padded.POSITION
    assert why(mask, wrong) is Padded.INDEX
    x, padding = features(3, 16)
    found, _ = packed(LibraryEncoder(), features)
    x[0][padding[0]] = torch.nan
    made = found.packer((x, padding))
    assert made is Padded.LARGE


@pytest.mark.parametrize("hides", [-1e4, -1e9, -torch.inf])
@pytest.mark.parametrize(("fills", "pools"), [(False, False), (True, False), (False, True)])
def test_rows_that_are_too_large_to_be_hidden_are_computed(hides: float, fills: bool, pools: bool) -> None:
    if hides == -torch.inf and not fills:
        pytest.skip("0 times it is NaN")
    model = Hiding(hides, fills=fills, pools=pools).eval()
    found, plan = packed(model, features)
    assert found.packing.lowers == (1e4 if pools else -hides)
    x, padding = features(3, 16)
    packs = list[float]()
    for large in (1.0, 1e2, 1e5, 1e20, torch.inf, torch.nan):
        given = torch.where(padding[..., None], large * x.sign(), x), padding
        made = found.packer(given)
        assert isinstance(made, tuple) or made is Padded.LARGE
        if isinstance(made, tuple):
            packs.append(large)
            assert_right(model, found, plan, given)
    assert packs == [n for n in (1.0, 1e2, 1e5) if n <= 4 * math.sqrt(found.packing.lowers / 1e4) * 5]
    spread = torch.where(padding[..., None], 1e5 * x, x), padding
    shown = torch.where(padding[..., None], 0 * x, x), padding
    same = torch.allclose(in_float64(model, spread), in_float64(model, shown))
    assert same is (fills or found.packing.lowers > 1e4), "a mask of -10,000 does not hide such rows"


@pytest.mark.parametrize(("hides", "large"), [(-1e4, 1.0), (-1e4, 1e4), (-1e9, 1e2)])
def test_a_table_with_rows_that_are_too_large_to_be_hidden_is_not_looked_up_packed(hides: float, large: float) -> None:
    def batches(count: int, length: int) -> tuple[torch.Tensor, ...]:
        return batch(count, length)[0].clamp(max=TOKENS - 2), features(count, length)[1]

    model = LookedUp(hides).eval()
    model.tokens.weight[TOKENS - 1] *= large
    if large == 1e4:
        with pytest.raises(CannotPack, match="much larger than those of calls"):
            packed(model, batches)
        return
    found, plan = packed(model, batches)
    ids, padding = batches(3, 16)
    assert_right(model, found, plan, (torch.where(padding, TOKENS - 1, ids), padding))


@pytest.mark.parametrize(("number", "any_first"), [(-1e9, True), (torch.finfo(torch.float32).min, True), (-torch.inf, False)])
def test_numbers_of_a_causal_mask_that_are_finite_let_sequences_begin_with_padding(number: float, any_first: bool) -> None:
    model = CausalScores(number).eval()
    found, plan = packed(model)
    ids, mask = batch(3, 16)
    mask[0, :9], mask[1, 0] = 0, 0
    assert found.packing.first is not any_first
    if any_first:
        assert_right(model, found, plan, (ids, mask))
    else:
        assert found.packer((ids, mask)) is Padded.POSITION


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_two_batches_with_a_mask_each_are_packed_by_both(inside: bool, dynamic: bool) -> None:
    model = Compared(inside=inside).eval()
    found, plan = packed(model, model.batch, dynamic)
    packer = found.packer
    assert packer.products == 10 and packer.then is not None and found.packing.products == 5
    assert set(packer.names(captured(model, model.batch, dynamic).baseline.graph.inputs)) == (
        {"tensors_1", "tensors_2"} if inside else {"tensors_1", "tensors_3"}
    )
    for share, asked in ((0.4, 0.4), (0.1, 1.0), (1.0, 0.1), (1.0, 1.0)):
        assert_right(model, found, plan, model.batch(3, 16, share, asked))
    inputs = model.batch(3, 16)
    alive = int(inputs[1].sum() + inputs[3].sum())
    assert packer.share(inputs) == alive / 72
    given, made = packer.with_all_rows(inputs)
    assert isinstance(made, tuple) and packer.mostly_live(given, made)
    everything = (inputs[0], torch.ones_like(inputs[1]), inputs[2], inputs[3] if inside else torch.ones_like(inputs[3]))
    assert all(torch.equal(a, b) for a, b in zip(given, everything, strict=True))
    made = packer(inputs)
    assert isinstance(made, tuple) and not packer.mostly_live(inputs, made)
    assert isinstance(replace(packer, limit=alive / 72)(inputs), tuple)
    assert replace(packer, limit=(alive - 1) / 72)(inputs) is Padded.SHARE
    for i in (1, 2 if inside else 3):  # either mask may say no
        empty = [t.clone() for t in inputs]
        empty[i][2] = 0
        assert packer(empty) is Padded.EMPTY


def test_the_mask_that_leaves_most_out_is_taken_first_and_one_that_hides_nothing_not_at_all() -> None:
    model = Compared().eval()
    entry = captured(model, model.batch, False)

    def found(*calls: tuple[torch.Tensor, ...]) -> PaddedTraffic:
        return padded_traffic(entry.baseline.graph, entry.weights, calls, ignore_outputs=False)

    little = found(model.batch(3, 16, 0.2, 1.0), model.batch(3, 16, 0.2, 1.0))
    assert little.packing.mask.name == "tensors_3" and little.packer.then is None and little.packer.products == 5
    assert found(model.batch(3, 16, 0.6, 0.2)).packing.mask.name == "tensors_1"


@pytest.mark.parametrize("call_s", [1e-6, 1.0])
def test_masks_without_padding_are_read_seldom_and_padding_is_noticed_again(
    monkeypatch: pytest.MonkeyPatch, call_s: float
) -> None:
    """Every mask is read where that is next to nothing of a call: a pause of 128 calls of a second were two minutes."""
    model, now = PaddedEncoder(), [0.0]
    found, plan = packed(model)

    def padded(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        now[0] += call_s
        return (model(*inputs),)

    def clock() -> float:
        now[0] += 1e-5
        return now[0]

    monkeypatch.setattr(serving, "time", SimpleNamespace(perf_counter=clock))
    run = PackedRun(replace(found.packer, limit=0.9), plan.run, padded)
    whole = (batch(3, 16)[0], torch.ones(3, 16, dtype=torch.int64))
    for _ in range(1000):
        run(*whole)
    seldom = call_s < 1
    assert (run.why_not.total() < 40) is seldom and run.unread == 1000 - run.why_not.total() and run.calls == 0
    for _ in range(200):  # some later call finds out
        inputs = batch(3, 16)
        torch.testing.assert_close(run(*inputs)[0].double(), in_float64(model, inputs), rtol=1e-4, atol=1e-5)
    assert run.calls > 70 if seldom else run.calls == 200
    before = run.unread
    for call in range(40):  # traffic that flips is read each time
        run(*(whole if call % 2 else batch(3, 16)))
    assert run.unread == before
