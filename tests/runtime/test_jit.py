"""`hotfuse.jit` from the outside: structures, weights that change, shapes that change, models that cannot be captured."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import InputError, Settings
from hotfuse.runtime.capturing import RESTING_CALLS
from hotfuse.runtime.plans import CALLS_A_CAPTURE

INLINE = Settings(capture="inline")


def served(model: Any, **changes: Any) -> hotfuse.Jit:
    return hotfuse.jit(model, settings=INLINE.with_(**changes))


def in_graph(fast: hotfuse.Jit) -> int:
    return fast.stats()["graph_calls"]


def check(fast: hotfuse.Jit, model: Any, *args: Any, graph: bool = True, **kwargs: Any) -> None:
    """The second call agrees with the model, and ran where it should."""
    fast(*args, **kwargs)
    before = in_graph(fast)
    got, want = fast(*args, **kwargs), model(*args, **kwargs)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert (in_graph(fast) > before) is graph, str(fast.explain(full=True))


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def test_first_call_runs_the_model_and_the_next_the_graph() -> None:
    model = Mlp().eval()
    fast = served(model)
    x = torch.randn(3, 16)
    assert torch.equal(fast(x), model(x))
    assert in_graph(fast) == 0
    assert torch.equal(fast(x), model(x))
    assert in_graph(fast) == 1


def test_capture_in_the_background() -> None:
    model = Mlp().eval()
    with hotfuse.jit(model, settings=Settings()) as fast:
        x = torch.randn(3, 16)
        assert torch.equal(fast(x), model(x))
        assert fast.wait(120)
        assert torch.equal(fast(x), model(x))
        assert in_graph(fast) == 1


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Box:
    inner: Any
    tag: str = "t"


class Nested(nn.Module):
    def forward(self, a: Any, *, items: Any, point: Any, flag: bool = True) -> Any:
        first = items["p"][0] * 2 + (point.x if flag else point.y)
        return {"box": Box(first + a), "list": [items["p"][1], None, (a.shape[0], "name")], "point": Point(a, 1)}


def test_nested_structures_in_and_out() -> None:
    model, fast = Nested(), served(Nested())
    for flag in (True, False):
        for rows in (2, 5, 7):
            a = torch.randn(rows, 3)
            kwargs = {"items": {"p": (torch.randn(rows, 3), torch.ones(1))}, "point": Point(a + 1, a - 1), "flag": flag}
            fast(a, **kwargs)
            got, want = fast(a, **kwargs), model(a, **kwargs)
            assert isinstance(got["box"], Box) and got["box"].tag == "t" and type(got["point"]) is Point
            torch.testing.assert_close(got["box"].inner, want["box"].inner)
            assert got["list"][1] is None and got["list"][2] == want["list"][2] and got["point"].x is a
    assert in_graph(fast) >= 6


def test_constants_of_other_types_are_other_calls() -> None:
    def scale(x: torch.Tensor, k: Any) -> torch.Tensor:
        return x * k

    fast = served(scale)
    x = torch.arange(4)
    for k in (1, 1.0, True, -0.0, 0.0):
        for _ in range(2):
            got, want = fast(x, k), scale(x, k)
            assert got.dtype == want.dtype and torch.equal(torch.signbit(got), torch.signbit(want))


def test_model_output_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    model = transformers.BertModel(config).eval()
    fast = served(model)
    ids = torch.randint(0, 100, (2, 9))
    for _ in range(2):
        got = fast(input_ids=ids, attention_mask=torch.ones_like(ids))
        assert type(got) is type(model(input_ids=ids))
        want = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state)
        torch.testing.assert_close(got["pooler_output"], want["pooler_output"])
    assert in_graph(fast) == 1, str(fast.explain(full=True))


def test_dims_that_vary_become_dynamic() -> None:
    model = Mlp().eval()
    fast = served(model)
    for rows in (3, 5, 8, 21):
        check(fast, model, torch.randn(rows, 16))
    assert fast.stats()["captures"] == 2  # the first shape, then one graph for every other
    check(fast, model, torch.randn(1, 16))
    check(fast, model, torch.randn(0, 16))
    check(fast, model, torch.randn(2, 3, 16))


def test_what_tracing_assumed_about_a_dim_is_guarded() -> None:
    def branchy(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 3 == 0 else x + 1

    fast = served(branchy)
    for rows in (3, 6, 9, 4, 5, 12, 7):
        x = torch.randn(rows, 2)
        for _ in range(2):
            assert torch.equal(fast(x), branchy(x)), rows
    guards = [g for s in fast.explain().to_dict()["sites"] for p in s["plans"] for g in p["guards"]]
    assert any("% 3" in g for g in guards), guards


def test_tied_weights_are_one_param() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    fast = served(model)
    check(fast, model, torch.randn(2, 8))
    assert fast.explain().to_dict()["sites"][0]["plans"][0]["params"] == 1


# --- the model changes ---------------------------------------------------------------------------


def change_in_place(m: Mlp) -> None:
    m.first.weight.mul_(2)


def change_one_weight(m: Mlp) -> None:
    m.first.weight[0, 0] += 5


def change_by_state_dict(m: Mlp) -> None:
    m.load_state_dict(Mlp().state_dict())


def change_assign(m: Mlp) -> None:
    m.load_state_dict(Mlp().state_dict(), assign=True)


def change_parameter(m: Mlp) -> None:
    m.second.bias = nn.Parameter(torch.randn(16))


def change_data(m: Mlp) -> None:
    m.second.bias.data = torch.randn(16)


def change_buffer(m: Mlp) -> None:
    m.scale = torch.full((16,), 3.0)


def change_submodule(m: Mlp) -> None:
    m.second = nn.Linear(16, 16)


def change_forward(m: Mlp) -> None:
    m.forward = lambda x: x * 3  # type: ignore[method-assign]


def change_hook(m: Mlp) -> None:
    m.first.register_forward_hook(lambda _m, _i, out: out * 2)


def change_attribute(m: Mlp) -> None:
    m.first.forward = lambda x: x + 1  # type: ignore[method-assign]


CHANGES = [change_in_place, change_one_weight, change_by_state_dict, change_assign, change_parameter, change_data,
           change_buffer, change_submodule, change_forward, change_hook, change_attribute]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_changed_model_is_noticed(change: Any) -> None:
    model = Mlp().eval()
    fast = served(model)
    x = torch.randn(64, 16)
    check(fast, model, x)
    before = model(x)
    change(model)
    assert not torch.equal(before, model(x))
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    events = fast.stats()["events"]
    assert any(k.split(".")[1] in ("weights_changed", "model_changed") for k in events), events


SCALE: Any = 2.0
INNER: Any = nn.Linear(4, 4)


def by_globals(x: torch.Tensor) -> torch.Tensor:
    return INNER(x) * SCALE


class ByGlobals(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE


def test_rebound_globals_and_closures_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    offset = torch.ones(4)

    def by_closure(x: torch.Tensor) -> torch.Tensor:
        return x + offset

    models = [by_globals, ByGlobals(), by_closure]
    fasts = [served(m) for m in models]
    x = torch.randn(3, 4)
    for fast, model in zip(fasts, models, strict=True):
        check(fast, model, x)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    monkeypatch.setitem(globals(), "INNER", nn.Linear(4, 4))
    offset = torch.full((4,), 5.0)
    for fast, model in zip(fasts, models, strict=True):
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x))
    INNER.weight.mul_(2)
    torch.testing.assert_close(fasts[0](x), by_globals(x))


class InnerReads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part * SCALE for part in x.unbind(0)), torch.zeros(4))


class SharedName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.SCALE = 4.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.SCALE


def test_global_names_are_those_that_code_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions inside a function count; attributes that are called like a global variable do not."""
    inner, shared = InnerReads(), SharedName()
    fast, other = served(inner), served(shared)
    x = torch.randn(3, 4)
    check(fast, inner, x)
    check(other, shared, x)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    for _ in range(3):
        torch.testing.assert_close(fast(x), inner(x))
        torch.testing.assert_close(other(x), shared(x))
    assert any(k.endswith("model_changed") for k in fast.stats()["events"])
    assert not any(k.endswith("model_changed") for k in other.stats()["events"])


def test_a_changed_dtype_is_noticed() -> None:
    model = Mlp().eval()
    fast = served(model)
    check(fast, model, torch.randn(4, 16))
    model.double()
    check(fast, model, torch.randn(4, 16).double())
    with pytest.raises(RuntimeError):
        fast(torch.randn(4, 16))


def test_training_mode_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    fast = served(model)
    x = torch.ones(64, 8)
    check(fast, model, x)
    model.train()
    assert (fast(x) == 0).any()
    assert fast.stats()["events"]["refuse.random"] >= 1
    model.eval()
    check(fast, model, x)


# --- what cannot be captured ---------------------------------------------------------------------


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * self.seen


def test_a_branch_on_data_is_followed_and_says_where() -> None:
    fast = served(Branch())
    for sign in (1, -1, 1, 1, -1, -1, -1, 1):
        x = torch.ones(3) * sign
        assert torch.equal(fast(x), Branch()(x))
    assert in_graph(fast) > 0
    text = str(fast.explain(full=True))
    assert "through code that reads its data, at" in text and "test_jit.py:" in text


def test_a_stateful_model_keeps_its_state() -> None:
    fast, model = served(Stateful()), Stateful()
    x = torch.ones(2)
    for _ in range(4):
        assert torch.equal(fast(x), model(x))
    assert in_graph(fast) == 1 and fast.stats()["events"]["refuse.stateful"] == 1  # its buffer became an argument


def test_a_model_that_writes_its_input_keeps_doing_so() -> None:
    def bump(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.add_(y), x * 2

    fast = served(bump)
    for i in range(3):
        x = torch.full((3,), float(i))
        same, twice = fast(x, torch.ones(3))
        assert same is x
        assert torch.equal(x, torch.full((3,), i + 1.0))
        assert torch.equal(twice, 2 * x)
    assert in_graph(fast) == 2
    x = torch.ones(3)
    fast(x, x)  # one writes what the other reads: only the model's own code knows in which order
    assert in_graph(fast) == 2
    assert torch.equal(x, torch.full((3,), 2.0))


def test_a_model_that_cannot_be_pickled_is_captured_where_it_is() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    fast = served(Locked())
    assert torch.equal(fast(torch.ones(2)), torch.full((2,), 2.0))
    assert fast.wait(60)
    assert torch.equal(fast(torch.ones(2)), torch.full((2,), 2.0))
    assert fast.stats()["plans"] == 1 and "refuse.not_sendable" not in fast.stats()["events"]


def test_objects_nobody_can_take_apart() -> None:
    class Odd:
        value = torch.ones(2)

    fast = served(lambda o: o.value + 1)
    assert torch.equal(fast(Odd()), torch.full((2,), 2.0))
    assert fast.stats()["events"]["keep.unsupported_call"] == 1


def test_the_models_own_error_is_the_users() -> None:
    model = Mlp().eval()
    fast = served(model)
    check(fast, model, torch.randn(2, 16))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fast(torch.randn(2, 15))
    check(fast, model, torch.randn(2, 16))


# --- modes around a call -------------------------------------------------------------------------


def test_a_first_call_that_raises_keeps_nothing_from_being_captured() -> None:
    class Picks(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return x[i].sum(0)

    model, x = Picks(), torch.randn(4, 3)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(2):
            with pytest.raises(IndexError):
                fast(x, torch.tensor([1, 9]))
        for i in ([1, 2], [0, 3], [3, 3]):
            torch.testing.assert_close(fast(x, torch.tensor(i)), model(x, torch.tensor(i)))
        assert fast.stats()["captures"] == 1 and fast.stats()["calls_per_tier"]["0"] == 2


def test_gradients_flow_as_in_the_model() -> None:
    model = Mlp().eval()
    fast = served(model)
    with torch.enable_grad():
        x = torch.randn(2, 16, requires_grad=True)
        fast(x)
        fast(x)  # shows which results require gradients
        fast(x).sum().backward()
        got, x.grad = x.grad, None
        model(x).sum().backward()
    assert in_graph(fast) == 1
    torch.testing.assert_close(got, x.grad)


def test_a_region_without_gradients_stays_one() -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return y + x

    fast = served(half)
    x = torch.randn(3)
    check(fast, half, x)
    with torch.enable_grad():
        x.requires_grad_()
        fast(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_autocast_is_the_models_own_business() -> None:
    model = Mlp().eval()
    fast = served(model)
    x = torch.randn(2, 16)
    check(fast, model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(x).dtype == model(x).dtype


def test_inside_torch_compile() -> None:
    model = Mlp().eval()
    fast = served(model)
    x = torch.randn(2, 16)
    check(fast, model, x)
    compiled = torch.compile(lambda t: fast(t) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x) + 1)


def test_many_threads() -> None:
    model = Mlp().eval()
    fast = hotfuse.jit(model, settings=Settings())
    wrong: list[int] = []

    def work(seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(60):
                x = torch.randn(int(torch.randint(1, 9, (), generator=g)), 16, generator=g)
                if not torch.allclose(fast(x), model(x), atol=1e-6):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert fast.wait(120) and not wrong
    assert fast.stats()["calls"] == 240


# --- the interface -------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    bads: dict[str, Any] = {"objective": "speed", "threads": "two", "precision": "bf17", "weights": "some"}
    for bad in ({"threads": 0}, *({name: value} for name, value in bads.items())):
        with pytest.raises(InputError, match=next(iter(bad))):
            hotfuse.jit(Mlp(), **bad)
    with pytest.raises(InputError, match="instance"):
        hotfuse.jit(Mlp)
    with pytest.raises(InputError, match="not int"):
        hotfuse.jit(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"InferenceSession takes ONNX models"):
        hotfuse.jit("model.onnx")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown setting"):
        Settings().with_(colour="red")


def test_threads_are_bounded_during_a_call_only() -> None:
    seen: list[int] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x

    before = torch.get_num_threads()
    hotfuse.jit(look, threads=before + 1, settings=Settings(capture="off"))(torch.ones(1))
    assert seen == [before + 1] and torch.get_num_threads() == before


def test_capture_off_is_said() -> None:
    fast = hotfuse.jit(Mlp().eval(), settings=Settings(capture="off"))
    fast(torch.randn(2, 16))
    fast(torch.randn(2, 16))
    assert in_graph(fast) == 0 and fast.stats()["events"] == {"keep.turned_off": 1}


def test_closed_models_run_their_own_code() -> None:
    model = Mlp().eval()
    with served(model) as fast:
        check(fast, model, torch.randn(2, 16))
    check(fast, model, torch.randn(2, 16), graph=False)


def test_explain_has_three_faces(tmp_path: Any) -> None:
    model = Mlp().eval()
    fast = served(model)
    check(fast, model, torch.randn(2, 16))
    said = fast.explain(full=True)
    data = said.to_dict()
    assert data["sites"][0]["plans"][0]["partitions"][0]["ops"]["aten.linear"] == 2
    assert "aten.linear x2" in str(said)
    page = said.to_html(tmp_path / "e.html").read_text()
    assert page.startswith("<!doctype html>") and "aten.linear" in page


def test_attributes_are_the_models() -> None:
    model = Mlp().eval()
    assert served(model).first is model.first
    with pytest.raises(AttributeError):
        _ = served(model).nothing


def test_graphs_are_bounded() -> None:
    model = Mlp().eval()
    fast = served(model, max_entries=3, max_captures=6)
    for rank in range(12):
        shape = (1,) * rank + (2, 16)
        assert torch.equal(fast(torch.ones(shape)), model(torch.ones(shape)))
    stats = fast.stats()
    assert stats["plans"] <= 3 and stats["captures"] <= 6


class Scaled(nn.Module):
    """A Python number is part of a call's structure: each one is captured by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, power: str) -> torch.Tensor:
        return self.fc(x) * float(power)


def test_captures_that_are_used_pay_for_more() -> None:
    """Sixteen captures were all there ever were; a program that calls in more ways stayed in its own code for the others."""
    model, x = Scaled().eval(), torch.randn(3, 16)
    fast = served(model, max_captures=2)
    for power in "123":
        torch.testing.assert_close(fast(x, power), model(x, power))
    assert fast.stats()["captures"] == 2 and "limit of captured graphs was reached" in str(fast.explain())
    for _ in range(4 * CALLS_A_CAPTURE):  # blocks of them may be the own code's, while it is compared with the plan
        fast(x, "1")
    before = in_graph(fast)
    assert before >= CALLS_A_CAPTURE
    for _ in range(RESTING_CALLS + 3):  # where nothing more was captured, so many calls rest
        torch.testing.assert_close(fast(x, "3"), model(x, "3"))
    assert fast.stats()["captures"] == 3 and in_graph(fast) > before and "limit of captured" not in str(fast.explain())


def test_a_changed_model_is_captured_again_though_the_limit_was_reached() -> None:
    """What was made of the old one is gone, and nothing was ever made of the new one."""
    model, x = Scaled().eval(), torch.randn(3, 16)
    fast = served(model, max_captures=2)
    for power in "123":
        fast(x, power)
    model.fc = nn.Linear(16, 16)
    for _ in range(6):
        torch.testing.assert_close(fast(x, "1"), model(x, "1"))
    before = in_graph(fast)
    torch.testing.assert_close(fast(x, "1"), model(x, "1"))
    assert in_graph(fast) == before + 1, str(fast.explain(full=True))


def test_what_goes_wrong_in_learning_costs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault while a call is taken in is told as such: the call is answered, and its plan goes on."""
    from hotfuse.runtime.samples import CallSamples

    model = Mlp()
    fast = served(model)
    x = torch.randn(3, 16)
    check(fast, model, x)

    def broken(*_args: object, **_named: object) -> None:
        raise RuntimeError("no room for a sample")

    monkeypatch.setattr(CallSamples, "note", broken)
    before = in_graph(fast)
    for _ in range(200):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
    assert in_graph(fast) == before + 200
    assert fast.stats()["events"]["learning_faults"] > 0
    assert "no room for a sample" in str(fast.explain(full=True))


class Dropping(nn.Module):
    """Layers that might be dropped while training: the number is drawn all the same, as in wav2vec2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            chance = torch.rand([])
            if not self.training or chance > 0.5:
                x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("grad", [False, True])
def test_random_numbers_that_nobody_reads_are_drawn(grad: bool) -> None:
    model, x = Dropping().eval(), torch.randn(4, 8)
    fast = hotfuse.jit(model, settings=INLINE)
    with torch.set_grad_enabled(grad):
        for _ in range(6):
            fast(x)
        assert fast.stats()["graph_calls"] >= 4, str(fast.explain(full=True))
        found: list[torch.Tensor] = []
        for f in (model, fast):
            torch.manual_seed(7)
            y = f(x)
            if grad:
                y.sum().backward()
            found.append(torch.rand(3))
        assert torch.equal(*found), "the generator is where the model leaves it"
        torch.testing.assert_close(fast(x), model(x))
    fast.train()
    torch.manual_seed(1)
    want = [model(x) for _ in range(6)]
    torch.manual_seed(1)
    torch.testing.assert_close([fast(x) for _ in range(6)], want)
