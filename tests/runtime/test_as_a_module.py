"""What programs do to modules they do to served ones: move, convert, save, copy, hook and transform them. All as in eager."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings

INLINE = Settings(capture="inline", watch=False)


class Net(nn.Module):
    """Parameters that require gradients, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.full((8,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(torch.relu(self.up(x)))) * self.scale


def served(x: torch.Tensor) -> tuple[Net, hotfuse.Jit]:
    """At a plan that serves."""
    model = Net().eval()
    fast = hotfuse.jit(model, settings=INLINE)
    with torch.no_grad():
        for _ in range(6):
            fast(x)
    assert fast.stats()["graph_calls"] > 2, str(fast.explain(full=True))
    return model, fast


def test_conversions_return_the_served_model_and_are_noticed() -> None:
    x = torch.randn(3, 8)
    model, fast = served(x)
    with torch.no_grad():
        for name, dtype in (("double", torch.float64), ("half", torch.float16), ("float", torch.float32)):
            assert getattr(fast, name)() is fast
            for _ in range(4):
                got = fast(x.to(dtype))
            assert got.dtype is dtype
            torch.testing.assert_close(got, model(x.to(dtype)))
        assert fast.to("cpu", torch.bfloat16) is fast and fast(x.bfloat16()).dtype is torch.bfloat16


def test_state_dicts_and_files(tmp_path: Any) -> None:
    x = torch.randn(3, 8)
    model, fast = served(x)
    assert list(fast.state_dict()) == list(model.state_dict())
    other = {k: v * 0.5 for k, v in fast.state_dict().items()}
    fast.load_state_dict(other)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        assert torch.equal(model.up.weight, other["up.weight"])
        file = io.BytesIO()
        torch.save(fast, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert isinstance(again, Net) and type(again) is hotfuse.Jit and again.up.weight is not model.up.weight
        torch.testing.assert_close(again(x), model(x))
        torch.save(fast.state_dict(), tmp_path / "weights.pt")
        fresh = Net().eval()
        fresh.load_state_dict(torch.load(tmp_path / "weights.pt"))
        torch.testing.assert_close(fresh(x), model(x))


@pytest.mark.parametrize("where", ["the model", "a part of it"])
def test_hooks_run_as_long_as_they_are_there(where: str) -> None:
    x = torch.randn(3, 8)
    model, fast = served(x)
    seen: list[torch.Tensor] = []
    target = fast if where == "the model" else model.up
    with torch.no_grad():
        hook = target.register_forward_hook(lambda _m, _args, out: seen.append(out))
        for _ in range(3):
            fast(x)
        assert len(seen) == 3 and torch.equal(seen[0], model(x) if where == "the model" else model.up(x))
        hook.remove()
        told = len(seen)
        torch.testing.assert_close(fast(x), model(x))
        assert len(seen) == told
        doubled = target.register_forward_hook(lambda _m, _args, out: 2 * out)
        torch.testing.assert_close(fast(x), model(x))
        doubled.remove()


def test_hooks_on_tensors_alone_are_part_of_the_graph() -> None:
    x = torch.randn(3, 8)
    model, fast = served(x)
    by = 2.0
    model.up.register_forward_hook(lambda _m, _args, out: torch.relu(out) * by)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x))
        before = fast.stats()["graph_calls"]
        fast(x)
        assert fast.stats()["graph_calls"] == before + 1, str(fast.explain(full=True))
        kept: dict[str, torch.Tensor] = {}
        model.down.register_forward_hook(lambda _m, _args, out: kept.update(down=out))
        for _ in range(4):
            kept.clear()
            fast(x)
            assert "down" in kept
    assert "forward hook" in str(fast.explain())


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    "grad": lambda f, x: torch.func.grad(lambda z: f(z).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (2 * x,))[1],
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda z: f(z).sum()))(x),
    "functional_call": lambda f, x: torch.func.functional_call(f, {"up.bias": torch.ones(16)}, (x,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(name: str) -> None:
    x = torch.randn(3, 8)
    model, fast = served(x)
    torch.testing.assert_close(TRANSFORMS[name](fast, x), TRANSFORMS[name](model, x))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


def test_what_is_served_already_is_served_by_itself() -> None:
    model, x = nn.Linear(4, 4).eval(), torch.randn(3, 4)
    once = hotfuse.jit(model, settings=Settings(capture="inline"))
    for _ in range(4):
        once(x)
    twice = hotfuse.jit(once, settings=Settings(capture="off"))
    torch.testing.assert_close(twice(x), model(x))
    assert twice.stats()["calls"] == 1 and once.stats()["calls"] == 4 and twice.weight is model.weight


def test_sub_interpreters_are_refused_in_words() -> None:
    script = f"""
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
from hotfuse.base.interpreters import refuse_sub_interpreters
refuse_sub_interpreters()
number = interpreters.create()
code = '''import sys; sys.path[:] = {sys.path!r}
try:
    import hotfuse
except ImportError as e:
    print("refused:", e, flush=True)
'''
(getattr(interpreters, "exec", None) or interpreters.run_string)(number, code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "refused: hotfuse cannot be imported in a sub-interpreter" in done.stdout and "try: " in done.stdout, done


class Decorated(nn.Module):
    """Its forward is served for each object by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    @hotfuse.jit
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its text."""
        return self.inner(x).relu()


def test_a_decorated_function_keeps_what_it_is_called_and_takes() -> None:
    @hotfuse.jit
    def scaled(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
        """Its text."""
        return x * by

    named: Any = scaled
    assert (named.__name__, named.__doc__) == ("scaled", "Its text.")
    assert list(inspect.signature(scaled).parameters) == ["x", "by"]
    assert torch.equal(scaled(torch.ones(3), by=3.0), torch.full((3,), 3.0))


def test_a_decorated_method_serves_each_object() -> None:
    a, b, x = Decorated().eval(), Decorated().eval(), torch.randn(4, 8)

    def right(m: Decorated) -> None:
        torch.testing.assert_close(m(x), m.inner(x).relu(), rtol=1e-5, atol=1e-6)

    with torch.no_grad():
        for _ in range(20):
            right(a)
            right(b)
        assert a.forward is a.forward and a.forward is not b.forward and list(a.state_dict()) == list(b.state_dict())
        for other in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
            assert other.forward is not a.forward
            torch.testing.assert_close(other(x), a(x))
            other.inner.weight.mul_(2)
            right(other)
        right(a)
        stats: Any = a.forward
        assert stats.stats()["calls"] >= 20


class Above(Decorated):
    """Its own forward calls the one below."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1

    renamed = hotfuse.jit(lambda self, x: self.inner(x) * 2)


def test_a_method_that_has_no_place_of_its_own_runs_the_models_code() -> None:
    above, x = Above().eval(), torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(10):
            torch.testing.assert_close(above(x), above.inner(x).relu() + 1)
            torch.testing.assert_close(above.renamed(x), above.inner(x) * 2)
    served: Any = Decorated.forward
    assert served.stats()["calls"] >= 10 and served.stats()["calls_per_tier"]["module"] == served.stats()["calls"]
