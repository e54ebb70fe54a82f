"""How rows of reductions are gone through on paper, against what lowering makes of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from hotfuse.compile.learn import measure
from hotfuse.hpm import reduction_passes
from hotfuse.hpm.cuts import LATENCY
from hotfuse.hpm.drawn_problems import EACH_ROWS, calibrated, draws
from hotfuse.hpm.features import NAMES, derive
from hotfuse.hpm.fitted import TERMS
from hotfuse.hpm.reduction_passes import cut
from hotfuse.hpm.roofline import machine_roofline
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.work import COLUMN, Candidate
from hotfuse.ir.dims import evaluate
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.lower import Core, lower
from hotfuse.lower.cpu.write import parts
from hotfuse.machine.topology import topology
from hotfuse.tile.program import Loop, Stmt, When, instructions

ROOFLINE = machine_roofline(None, topology(), 16)


def told(graph: Graph, sizes: Mapping[str, int], lanes: int = 16) -> dict[str, float]:
    """Features and amounts of a candidate, by name."""
    found = derive(RowCache(measure.tile_of).rows([Candidate(graph, sizes, Core(lanes, 32))]), ROOFLINE)
    return {
        **dict(zip(NAMES, found.x[0].tolist(), strict=True)),
        **dict(zip(TERMS, found.amounts[0].tolist(), strict=True)),
    }


def norm(width: int, *, front: str = "") -> Graph:
    """A layer norm of rows, maybe of what is computed of two tensors."""
    of = "%y" if front else "%x"
    return parse(f"""graph group(%x: f32[n, {width}]{", %z: f32[n, " + str(width) + "]" if front else ""}) {{
  param %gamma: f32[{width}] = "gamma"
  param %beta: f32[{width}] = "beta"
{f"  %y: f32[n, {width}] = aten.{front}.Tensor(%x, %z)" if front else ""}
  %out: f32[n, {width}] = aten.layer_norm.default({of}, [{width}], %gamma, %beta, 1e-05)
  return %out
}}""")


def turns(body: Sequence[Stmt], env: Mapping[str, int], times: int, found: Counter[int]) -> bool:
    """Rounds of innermost loops by the elements that each takes; whether there are loops."""
    loops = False
    for s in body:
        if isinstance(s, When) and evaluate(s.pred, env):
            loops |= turns(s.body, env, times, found)
        elif isinstance(s, Loop):
            loops, first = True, evaluate(s.lo, env)
            rounds = max(0, -(-(evaluate(s.hi, env) - first) // s.step))
            blocks = rounds if s.step > 1 else 1  # the last of several may be shorter
            each = times * rounds // max(blocks, 1)
            if not any([turns(s.body, {**env, s.var: first + n * s.step}, each, found) for n in range(blocks)]):
                found[s.step] += times * rounds
    return loops


def told_and_made(graph: Graph, env: Mapping[str, int], lanes: int) -> tuple[str, tuple[float, float], tuple[float, float]]:
    """How rows are gone through, and turns of several vectors and of one: by the formula, and in the lowered kernel."""
    row = RowCache(measure.tile_of).rows([Candidate(graph, env, Core(lanes, 32))])[0]
    columns = {n: np.array([float(row[i])]) for n, i in COLUMN.items()}
    found = reduction_passes.passes(columns, np.array([float(lanes)]), ROOFLINE)
    told = {n: float(np.atleast_1d(a)[0]) for n, a in zip(reduction_passes.TERMS, found.amounts, strict=True)}
    made = Counter[int]()
    turns(lower(graph, Core(lanes, 32)).kernel.body, env, 1, made)
    whole = sum(n for step, n in made.items() if step in (2 * lanes, 4 * lanes))
    if told["three_rows"] or told["pool_turns"]:
        return "other loops", (0, 0), (0, 0)
    if told["lanes_wait"]:  # each turn is a round of the loop along the reduction
        return "across", (0, told["lanes_wait"] / LATENCY), (whole, made.total() - whole)
    along = (told["once_whole"] + told["again_whole"], told["once_single"] + told["again_single"])
    return ("along" if any(along) else "no rows"), along, (whole, made.total() - whole)


@pytest.mark.parametrize("lanes", [8, 16])
def test_turns_are_those_of_the_kernel_whatever_is_drawn(lanes: int) -> None:
    met = Counter[str]()
    for problem in itertools.islice(draws(lanes, "rows"), 60):
        how, told, made = told_and_made(problem.graph, problem.sizes[0], lanes)
        met[how] += 1
        assert how == "no rows" or told == made, (how, problem.graph)
    assert met["along"] > 10 and met["across"] > 2


ROW, TWO, TURNED = "%x: f32[n, W]", "%x: f32[n, W], %z: f32[n, W]", "%w: f32[W, n], %x: f32[n, W]"


@pytest.mark.parametrize(("inputs", "body"), [
    (ROW, "%y: f32[n, 1] = aten.sum.dim_IntList(%x, [-1], True)"),
    (ROW, "%g: f32[n, W] = aten.gelu.default(%x)\n  %y: f32[n, 1] = aten.amax.default(%g, [-1], True)"),
    (TWO, "%g: f32[n, W] = aten.mul.Tensor(%x, %z)\n  %y: f32[n, 1] = aten.amax.default(%g, [-1], True)"),
    (TURNED, "%t: f32[n, W] = aten.transpose.int(%w, 0, 1)\n  %g: f32[n, W] = aten.mul.Tensor(%t, %x)\n"
             "  %y: f32[n, 1] = aten.amax.default(%g, [-1], True)"),
    (ROW, "%y: f32[n] = aten.var.correction(%x, [-1])"),
    (ROW, "%y: f32[n, W] = aten.layer_norm.default(%x, [W])"),
    (ROW, "%y: f32[1, W] = aten.amax.default(%x, [0], True)"),
    (ROW, "%g: f32[n, W] = aten.gelu.default(%x)\n  %y: f32[1, W] = aten.mean.dim(%g, [0], True)"),
    (ROW, "%y: f32[W] = aten.var.correction(%x, [0])"),
    (ROW, "%y: f32[n, W] = aten.softmax.int(%x, 0)"),
])  # fmt: skip
@pytest.mark.parametrize("lanes", [8, 16])
def test_narrow_rows_and_operands_that_lie_otherwise_are_gone_through_as_lowering_does(
    inputs: str, body: str, lanes: int
) -> None:
    """Where rows suit vectors better than columns, lanes are rows; functions make the steps of strips shorter, too."""
    for width in (3, 5, 8, 9, 16, 17, 40, 100):
        graph = parse(f"graph group({inputs}) {{\n  {body}\n  return %y\n}}".replace("W", str(width)))
        _, told, made = told_and_made(graph, {"n": 42}, lanes)
        assert told == made, width


@pytest.mark.parametrize(("lanes", "several"), [(lanes, n) for lanes in (4, 8, 16) for n in (2, 4)])
def test_a_loop_is_cut_as_lowering_cuts_it(lanes: int, several: int) -> None:
    for length in (*range(1, 200), 255, 256, 257, 1000, 1024):
        made = parts(0, length, [lanes * several, lanes])
        turns = {p.width: -(-(int(str(p.stop)) - int(str(p.start))) // p.width) for p in made}
        found = cut(np.array([float(length)]), np.array([float(lanes)]), float(several))
        assert found.whole[0] == turns.get(lanes * several, 0), length
        steps = sum(-(-(int(str(p.stop)) - int(str(p.start))) // p.width) for p in made)
        assert found.turns[0] == steps, length
        assert found.sums[0] == len(turns), length
        assert bool(found.masked[0]) == any(p.partial for p in made), length


@pytest.mark.parametrize("width", [32, 40, 46, 48, 64, 70, 96, 101, 128, 200, 1000])
@pytest.mark.parametrize("lanes", [8, 16])
def test_sums_put_together_are_those_of_the_kernel(width: int, lanes: int) -> None:
    graph = norm(width)
    kernel = lower(graph, Core(lanes, 32)).kernel
    assert told(graph, {"n": 10}, lanes)["sums"] == sum(i.op == "reduce.sum" for i in instructions(kernel.body))


def test_a_mask_that_is_read_back_counts_for_itself() -> None:
    whole, odd, kept = (told(g, {"n": 100}) for g in (norm(64, front="mul"), norm(70), norm(70, front="mul")))
    assert (whole["masked"], odd["masked"], kept["masked"]) == (0, 1, 2)
    assert whole["kept_masked"] == odd["kept_masked"] == 0 < kept["kept_masked"]
    assert kept["kept_vectors"] > 0 == odd["kept_vectors"]


def test_what_operators_tell_of_rows() -> None:
    graph = parse("""graph group(%x: f32[n, 32]) {
  %s: f32[n, 32] = aten.softmax.int(%x, -1)
  %t: f32[n, 32] = aten.mul.Tensor(%s, %x)
  %u: f32[1, 32] = aten.sum.dim_IntList(%t, [0], True)
  return %u
}""")
    row = RowCache(measure.tile_of).rows([Candidate(graph, {"n": 9}, Core(16, 32))])[0]
    assert (row[COLUMN["folds"]], row[COLUMN["joined"]], row[COLUMN["across"]]) == (3, 1, 1)


def test_lanes_that_are_results_wait_along_the_reduction() -> None:
    def across(rows: int) -> float:
        text = "graph group(%x: f32[n, 64]) {\n  %u: f32[1, 64] = aten.sum.dim_IntList(%x, [0], True)\n  return %u\n}"
        return told(parse(text), {"n": rows})["lanes_wait"]

    assert across(300) == pytest.approx(3 * across(100)) and across(100) > 0
    assert told(norm(64), {"n": 100})["lanes_wait"] == 0


def test_an_operand_that_lies_otherwise_is_turned() -> None:
    text = """graph group(%x: f32[1, 96, 50]) {{
  %t: f32[1, 50, 96]{layout} = aten.transpose.int(%x, 1, 2)
  %c: f32[1, 50, 96] = aten.mul.Tensor(%t, 0.5)
  return %c
}}"""
    for layout in ("", "{0,2,1}"):
        graph = parse(text.format(layout=layout))
        row = RowCache(measure.tile_of).rows([Candidate(graph, {}, Core(16, 32))])[0]
        assert row[COLUMN["turned"]] == 50 * 96, layout


def test_calibration_has_more_rows_than_models() -> None:
    found = list(itertools.islice(calibrated(3), 60))
    assert [p.key for p in found] == [p.key for p in itertools.islice(calibrated(3), 60)]
    plain = list(itertools.islice(draws(3), 48))
    assert [p.key for p in plain] == [p.key for n, p in enumerate(found, 1) if n % (EACH_ROWS + 1)]
    assert all(p.family in ("reduction", "broadcast") for n, p in enumerate(found, 1) if n % (EACH_ROWS + 1) == 0)


def test_every_kind_of_rows_has_a_kernel() -> None:
    ops: set[str] = set()
    for problem in itertools.islice(draws(5, "rows"), 60):
        lower(problem.graph, Core(16, 32))
        ops |= {n.op.split(".")[1] for n in problem.graph.nodes}
    assert {
        "softmax",
        "layer_norm",
        "rms_norm",
        "sum",
        "mean",
        "amax",
        "embedding",
        "adaptive_avg_pool2d",
        "transpose",
    } <= ops


@pytest.mark.parametrize("call", [
    "softmax.int(%x, -1)", "log_softmax.int(%x, -1)", "logsumexp.default(%x, [-1], True)", "layer_norm.default(%x, [W])",
    "rms_norm.default(%x, [W], %g, 1e-05)", "var.correction(%x, [-1], correction=1, keepdim=True)", "group_norm.default(%x, 1)",
    "std.correction(%x, [-1], correction=1, keepdim=True)", "argmax.default(%x, -1, True)", "mean.dim(%x, [-1], True)",
    "amax.default(%x, [-1], True)", "prod.dim_int(%x, -1, True)", "linalg_vector_norm.default(%x, 2, [-1], True)",
])  # fmt: skip
def test_operators_fold_rows_as_often_as_their_kernels(call: str) -> None:
    """Behind a function, so that a softmax is gone through like any other reduction. Places are numbers of eight bytes, of which a
    vector holds half as many."""
    places = "argmax" in call
    for width in (48, 70, 256):
        out = f"f32[n, {width}]" if "True" not in call else f"{'i64' if places else 'f32'}[n, 1]"
        graph = parse(f"""graph group(%v: f32[n, {width}], %g: f32[{width}]) {{
  %x: f32[n, {width}] = aten.mul.Tensor(%v, 0.5)
  %y: {out} = aten.{call}
  return %y
}}""".replace("W", str(width)))
        how, told, made = told_and_made(graph, {"n": 42}, 16)
        if places:
            how, told, _ = told_and_made(graph, {"n": 42}, 8)
        assert how == "along" and told == made, (call, width)
