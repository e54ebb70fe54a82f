"""ONNX's own node cases, run through our loader and interpreter.

`python -m tests.conformance.suite [filter ...]` prints what passes and fails by operator; `-v` all the reasons, `--trace` runs the
traced graphs instead.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from hotfuse.frontends.captured import TensorSpec
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.tracing.traced_model import trace
from hotfuse.frontends.onnx.values import from_any, to_numpy

KNOWN = Path(__file__).with_name("known_failures.txt")

Runner = Callable[[bytes, list[Any]], list[Any]]
"""A model's bytes and one call's NumPy inputs -> NumPy outputs."""


@functools.cache
def cases() -> dict[str, Any]:
    """Every node case by name; generating them takes a few seconds and warns about its own arithmetic."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return {c.name: c for c in load_model_tests(kind="node")}


def op_of(case: Any) -> str:
    """The operator a case is about."""
    return case.model.graph.node[-1].op_type if case.model.graph.node else "?"


def interpret(data: bytes, inputs: list[Any]) -> list[Any]:
    """Load and run at once."""
    return [to_numpy(v) for v in OnnxModule(load(data))(*inputs)]


def recorded(data: bytes, inputs: list[Any]) -> list[Any]:
    """The third run, by the calls that the second one recorded for these sizes."""
    module = OnnxModule(load(data))
    for _ in range(2):
        module(*inputs)
    got = [to_numpy(v) for v in module(*inputs)]
    assert not [why for why in module.unprepared if "not recorded" in why], module.unprepared
    return got


def recorded_with_constants(data: bytes, inputs: list[Any]) -> list[Any]:
    """The same with all inputs but the first as constants of the file, as exporters write axes, sizes and weights."""
    model = onnx.load_from_string(data)
    ports = list(model.graph.input)
    arrays = {p.name: x for p, x in list(zip(ports, inputs, strict=True))[1:] if isinstance(x, np.ndarray) and x.dtype != object}
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    del model.graph.input[:]
    model.graph.input.extend(p for p in ports if p.name not in arrays)
    left = [x for p, x in zip(ports, inputs, strict=True) if p.name not in arrays]
    return recorded(model.SerializeToString(), left)


def specs_of(values: list[Any]) -> list[TensorSpec | None]:
    """What a call's inputs look like to the tracer, every dimension static."""
    return [
        TensorSpec(tuple(v.shape), tuple(v.stride()), v.dtype, "cpu") if isinstance(v, torch.Tensor) else None
        for v in values
    ]


LEAVES: Counter[str] = Counter()
"""Operators that stayed whole in traced cases."""


def through_trace(data: bytes, inputs: list[Any]) -> list[Any]:
    """Load, trace into ATen, run the traced graph."""
    module = OnnxModule(load(data))
    values = [from_any(x) for x in inputs]
    traced = trace(module, specs_of(values))
    LEAVES.update(traced.leaves.keys())
    return [to_numpy(v) for v in traced(*values)]


def check(case: Any, run: Runner = interpret) -> None:
    """Raise AssertionError, or what the model raised, unless every output agrees."""
    data = case.model.SerializeToString()
    for inputs, expected in case.data_sets:
        got = run(data, [_plain(x) for x in inputs])
        _agree(got, [_plain(x) for x in expected], case.rtol, case.atol)


def _plain(x: Any) -> Any:
    if isinstance(x, onnx.TensorProto):
        return numpy_helper.to_array(x)
    if isinstance(x, onnx.SequenceProto):
        return numpy_helper.to_list(x)
    if isinstance(x, onnx.OptionalProto):
        return numpy_helper.to_optional(x)
    if isinstance(x, (list, tuple)):
        return [_plain(y) for y in x]
    return x


def _agree(got: Any, want: Any, rtol: float, atol: float) -> None:
    if want is None:
        assert got is None, f"expected nothing, got {got!r}"
        return
    if isinstance(want, list):
        assert isinstance(got, list), f"expected a sequence, got {type(got)}"
        assert len(got) == len(want), f"{len(got)} values, expected {len(want)}"
        for g, w in zip(got, want, strict=True):
            _agree(g, w, rtol, atol)
        return
    assert isinstance(got, np.ndarray), f"expected an array, got {type(got)}"
    want = np.asarray(want)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    if want.dtype == object or want.dtype.kind in "US":
        assert got.dtype == object, f"dtype {got.dtype}, expected strings"
        assert got.tolist() == want.tolist(), "strings differ"
        return
    assert got.dtype == want.dtype, f"dtype {got.dtype}, expected {want.dtype}"
    if want.dtype.name == "bfloat16":
        rtol = max(rtol, 2**-6)
    if want.dtype.kind == "V" or want.dtype.name not in np.sctypeDict:
        got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def outcome(case: Any, run: Runner = interpret) -> str:
    """Empty when the case passes, otherwise why not, in one line."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)  # random operators then fail or pass the same way every time
        try:
            check(case, run)
        except Exception as e:  # a failing case may raise anything; the reason is what we report
            because = getattr(e, "because", "")
            text = f"{type(e).__name__}: {e.what}: {because}" if because else f"{type(e).__name__}: {e}"
            return " ".join(text.split())[:300]
    return ""


@dataclass(frozen=True)
class Known:
    """A case that is known not to pass."""

    reason: str
    may_pass: bool
    """Written with ~: the outcome depends on the machine or on an optional package."""


@functools.cache
def known_failures() -> dict[str, Known]:
    """The checked-in list."""
    found: dict[str, Known] = {}
    for line in KNOWN.read_text().splitlines():
        name, _, reason = line.partition("#")
        if name.strip():
            found[name.strip().lstrip("~")] = Known(reason.strip(), name.strip().startswith("~"))
    return found


def _selected(filters: list[str]) -> Iterator[Any]:
    for name, case in cases().items():
        if not filters or any(f in name or f == op_of(case) for f in filters):
            yield case


def main(argv: list[str]) -> int:
    """Print passes and failures by operator."""
    verbose = "-v" in argv
    run = through_trace if "--trace" in argv else interpret
    start = time.perf_counter()
    good: Counter[str] = Counter()
    bad: dict[str, list[tuple[str, str]]] = {}
    for case in _selected([a for a in argv if not a.startswith("-")]):
        why = outcome(case, run)
        if why:
            bad.setdefault(op_of(case), []).append((case.name, why))
        else:
            good[op_of(case)] += 1
    for op, failures in sorted(bad.items()):
        print(f"{op}: {good[op]} pass, {len(failures)} fail")
        for name, why in failures if verbose else failures[:1]:
            print(f"    {name}: {why}")
    total = sum(len(f) for f in bad.values())
    if LEAVES:
        print("kept whole: " + ", ".join(f"{op} {n}" for op, n in LEAVES.most_common()))
    print(f"{sum(good.values())} pass, {total} fail, {time.perf_counter() - start:.1f} s")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
