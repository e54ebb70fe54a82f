"""Things that programs do to models which need a look of their own: results, graphs and answers are those of eager."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from tests.races import new_plans_win

INLINE = Settings(capture="inline", hot_calls=2)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


class NoGrad(Inner):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class PartlyNoGrad(Inner):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            first = self.inner(x)
        return first, self.inner(x)


class EnablesGrad(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return self.inner(x)


def flags(result: Any) -> list[bool]:
    return [t.requires_grad for t in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("cls", [NoGrad, PartlyNoGrad, EnablesGrad])
def test_results_require_gradients_where_those_of_the_model_do(cls: type[Inner], around: Callable[[], Any]) -> None:
    model = cls().eval()
    with hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(12):
            x = torch.randn(3, 8)
            with around():
                got, want = fast(x), model(x)
            assert flags(got) == flags(want)
            torch.testing.assert_close(got, want)
            assert fast.wait(60)
        opens = cls is EnablesGrad and around is torch.no_grad
        assert (fast.stats()["graph_calls"] > 0) is not opens
        assert ("enables gradients by itself" in str(fast.explain(full=True))) is opens


def test_a_model_that_enables_gradients_is_known_in_both_modes() -> None:
    model = EnablesGrad().eval()
    with hotfuse.jit(model, settings=INLINE) as fast:
        for k in range(24):
            x = torch.randn(3, 8)
            with torch.set_grad_enabled(k < 8 or k % 2 == 0):
                assert flags(fast(x)) == flags(model(x)) == [True]
            assert fast.wait(60)


class OfItsClass(Inner):
    scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class Derived(OfItsClass):
    pass


@pytest.mark.parametrize("owner", [OfItsClass, Derived])
def test_attributes_of_classes_are_the_models_too(owner: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Derived().eval(), torch.randn(3, 8)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(12):
            fast(x)
            assert fast.wait(60)
        assert fast.stats()["graph_calls"] > 0
        monkeypatch.setattr(owner, "scale", 5.0, raising=False)
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x))
            assert fast.wait(60)


def warm(fast: hotfuse.Jit, x: torch.Tensor) -> None:
    for _ in range(12):
        fast(x)
        assert fast.wait(60)
    assert fast.stats()["graph_calls"] > 0


def test_arguments_of_other_layouts_are_answered_by_the_models_own_code() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(3, 8)
    with torch.no_grad(), hotfuse.jit(linear, settings=INLINE) as fast:
        warm(fast, x)
        nested = torch.nested.as_nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
        for other in (x.relu().to_sparse_csr(), x.relu().to_sparse(), nested):
            got, want = fast(other), linear(other)
            assert got.layout is want.layout and got.is_nested is want.is_nested
            for a, b in zip(got.unbind(), want.unbind(), strict=True):
                torch.testing.assert_close(a, b)
        assert "sparse_csr tensor" in str(fast.explain(full=True))
        torch.testing.assert_close(fast(x), linear(x))


def test_a_served_model_can_be_traced_and_exported() -> None:
    linear, x = nn.Linear(8, 8).requires_grad_(requires_grad=False), torch.randn(3, 8)
    with torch.no_grad(), hotfuse.jit(linear, settings=INLINE) as fast:
        warm(fast, x)
        traced: Any = torch.jit.trace(lambda x: fast(x) + 1, x, check_trace=False)
        exported = torch.export.export(cast(nn.Module, fast), (x,)).module()
        y = torch.randn(5, 8)
        torch.testing.assert_close(traced(y), linear(y) + 1)
        torch.testing.assert_close(exported(x), linear(x))
        assert str(inspect.signature(fast.forward)) == str(inspect.signature(linear.forward))


class Plain:
    """No module, but holds one."""

    def __init__(self) -> None:
        self.linear, self.scale = nn.Linear(8, 8), 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale

    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.scale


@pytest.mark.parametrize("of", [lambda p: p, lambda p: p.shifted, lambda p: functools.partial(p.shifted)])
def test_attributes_of_plain_objects_are_the_models_too(of: Callable[[Plain], Callable[..., Any]]) -> None:
    model, x = Plain(), torch.randn(3, 8)
    with torch.no_grad(), hotfuse.jit(of(model), settings=INLINE) as fast:
        warm(fast, x)
        model.scale = 5.0
        torch.testing.assert_close(fast(x), of(model)(x))
        model.linear = nn.Linear(8, 8)
        torch.testing.assert_close(fast(x), of(model)(x))


@pytest.mark.parametrize("value", [0.7, "left", 1 << 40, b"text"])
def test_an_attribute_that_is_set_to_what_it_is_changes_nothing(value: Any) -> None:
    """Servers set a temperature before every call; each is another object of the same value."""
    model, x = OfItsClass().eval(), torch.randn(3, 8)
    model.mode = value
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        warm(fast, x)
        before = fast.stats()["graph_calls"]
        for _ in range(4):
            model.mode = type(value)(repr(value)) if isinstance(value, float | int) else value[:1] + value[1:]
            torch.testing.assert_close(fast(x), model(x))
        assert fast.stats()["graph_calls"] == before + 4, str(fast.explain(full=True))
        model.mode = -0.0 if isinstance(value, float) else value * 2
        fast(x)
        assert "changed" in str(fast.explain(full=True))


def test_a_graph_that_is_pickled_beside_its_calls_is_the_same_one() -> None:
    """Pickling writes its code again: a large one never left its own code, since each capture pickled it."""
    graph, x = torch.fx.symbolic_trace(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])).eval(), torch.randn(3, 8)
    with torch.no_grad(), hotfuse.jit(graph, settings=INLINE) as fast:
        warm(fast, x)
        before = fast.stats()["graph_calls"]
        graph.__reduce__()
        for _ in range(4):
            torch.testing.assert_close(fast(x), graph(x))
        assert fast.stats()["graph_calls"] == before + 4, str(fast.explain(full=True))


class WritesItsArgument(Inner):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x[:, 0] = 7
        return self.inner(x), x.t()


def test_a_view_of_an_argument_that_is_written_is_one_of_the_callers_tensor() -> None:
    """A plan computes on a copy that is written back: a view would be one of that copy."""
    model = WritesItsArgument().eval()
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(12):
            x = torch.randn(3, 8)
            _, view = fast(x)
            x.zero_()
            assert not view.any()
            assert fast.wait(60)
        assert "view of an argument that the call writes" in str(fast.explain())


def test_another_class_of_a_module_is_another_model() -> None:
    """What parametrizations and adapters do: the class is exchanged, and with it the code; the attributes are the same ones."""
    model, x = OfItsClass().eval(), torch.randn(3, 8)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        warm(fast, x)

        class Doubled(OfItsClass):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(x)

        model.__class__ = Doubled
        torch.testing.assert_close(fast(x), model(x))
        assert "the class of a module, Doubled where it was OfItsClass" in str(fast.explain(full=True))


DIVISIONS: dict[str, Callable[..., torch.Tensor]] = {
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "fmod": torch.fmod,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("division", list(DIVISIONS))
def test_integers_divided_by_zero_raise_in_kernels_too(
    division: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels gave zero where torch raises; lanes behind a tensor's end, which hold zeros, are no fault."""
    new_plans_win(monkeypatch)

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return DIVISIONS[division](x + 1, y) * 3

    x, y = torch.randint(1, 60, (5, 17), dtype=dtype), torch.randint(1, 9, (5, 17), dtype=dtype)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(12):
            assert torch.equal(fast(x, y), model(x, y))
            assert fast.wait(60)
        before = fast.stats()["calls_per_tier"]["1"]
        assert torch.equal(fast(x, y), model(x, y))
        assert fast.stats()["calls_per_tier"]["1"] == before + 1, str(fast.explain(full=True))
        y[2, 3] = 0
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            fast(x, y)
        y[2, 3] = 1
        assert torch.equal(fast(x, y), model(x, y))


class AsksForGradients(Inner):
    """What it gives, or is given, is to have gradients: potentials, of which forces are wanted."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.of == "an argument":
            x.requires_grad_()
        y = self.inner(x)
        if self.of == "a leaf":
            y = y.detach().requires_grad_()
        return y.requires_grad_() if self.of == "a result" else y


@pytest.mark.parametrize("of", ["an argument", "a result", "a leaf"])
@pytest.mark.parametrize("enabled_first", [False, True])
def test_what_a_model_has_require_gradients_does(of: str, *, enabled_first: bool) -> None:
    model = AsksForGradients(of).eval()
    with hotfuse.jit(model, settings=INLINE) as fast:
        for k in range(16):
            x = torch.randn(3, 8)
            twin = x.clone()
            with torch.set_grad_enabled(enabled_first and k < 8):
                got, want = fast(x), model(twin)
            assert flags((got, x)) == flags((want, twin))
            assert got.is_leaf is want.is_leaf
            torch.testing.assert_close(got, want)
            assert fast.wait(60)


@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad])
def test_results_lie_in_memory_as_the_models(around: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call goes another way than a trace does: programs take views of results."""
    new_plans_win(monkeypatch)
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(10):
            x = torch.randn(2, 5, 8)
            with around():
                got, want = fast(x, x, x)[0], model(x, x, x)[0]
            assert got.stride() == want.stride()
            torch.testing.assert_close(got, want)
            assert fast.wait(60)
        assert fast.stats()["calls_per_tier"]["1"] > 0


def test_results_that_are_views_stay_views() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, *y.chunk(2, -1), y.T

    with hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(8):
            x = torch.randn(4, 8)
            got, want = fast(x), model(x)
            for a, b in zip(got, want, strict=True):
                assert a.stride() == b.stride() and (a.data_ptr() - got[0].data_ptr()) == (b.data_ptr() - want[0].data_ptr())
        assert fast.stats()["graph_calls"] > 0
