"""Gradients enabled around served calls: plans serve, results carry a graph, and everything behind it is as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import hotfuse
from hotfuse import Settings
from hotfuse.runtime.serve import gradients
from hotfuse.runtime.tally import ThreadCounts

INLINE = Settings(capture="inline", watch=False)


class Net(nn.Module):
    """Parameters, tied weights, a buffer, results with and without gradients, integers."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.first = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 20, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.full((width,), 1.5))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
        h = self.norm(torch.tanh(self.first(x) + self.embed(ids))) * self.scale
        logits = self.out(h)
        return {"logits": logits, "hidden": (h, h.detach().mean(-1)), "best": logits.argmax(-1), "count": x.shape[0]}


@pytest.fixture
def policy() -> None:
    """Asked for by tests of who answers: `plans_answer` changes nothing then."""


@pytest.fixture(autouse=True)
def plans_answer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans serve calls that backward passes follow, which the model's own code would: what is tested is their gradients."""
    if "policy" not in request.fixturenames:
        monkeypatch.setattr(gradients.Gradients, "own_turn", lambda _self: False)


def inputs(rows: int = 5, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 12, requires_grad=grad), torch.randint(0, 20, (rows,))


def served(model: Any, *args: Any, calls: int = 8, **changes: Any) -> hotfuse.Jit:
    """At its best plan, with gradients enabled."""
    fast = hotfuse.jit(model, settings=INLINE.with_(**changes))
    for _ in range(calls):
        fast(*args)
    return fast


def in_plans(fast: hotfuse.Jit) -> int:
    return sum(n for tier, n in fast.stats()["calls_per_tier"].items() if tier != "module")


def check_served(fast: hotfuse.Jit, call: Callable[[], Any], plan: bool = True) -> Any:
    before = in_plans(fast)
    result = call()
    assert (in_plans(fast) > before) is plan, str(fast.explain(full=True))
    return result


def gradients_of(model: nn.Module, loss: torch.Tensor, *more: torch.Tensor) -> list[Any]:
    model.zero_grad()
    for t in more:
        t.grad = None
    loss.backward()
    return [None if t.grad is None else t.grad.clone() for t in (*model.parameters(), *more)]


def loss_of(result: dict[str, Any]) -> torch.Tensor:
    return result["logits"].pow(2).sum() + result["hidden"][0].sin().sum()


def same(got: list[Any], want: list[Any]) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g is None) is (w is None)
        if g is not None:
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5 * max(1.0, float(w.abs().max())))


@pytest.mark.parametrize("grad", [False, True])
def test_plans_serve_and_gradients_are_those_of_the_model(grad: bool) -> None:
    model = Net().eval()
    x, ids = inputs(grad=grad)
    fast = served(model, x, ids)
    assert fast.stats()["calls_per_tier"]["1"] > 0, str(fast.explain(full=True))
    for rows in (5, 1, 7, 5):
        x, ids = inputs(rows, grad)
        for _ in range(3):
            got = fast(x, ids)
        want = model(x, ids)
        more = (x,) if grad else ()
        same(gradients_of(model, loss_of(got), *more), gradients_of(model, loss_of(want), *more))
        flags = lambda r: [t.requires_grad for t in (r["logits"], *r["hidden"], r["best"])]  # noqa: E731
        assert flags(got) == flags(want) == [True, True, False, False] and got["count"] == want["count"]
        torch.testing.assert_close(got["logits"], want["logits"])
        assert got["logits"].grad_fn is not None and not got["logits"].is_leaf
    said = fast.explain().to_dict()["gradients"]
    assert said["backwards"] > 0 and "results carry a graph" in str(fast.explain(full=True))


def test_one_capture_serves_both_modes() -> None:
    model = Net().eval()
    args = inputs()
    with torch.no_grad():
        fast = served(model, *args)
    fast(*args)
    check_served(fast, lambda: fast(*args))
    with torch.no_grad():
        result = check_served(fast, lambda: fast(*args))
        assert not result["logits"].requires_grad
    assert fast.stats()["captures"] == 1


def test_code_that_asks_for_the_grad_mode_gets_a_plan_for_each() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) + (1 if torch.is_grad_enabled() else 2)

    model = Asking().eval()
    x = torch.randn(3, 4)
    fast = served(model, x)
    for grad in (True, False, True, False):
        with torch.set_grad_enabled(grad):
            for _ in range(3):
                fast(x)
            got = check_served(fast, lambda: fast(x))
            torch.testing.assert_close(got, model(x))
    assert fast.stats()["captures"] == 2 and fast.stats()["events"]["notice.grad_mode"] == 1


def test_a_call_that_looked_before_the_modes_were_told_apart_is_not_captured_again() -> None:
    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (1 if torch.is_grad_enabled() else 2)

    model = Asking(4, 4).eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        fast = served(model, x)
        check_served(fast, lambda: fast(x))
        engine = fast._engine
        (site,) = engine.sites.values()
        (entry,) = site.entries
        torch.testing.assert_close(engine._capturer.own_code(site.spec, [x], (x,), {}, ThreadCounts()), model(x))
        assert fast.wait(60)
    assert fast.stats()["captures"] == 1 and site.entries == (entry,)


def test_code_that_asks_unseen_is_noticed_by_its_results() -> None:
    asks = torch.is_grad_enabled  # as after `from torch import is_grad_enabled`

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) + (1 if asks() else 2)

    model = Asking().eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        fast = served(model, x)
    for grad in (True, False, True, False):
        with torch.set_grad_enabled(grad):
            for _ in range(3):
                torch.testing.assert_close(fast(x), model(x))
            check_served(fast, lambda: fast(x))
    assert fast.stats()["events"]["drop.grad_mode"] == 1


def test_a_region_without_gradients_is_one_for_the_backward_pass_too() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                h = self.a(x)
            return self.b(h) + x

    model = Region().eval()
    x = torch.randn(3, 6, requires_grad=True)
    fast = served(model, x)
    got = check_served(fast, lambda: fast(x))
    same(gradients_of(model, got.sum(), x), gradients_of(model, model(x).sum(), x))
    assert model.a.weight.grad is None


def test_frozen_models_pay_for_no_graph() -> None:
    model = Net().eval().requires_grad_(False)
    args = inputs()
    fast = served(model, *args)
    result = check_served(fast, lambda: fast(*args))
    assert not result["logits"].requires_grad and fast.stats()["gradients"]["served"] == 0
    x, ids = inputs(grad=True)  # an input that requires gradients is another matter
    fast(x, ids)
    got = check_served(fast, lambda: fast(x, ids))
    same(gradients_of(model, loss_of(got), x), gradients_of(model, loss_of(model(x, ids)), x))


def test_parameters_that_are_frozen_and_thawed_while_serving() -> None:
    model = Net().eval()
    args = inputs()
    fast = served(model, *args)
    model.first.requires_grad_(False)
    for _ in range(2):
        result = fast(*args)
    same(gradients_of(model, loss_of(result)), gradients_of(model, loss_of(model(*args))))
    assert model.first.weight.grad is None
    model.requires_grad_(False)
    assert not fast(*args)["logits"].requires_grad
    model.requires_grad_(True)
    for _ in range(2):
        result = fast(*args)
    same(gradients_of(model, loss_of(result)), gradients_of(model, loss_of(model(*args))))
    assert fast.stats()["captures"] == 1


def test_gradients_of_several_calls_add_up() -> None:
    model = Net().eval()
    a, b = inputs(), inputs()
    fast = served(model, *a)
    got = loss_of(fast(*a)) * 2 + loss_of(fast(*b))
    same(gradients_of(model, got), gradients_of(model, loss_of(model(*a)) * 2 + loss_of(model(*b))))


def test_calls_in_a_row_whose_inputs_depend_on_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).eval()
    x = torch.randn(4, 6, requires_grad=True)
    fast = served(model, x)
    twice = lambda f: f(f(x)).pow(2).sum()  # noqa: E731
    same(gradients_of(model, twice(fast), x), gradients_of(model, twice(model), x))


def test_grad_of_some_and_of_what_is_not_used() -> None:
    model = Net().eval()
    x, ids = inputs(grad=True)
    fast = served(model, x, ids)
    for wanted in ([x], [model.first.weight], [model.embed.weight, x]):
        got = torch.autograd.grad(loss_of(fast(x, ids)), wanted)
        want = torch.autograd.grad(loss_of(model(x, ids)), wanted)
        same(list(got), list(want))
    hidden = lambda f: f(x, ids)["hidden"][0].sum()  # noqa: E731
    unused = nn.Parameter(torch.zeros(3))
    assert torch.autograd.grad(hidden(fast), [unused], allow_unused=True) == (None,)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(hidden(fast), [unused])
    got = torch.autograd.grad(fast(x, ids)["logits"], [x], torch.ones(5, 20))
    same(list(got), list(torch.autograd.grad(model(x, ids)["logits"], [x], torch.ones(5, 20))))


def test_backward_twice_and_retained_graphs() -> None:
    model = Net().eval()
    args = inputs()
    fast = served(model, *args)
    result = loss_of(fast(*args))
    result.backward(retain_graph=True)
    model.zero_grad()
    result.backward()
    got = [p.grad.clone() for p in model.parameters()]
    same(got, gradients_of(model, loss_of(model(*args))))
    with pytest.raises(RuntimeError, match="second time"):
        fast_result = loss_of(fast(*args))
        fast_result.backward()
        fast_result.backward()


@pytest.mark.parametrize("chained", [False, True])
def test_gradients_of_gradients(chained: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).eval()
    x = torch.randn(4, 6, requires_grad=True)
    fast = served(model, x)

    def penalty(f: Callable[..., torch.Tensor]) -> list[Any]:
        start = f(x) if chained else x * 2  # an input whose own history leads to the parameters, or to a leaf
        y = f(start)
        (g,) = torch.autograd.grad(y.pow(2).sum(), [start], create_graph=True)
        wanted = torch.autograd.grad(y.sin().sum(), list(model.parameters()), create_graph=True)
        loss = g.pow(2).sum() + sum(w.pow(3).sum() for w in wanted)
        (third,) = torch.autograd.grad(loss, [x], create_graph=True)
        return gradients_of(model, loss + third.cos().sum(), x)

    same(penalty(fast), penalty(model))


def test_hooks_run_once_and_see_what_they_see_in_eager() -> None:
    model = Net().eval()
    args = inputs()
    fast = served(model, *args)
    seen: list[torch.Tensor] = []
    handles = [model.first.weight.register_hook(lambda g: seen.append(g.clone()) or g * 2),
               model.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))]
    got, first = gradients_of(model, loss_of(fast(*args)) + loss_of(fast(*args))), list(seen)
    seen.clear()
    same(got, gradients_of(model, loss_of(model(*args)) + loss_of(model(*args))))
    assert len(first) == len(seen) == 2
    same(sorted(first, key=torch.numel), sorted(seen, key=torch.numel))
    for handle in handles:
        handle.remove()
    same(gradients_of(model, loss_of(fast(*args))), gradients_of(model, loss_of(model(*args))))


def test_hooks_of_modules_see_the_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    x = torch.randn(4, 6)
    seen: list[Any] = []
    handle = model[2].register_full_backward_hook(lambda _m, gi, go: seen.append((gi[0].clone(), go[0].clone())))
    fast = served(model, x)
    got = gradients_of(model, fast(x).pow(2).sum())
    first, seen[:] = list(seen), []
    same(got, gradients_of(model, model(x).pow(2).sum()))
    assert len(first) == len(seen) == 1
    same(list(first[0]), list(seen[0]))
    handle.remove()
    same(gradients_of(model, fast(x).sum()), gradients_of(model, model(x).sum()))


def test_hooks_on_results() -> None:
    model = nn.Linear(6, 6).eval()
    x = torch.randn(4, 6)
    fast = served(model, x)
    seen: list[torch.Tensor] = []
    y = check_served(fast, lambda: fast(x))
    y.register_hook(lambda g: seen.append(g) or g * 3)
    y.retain_grad()
    got = gradients_of(model, y.sum())
    same(got, gradients_of(model, model(x).sum() * 3))
    assert len(seen) == 1 and torch.equal(y.grad, torch.full((4, 6), 3.0))


def test_inputs_written_before_the_backward_pass() -> None:
    model = nn.Linear(6, 6).eval()
    x = torch.randn(4, 6)
    fast = served(model, x)
    for f in (model, fast):
        y = f(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_weights_written_before_the_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).eval()
    x = torch.randn(4, 6)
    fast = served(model, x)
    for served_between in (False, True):
        for f in (model, fast):
            y = f(x)
            with torch.no_grad():
                model[1].weight.mul_(1.5)
            if served_between:
                fast(x)  # notices, and takes the new weights
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
    y = fast(x)
    same(gradients_of(model, y.sum()), gradients_of(model, model(x).sum()))


def test_a_model_in_another_mode_before_the_backward_pass_is_an_error_in_words() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).eval()
    x = torch.randn(4, 6)
    fast = served(model, x)
    y = check_served(fast, lambda: fast(x))
    model.train()
    with pytest.raises(RuntimeError, match="changed between the call and backward"):
        y.sum().backward()


def test_results_may_be_written_in_place() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, (3, 4))).eval()  # its result is a view
    x = torch.randn(4, 6)
    fast = served(model, x)

    def written(f: Callable[..., torch.Tensor]) -> torch.Tensor:
        y = f(x)
        y.mul_(2)
        y[:, 0] = 7
        return y.pow(2).sum()

    same(gradients_of(model, written(fast)), gradients_of(model, written(model)))


def test_one_tensor_in_several_places_is_served() -> None:
    """As `last_hidden_state` and `hidden_states[-1]` are: one object, whose gradients add up, and in which writes are seen."""

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            states = [x * 2.0]
            for layer in self.layers:
                states.append(torch.tanh(layer(states[-1])) + 0.5)
            return {"last": states[-1], "states": tuple(states)}

    torch.manual_seed(0)
    model, x = Stages().eval(), torch.randn(5, 12)
    fast = served(model, x)
    got, want = check_served(fast, lambda: fast(x)), model(x)
    assert got["last"] is got["states"][-1] and not got["states"][0].requires_grad

    def loss(out: dict[str, Any]) -> torch.Tensor:
        out["last"].mul_(1.5)  # seen in both places
        return (out["states"][-1] * torch.arange(12.0)).sum() + out["last"].pow(3).sum() + out["states"][1].sum()

    for ours, theirs in zip(gradients_of(model, loss(got)), gradients_of(model, loss(want)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    fast.close()


@pytest.mark.parametrize("what", ["an input", "a weight", "results"])
def test_results_that_share_memory_stay_with_the_models_own_code(what: str) -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.fc(x)
            match what:
                case "an input":
                    return y, x.view(-1)
                case "a weight":
                    return y, self.fc.weight
                case _:
                    return y, y[0]

    model = Sharing().eval()
    x = (torch.randn(4, 6, requires_grad=True) * 1).requires_grad_()
    fast = served(model, x)
    y, other = check_served(fast, lambda: fast(x), plan=False)
    other_model = model(x)[1]
    assert other._is_view() == other_model._is_view() and other.requires_grad
    assert what in str(fast.explain(full=True)) and "share" in str(fast.explain(full=True))
    y.sum().backward()
    with torch.no_grad():
        for _ in range(3):
            fast(x.detach())
        check_served(fast, lambda: fast(x.detach()))


@pytest.mark.usefixtures("policy")
def test_a_program_that_calls_backward_gets_the_models_own_code() -> None:
    model = Net().eval()
    args = inputs()
    fast = served(model, *args)
    loss_of(check_served(fast, lambda: fast(*args))).backward()
    for _ in range(5):  # and as long as backward passes follow, also those that the own code's results begin
        loss_of(check_served(fast, lambda: fast(*args), plan=False)).backward()
    said = fast.stats()
    assert said["events"]["keep.differentiated"] == 1 and said["gradients"] == {
        "served": said["gradients"]["served"], "backwards": 1, "own": 5, "kept": []}  # fmt: skip
    assert "since backward passes follow" in str(fast.explain(full=True))
    with torch.no_grad():
        fast(*args)  # the first in this mode is compared
        check_served(fast, lambda: fast(*args))  # calls without gradients are no part of it
    for _ in range(2 * gradients.MIN_REST):
        fast(*args)
    check_served(fast, lambda: fast(*args))


@pytest.mark.usefixtures("policy")
def test_backward_passes_of_the_module_itself_count() -> None:
    """A loss that is ill-conditioned makes noise of how results are rounded: a program that trains gets eager's own."""
    model = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12)).eval()
    x = torch.randn(5, 12)
    fast = served(model, x)
    check_served(fast, lambda: fast(x))
    want = gradients_of(model, model(x).pow(2).sum())
    got = gradients_of(model, check_served(fast, lambda: fast(x), plan=False).pow(2).sum())
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    hooks = [h for p in model.parameters() for h in (p._backward_hooks, p._post_accumulate_grad_hooks) if h]
    assert not hooks and list(copy.deepcopy(model).parameters())
    fast.close()
    assert not fast._engine.gradients._now.hooks


@pytest.mark.usefixtures("policy")
def test_rare_backward_passes_cost_few_calls() -> None:
    model = Net().eval()
    args = inputs()
    fast = served(model, *args)
    for _ in range(4):
        for _ in range(gradients.RARE_CALLS_PER_REST * 2 * gradients.MIN_REST):
            result = fast(*args)
        loss_of(result).backward()
    own = fast.stats()["gradients"]["own"]
    assert 3 * gradients.MIN_REST <= own <= 5 * gradients.MIN_REST, str(fast.explain(full=True))


def test_a_training_loop_ends_where_eager_does() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    twin = copy.deepcopy(model)
    fast = hotfuse.jit(model, settings=INLINE)
    data = [(torch.randn(8, 6), torch.randint(0, 2, (8,))) for _ in range(25)]
    for f, parameters in ((fast, model.parameters()), (twin, twin.parameters())):
        optimizer = torch.optim.Adam(parameters, 1e-2)
        for x, label in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(f(x), label).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


def test_a_head_trained_on_a_frozen_encoder() -> None:
    encoder = Net().eval().requires_grad_(False)
    head = nn.Linear(12, 3)
    fast = served(encoder, *inputs())
    for _ in range(10):
        args = inputs()
        result = check_served(fast, lambda: fast(*args))  # noqa: B023
        head(result["hidden"][0]).sum().backward()
    assert head.weight.grad is not None


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize("serving", ["from the first call", "in plans"])
def test_checkpoints_without_reentry_count_what_one_code_saves(serving: str) -> None:
    """What is saved in the call and in its repetition has to match, so neither is a plan's alone."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    fast = hotfuse.jit(model, settings=Settings(capture="inline"))
    if serving == "in plans":
        for _ in range(40):
            fast(torch.randn(4, 8, requires_grad=True))
        assert fast.stats()["graph_calls"] > 20
    for _ in range(6):
        x = torch.randn(4, 8, requires_grad=True)
        checkpoint(fast, x, use_reentrant=False).square().sum().backward()
        given = x.grad
        (want,) = torch.autograd.grad(model(x).square().sum(), x)
        torch.testing.assert_close(given, want)
    if serving == "in plans":
        assert "saved tensors have hooks" in str(fast.stats()["gradients"])


def test_inputs_of_inference_mode_are_answered_as_in_eager() -> None:
    model = nn.Embedding(10, 4)
    ids = torch.tensor([1, 2, 3])
    fast = served(model, ids)
    with torch.inference_mode():
        other = torch.tensor([3, 4, 5])
    for f in (model, fast):
        try:
            said = f(other).shape
        except RuntimeError as e:
            said = str(e).splitlines()[0]
        if f is model:
            want = said
    assert said == want
    check_served(fast, lambda: fast(ids))


def test_background_captures_serve_with_gradients_too() -> None:
    model = Net().eval()
    args = inputs()
    with hotfuse.jit(model, settings=Settings(tiers=0)) as fast:
        for _ in range(3):
            fast(*args)
            assert fast.wait(120)
        got = check_served(fast, lambda: fast(*args))
        same(gradients_of(model, loss_of(got)), gradients_of(model, loss_of(model(*args))))


def test_gradients_of_a_function_and_what_it_closes_over() -> None:
    w = torch.randn(6, 6, requires_grad=True)

    def project(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w)

    x = torch.randn(3, 6)
    fast = served(project, x)
    check_served(fast, lambda: fast(x)).sum().backward()
    got, w.grad = w.grad, None
    project(x).sum().backward()
    torch.testing.assert_close(got, w.grad)


@pytest.mark.parametrize("gradients", [False, True])
def test_forward_mode_keeps_its_tangents(gradients: bool) -> None:
    """`no_grad` does not turn forward mode off: a plan that answered would drop the tangent."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval(), torch.randn(3, 8)
    with torch.set_grad_enabled(gradients), hotfuse.jit(model, settings=Settings(capture="inline")) as fast:
        for _ in range(12):
            fast(x)
        assert fast.stats()["graph_calls"] > 0
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            got, want = (forward_ad.unpack_dual(f(dual)).tangent for f in (fast, model))
            assert got is not None
            torch.testing.assert_close(got, want)
        torch.testing.assert_close(fast(x), model(x))
