"""What the performance model counts before a kernel is lowered, against what the lowered kernel executes (decision 501)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest

from hotfuse.analysis.vector_loops import CODE_OF, HEAVY, HEAVY_VECTORS, LIGHT_VECTORS
from hotfuse.base.errors import HotfuseError
from hotfuse.compile.learn import measure
from hotfuse.hpm.drawn_problems import calibrated
from hotfuse.hpm.features import derive
from hotfuse.hpm.fitted import TERMS
from hotfuse.hpm.roofline import machine_roofline
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.work import COLUMN, Candidate
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.lower import Core, lower
from hotfuse.lower.cpu.softmax_rows import is_rows
from hotfuse.machine.topology import topology
from hotfuse.tile.program import Loop, Stmt
from tests.contract.kernel_work import KernelWork, kernel_work

CORE = Core(16, 32)
TAIL, BEYOND_IMAGE = 1.3, 1.5
"""Vectors and blocks that are not full compute elements which nobody counts: at most this much more, over the draws below; more
where blocks of windows reach beyond small images."""
INSTRUCTIONS = {
    "exp": ("map.exp", "map.exp2", "map.expm1", "map.log", "map.log2", "map.log1p", "map.decay"),
    "sigmoid": ("map.exp",),
    "tanh": ("map.tanh", "map.expm1"),
    "erf": ("map.erf", "map.normal"),
    "root": ("map.sqrt", "map.rsqrt", "map.div", "map.mod", "map.rem"),
    "special": ("map.sin", "map.cos", "map.pow", "map.exp", "map.log", "map.sqrt"),
}
TWO = {"div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "hypot", "logaddexp", "xlogy"}
NAMES = {"aten.pow": "pow.Tensor_Tensor", "aten.xlogy": "xlogy.Tensor"}
NO_KERNEL = {"aten.erfc", "aten.true_divide", "aten.mish"}
"""Left to the library, or never in a graph by that name; of the last one only the class is asked."""


def row_of(graph: Graph, sizes: Mapping[str, int]) -> Mapping[str, float]:
    row = RowCache(measure.tile_of).rows([Candidate(graph, sizes, CORE)])[0]
    return {n: float(row[i]) for n, i in COLUMN.items()}


def single(packet: str) -> Graph:
    """One operator over rows."""
    name = packet.removeprefix("aten.")
    call = NAMES.get(packet, f"{name}.{'Tensor' if name in TWO - {'floor_divide', 'hypot', 'logaddexp'} else 'default'}")
    return parse(f"""graph group(%x: f32[n, 64], %z: f32[n, 64]) {{
  %y: f32[n, 64] = aten.{call}(%x{", %z" if name in TWO else ""})
  return %y
}}""")


def steps(body: tuple[Stmt, ...]) -> set[int]:
    """Elements that innermost loops take at once."""
    found: set[int] = set()
    for s in body:
        if isinstance(s, Loop):
            found |= steps(s.body) or {s.step}
    return found


@pytest.mark.parametrize("packet", sorted(set(CODE_OF) - NO_KERNEL))
def test_a_function_becomes_the_code_that_its_row_says(packet: str) -> None:
    graph = single(packet)
    kernel = lower(graph, CORE).kernel
    made = kernel_work(kernel, {"n": 8}).elements
    assert sum(made[i] for i in INSTRUCTIONS[CODE_OF[packet]]) >= 8 * 64
    assert max(steps(kernel.body)) == HEAVY_VECTORS * CORE.lanes and packet in HEAVY
    assert row_of(graph, {"n": 8})[CODE_OF[packet]] == 8 * 64


@pytest.mark.parametrize("op", ["add.Tensor", "mul.Tensor", "maximum.default"])
def test_arithmetic_is_cut_wider(op: str) -> None:
    graph = parse(f"graph group(%x: f32[n, 256], %z: f32[n, 256]) {{\n  %y: f32[n, 256] = aten.{op}(%x, %z)\n  return %y\n}}")
    assert max(steps(lower(graph, CORE).kernel.body)) == LIGHT_VECTORS * CORE.lanes


def counted(row: Mapping[str, float], work: KernelWork) -> list[tuple[str, float, float]]:
    """What is counted, what is executed: of products, and of functions by the instruction that alone stands for each."""
    found: list[tuple[str, float, float]] = []
    depthwise = row["groups"] == row["columns"] > 1  # sums of single channels: multiplications and additions, no product
    if (row["product"] or row["convolution"]) and not depthwise:
        found.append(("products", row["mma"] / 2 * row["kept_products"], work.multiply_adds))
    for code, instruction in (("tanh", "map.tanh"), ("erf", "map.normal")):
        if row[code]:
            found.append((code, row[code], work.elements[instruction]))
    exponentials = row["exp"] + row["sigmoid"]
    if exponentials and not row["attention"]:
        found.append(("exp", exponentials, sum(work.elements[f"map.{n}"] for n in ("exp", "decay", "log", "log1p", "expm1"))))
    return found


def test_counts_are_what_lowered_kernels_execute() -> None:
    """Over problems as calibration draws them: a change of lowering that counts do not follow fails here."""
    compared: dict[str, int] = {}
    for problem in itertools.islice(calibrated(3), 40):
        try:
            kernel = lower(problem.graph, CORE).kernel
        except HotfuseError:  # the library's
            continue
        sizes = problem.sizes[0]
        row = row_of(problem.graph, sizes)
        step = HEAVY_VECTORS * CORE.lanes  # short rows end with one that may be nearly empty
        most = (BEYOND_IMAGE if row["convolution"] else TAIL) * max(1.0, -(-row["width"] // step) * step / row["width"])
        for name, want, got in counted(row, kernel_work(kernel, sizes)):
            assert 0.9 * want <= got <= most * want, (name, want, got, problem.graph)
            compared[name] = compared.get(name, 0) + 1
    assert all(compared.get(n, 0) >= 3 for n in ("products", "tanh", "erf", "exp")), compared


@pytest.mark.parametrize("width", [16, 31, 32, 1000, 16384, 32768])
def test_softmaxes_of_three_rows_are_those_that_lowering_writes_so(width: int) -> None:
    graph = parse(f"graph group(%x: f32[n, {width}]) {{\n  %y: f32[n, {width}] = aten.softmax.int(%x, -1)\n  return %y\n}}")
    table = RowCache(measure.tile_of).rows([Candidate(graph, {"n": 8}, CORE)])
    amounts = dict(zip(TERMS, derive(table, machine_roofline(None, topology(), 16)).amounts[0].tolist(), strict=True))
    assert (amounts["three_rows"] > 0) == is_rows(graph, CORE)


def test_loops_are_counted_round_by_round() -> None:
    """Bounds of an inner loop that depend on the outer one: 16,384 elements of a chunk, and the rest of the last one."""
    graph = parse("graph group(%x: f32[n]) {\n  %y: f32[n] = aten.tanh.default(%x)\n  return %y\n}")
    work = kernel_work(lower(graph, CORE).kernel, {"n": 100_000})
    assert work.elements["map.tanh"] == 100_000 and np.isclose(work.executed["map.tanh"], 100_000 / 32)


@pytest.mark.parametrize(("name", "text", "instruction", "code"), [
    ("a row that all rows share", """graph group(%x: f32[n, 64], %r: f32[1, 64]) {
  %s: f32[1, 64] = aten.tanh.default(%r)
  %y: f32[n, 64] = aten.mul.Tensor(%x, %s)
  return %y
}""", "map.tanh", "tanh"),
    ("in front of a product", """graph group(%x: f32[n, 64]) {
  param %w: f32[256, 64] = "w"
  %h: f32[n, 64] = aten.tanh.default(%x)
  %y: f32[n, 256] = aten.linear.default(%h, %w)
  return %y
}""", "map.tanh", "tanh"),
])  # fmt: skip
def test_what_is_computed_again_is_counted_as_often(name: str, text: str, instruction: str, code: str) -> None:
    graph = parse(text)
    got = kernel_work(lower(graph, CORE).kernel, {"n": 24}).elements[instruction]
    assert row_of(graph, {"n": 24})[code] == pytest.approx(got, rel=0.15), name
