"""Every row of the registry keeps what the protocol says: names, targets, texts, kernels that compute what the library does."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

from hotfuse.backends import registry
from hotfuse.backends.interp.backend import InterpreterBackend
from hotfuse.backends.protocol import CompiledKernel, KernelBackend
from hotfuse.base.errors import InputError, InternalError
from hotfuse.base.settings import Settings
from hotfuse.ir.text import parse, show
from hotfuse.lower.run.constants import Constants
from hotfuse.pipeline import compile_tier1
from tests.contract.lowering import group_of

MAKING_KERNELS = ("llvm", "interp")


def test_every_back_end_says_its_own_name_and_only_those_that_make_kernels_are_given_out_as_such() -> None:
    assert [registry.backend(n).name for n in registry.names()[:3]] == ["library", "llvm", "interp"]
    assert registry.backend() is registry.host()
    with pytest.raises(InputError, match="makes no kernels"):
        registry.kernels("library")


@pytest.mark.parametrize("name", MAKING_KERNELS)
def test_a_target_says_what_it_can_hold(name: str) -> None:
    target = registry.kernels(name).target()
    assert target.device == "cpu" and target.lanes in (4, 8, 16) and target.registers in (16, 32)
    assert [m.name for m in target.memory][-1] == "memory" and all(target.has(f) for f in target.features)
    assert not target.has("an abacus")


@pytest.mark.parametrize("name", ("library", *MAKING_KERNELS))
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_graph_becomes_something_that_runs(name: str, rows: int) -> None:
    x = torch.randn(rows, 4)
    group = group_of(lambda x: torch.relu(x * 2) - x.mean(-1, keepdim=True), [x])
    made = registry.backend(name).compile(group.graph, group.weights)
    (got,) = made.run(x)
    want = torch.relu(x.double() * 2) - x.double().mean(-1, keepdim=True)
    assert made.backend == name
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MAKING_KERNELS)
def test_code_is_bytes_that_another_process_could_load(name: str) -> None:
    own: KernelBackend = registry.kernels(name)
    x = torch.randn(3, 4)
    group = group_of(lambda t: torch.exp(t) + 1, [x])
    from hotfuse.lower.cpu.host_core import host_core
    from hotfuse.native.target import host

    lowered = own.lower(group.graph, host_core(host()))
    compiled = own.compile_kernel(lowered.kernel)
    loaded = own.load_kernel(CompiledKernel(lowered.kernel, own.target(), bytes(compiled.code), {}))
    torch.testing.assert_close(own.glue(group.graph, lowered, loaded, Constants({}))(x)[0], torch.exp(x) + 1)
    bound = own.bound(group.graph, lowered, loaded, {}, [x], 1)
    bound.call()
    torch.testing.assert_close(bound.results[0], torch.exp(x) + 1)
    assert own.stages[0] == "tile" and all(own.text(stage, lowered.kernel) for stage in own.stages)
    with pytest.raises(InternalError, match="no stage"):
        own.text("clay", lowered.kernel)


def test_another_package_brings_one_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("theirs", "hotfuse.backends.interp.backend:InterpreterBackend", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.GROUP else [])
    registry._made.cache_clear()  # pyright: ignore[reportPrivateUsage]
    try:
        assert "theirs" in registry.names() and isinstance(registry.kernels("theirs"), InterpreterBackend)
    finally:
        registry._made.cache_clear()  # pyright: ignore[reportPrivateUsage]


def test_another_package_brings_a_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry.device("cuda")
    assert found is not None and found.kind == "cuda"
    entry = EntryPoint("npu", "hotfuse.backends.cuda.backend:CudaBackend", registry.GROUP)
    other = EntryPoint("tpu", "hotfuse.backends.interp.backend:InterpreterBackend", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry, other] if group == registry.GROUP else [])
    registry.device.cache_clear()
    try:
        assert hasattr(registry.device("npu"), "recorded")
        assert registry.device("tpu") is None and registry.device("abacus") is None
    finally:
        registry.device.cache_clear()


def test_a_graph_on_a_device_that_nobody_knows_is_refused_in_words() -> None:
    graph = group_of(lambda x: x + 1, [torch.randn(3)]).graph
    there = parse(show(graph).replace("f32[3]", "f32[3]@xpu:0"))
    with pytest.raises(InternalError, match="no plans are recorded on xpu:0") as refused:
        compile_tier1(there, {}, [torch.randn(3)], Settings(capture="inline"))
    assert registry.GROUP in refused.value.hint
