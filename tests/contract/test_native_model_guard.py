"""The native sweep over a model says what Python's says, whatever happened to the model."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotfuse.native import model_guard, requires, versions
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange

SCALE = 2.0
ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    """Weights, a buffer, a nested part, attributes, and a global variable."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(4, 4)
        self.flag = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * SCALE


def watched(net: nn.Module, functions: tuple[Callable[..., Any], ...] = ()) -> ModelGuard:
    return ModelGuard(list(net.modules()), [*net.parameters(), *net.buffers()], functions)


def global_name(_net: Net) -> None:
    globals()["SCALE"] = 3.0


def emptied(net: Net) -> None:
    net.layer._parameters.clear()


def exchanged(net: Net) -> None:
    """One attribute goes, another comes: as many as before."""
    del net.flag
    net.other = True


def swapped(net: Net) -> None:
    torch.utils.swap_tensors(net.layer.weight, nn.Parameter(torch.randn(4, 4)))


def written(net: Net) -> None:
    with torch.no_grad():
        net.layer.weight.add_(1)


def through_a_view(net: Net) -> None:
    net.layer.weight.detach().view(-1)[3:5].zero_()


def loaded(net: Net) -> None:
    net.load_state_dict(Net().state_dict())


def trained(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.layer(torch.randn(2, 4)).sum().backward()
    optimizer.step()


def moved(net: Net) -> None:
    net.layer.weight.data = torch.randn(4, 4)


CHANGES: dict[Callable[[Net], object], WeightChange] = {
    written: WeightChange.VALUES,
    through_a_view: WeightChange.VALUES,
    loaded: WeightChange.VALUES,
    trained: WeightChange.VALUES,
    moved: WeightChange.VALUES,
    swapped: WeightChange.VALUES,
    lambda n: n.norm.running_mean.fill_(2.0): WeightChange.VALUES,  # type: ignore[union-attr, operator]
    lambda n: n.double(): WeightChange.MODEL,
    lambda n: n.train(): WeightChange.MODEL,
    lambda n: setattr(n, "layer", nn.Linear(4, 4)): WeightChange.MODEL,
    lambda n: setattr(n.layer, "weight", nn.Parameter(torch.randn(4, 4))): WeightChange.MODEL,
    lambda n: setattr(n, "flag", False): WeightChange.MODEL,
    lambda n: setattr(n, "more", 1): WeightChange.MODEL,
    lambda n: delattr(n, "flag"): WeightChange.MODEL,
    lambda n: n.layer.register_forward_hook(lambda *_a: None): WeightChange.MODEL,
    lambda n: n.layer.register_forward_pre_hook(lambda *_a: None): WeightChange.MODEL,
    lambda n: n.register_buffer("late", torch.zeros(1)): WeightChange.MODEL,
    lambda n: n.__dict__.update(flag=7): WeightChange.MODEL,
    exchanged: WeightChange.MODEL,
    emptied: WeightChange.MODEL,
    global_name: WeightChange.MODEL,
    lambda n: setattr(n, "flag", True): WeightChange.NONE,
    lambda n: n.eval(): WeightChange.NONE,
    lambda n: setattr(n, "layer", n.layer): WeightChange.NONE,
    lambda n: n(torch.randn(2, 4)): WeightChange.NONE,
    lambda n: [p.sum() for p in n.parameters()]: WeightChange.NONE,
    lambda _n: globals().update(UNRELATED=object()): WeightChange.NONE,
}


@pytest.fixture(params=["tags", "lookups"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With tags of dicts, and as where an interpreter has none."""
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert model_guard.unavailable() == "" and not isinstance(versions.dict_tag_at(), str)
    if request.param == "lookups":
        monkeypatch.setattr(model_guard, "dict_tag_at", lambda: "no tags")
    return request.param


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_every_change_is_judged_as_python_judges_it(way: str, number: int) -> None:
    change, expected = list(CHANGES.items())[number]
    net = Net().eval()
    plain, native = watched(net), watched(net)
    native.harden()
    assert native.native is True and native.check() is plain.check() is WeightChange.NONE and native.swept == 0
    change(net)
    assert plain.check() is expected and native.check() is expected and native.check() is expected
    if expected is WeightChange.NONE:
        assert native.swept <= 1, "a value replaced by itself is looked at once"
    if expected is WeightChange.VALUES:
        for w in (plain, native):
            w.accept(w.observe())
        swept = native.swept
        assert plain.check() is native.check() is WeightChange.NONE and native.swept <= swept + 1
        assert native.check() is WeightChange.NONE and native.swept <= swept + 1
        net.flag = False
        assert plain.check() is native.check() is WeightChange.MODEL


def test_what_is_noted_anew_is_noted_beside_calls(way: str) -> None:
    net, jobs = Net().eval(), list[Callable[[], None]]()
    watch = watched(net)
    for job in watch.hardening_jobs(jobs.append):
        job()
    net.flag = "other"[:5]
    assert watch.check() is WeightChange.MODEL and not jobs
    net.flag = True
    for _ in range(3):
        net.__dict__["flag"] = bool(1)
        assert watch.check() is WeightChange.NONE
    if way == "tags":
        assert watch.swept == 4 and len(jobs) == 1, "one job at a time, however many calls look"
        jobs.pop()()
        assert watch.check() is WeightChange.NONE and watch.swept == 4
        net.__dict__["flag"] = True
        assert watch.check() is WeightChange.NONE and not jobs, "noting has a share of the time"
    net.flag = False
    assert watch.check() is WeightChange.MODEL


def test_programs_that_hear_what_is_done_do_not_slow_calls() -> None:
    """Hooks of a program (`sys.addaudithook`; packages install some) hear of every `id`: thousands in a look would take long."""
    code = (
        "import sys, torch\n"
        "from tests.contract.test_native_model_guard import Net, watched\n"
        "from hotfuse.runtime.serve.own_effects import contents_of, same_contents\n"
        "net = Net().eval()\n"
        "watch, held = watched(net), contents_of(net.modules())\n"
        "heard = []\n"
        "sys.addaudithook(lambda event, _: heard.append(event))\n"
        "watch.check(), same_contents(contents_of(net.modules()), held)\n"
        "said = list(heard)\n"
        "watch.hardening_jobs(lambda _job: None)[0]()\n"
        "net.flag = False\n"
        "net.flag = True\n"
        "heard.clear()\n"
        "watch.check()\n"
        "print('builtins.id' in {*said, *heard}, watch.swept)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False 1", done.stdout


def test_closures_and_their_variables_that_are_not_set_yet(way: str) -> None:
    def make() -> tuple[Callable[..., Any], Callable[[object], None]]:
        def shifted(x: torch.Tensor) -> torch.Tensor:
            return x + offset

        def bind(value: object) -> None:
            nonlocal offset
            offset = value

        return shifted, bind
        offset = 0

    function, bind = make()
    watch = ModelGuard((), (), (function,))
    watch.harden()
    assert watch.native is True and watch.check() is WeightChange.NONE and watch.swept == 0
    bind(2)
    assert watch.check() is WeightChange.MODEL
    watch = ModelGuard((), (), (function,))
    watch.harden()
    assert watch.check() is WeightChange.NONE and watch.swept == 0
    bind(3)
    assert watch.check() is WeightChange.MODEL


def test_what_changed_before_the_sweep_was_made_is_not_taken_for_given(way: str) -> None:
    net = Net().eval()
    watch = watched(net)
    net.flag = False
    watch.harden()
    assert watch.check() is WeightChange.MODEL
    watch = watched(net)
    written(net)
    watch.harden()
    assert watch.check() is WeightChange.VALUES


def test_what_native_code_cannot_watch_stays_with_python_and_says_why() -> None:
    class Odd(dict[str, Any]):
        pass

    net = Net().eval()
    object.__setattr__(net, "_buffers", Odd(net._buffers))
    watch = watched(net)
    watch.harden()
    assert isinstance(watch.native, str) and "Odd" in watch.native
    assert watch.check() is WeightChange.NONE
    net.flag = False
    assert watch.check() is WeightChange.MODEL


def test_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        net = Net().eval()
    watch = watched(net)
    watch.harden()
    assert watch.native is True and watch.check() is WeightChange.NONE and watch.swept == 0
    with torch.inference_mode():
        net.layer.weight.data = torch.randn(4, 4)
    assert watch.check() is WeightChange.VALUES


def test_many_threads_and_changes() -> None:
    """A change is heard of by whoever asks after it, however many ask meanwhile."""
    net = Net().eval()
    watch = watched(net)
    watch.harden()
    stop, wrong = threading.Event(), list[str]()

    def ask() -> None:
        while not stop.is_set():
            if watch.check() is WeightChange.MODEL:
                wrong.append("a model that did not change")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for t in threads:
        t.start()
    for i in range(200):
        written(net)
        if watch.check() is not WeightChange.VALUES:
            wrong.append(f"change {i} was not heard of")
        net.flag = True
        watch.accept(watch.observe())
        if watch.check() is not WeightChange.NONE:
            wrong.append(f"change {i} was accepted")
    stop.set()
    for t in threads:
        t.join()
    assert not wrong, wrong[:3]


def test_a_sweep_outlives_nothing_it_reads() -> None:
    net = Net().eval()
    watch = watched(net)
    watch.harden()
    sweep = watch.unchanged
    del watch, net
    gc.collect()
    assert sweep() is True


def test_flags_of_gradients_are_read_where_torch_keeps_them() -> None:
    places = requires.flag_places()
    assert not isinstance(places, str), places
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    model.register_buffer("scale", torch.ones(3))
    watched = [*model.parameters(), *model.buffers(), torch.zeros(2)]
    same = requires.native_same(watched, [t.requires_grad for t in watched])
    assert not isinstance(same, str) and same()
    for t in watched:
        flag = t.requires_grad
        t.requires_grad_(not flag)
        assert not same() and requires.read_flag(t, places) is not flag
        t.requires_grad_(flag)
        assert same()
    (model[0](torch.randn(2, 3)) * model.scale).sum().backward()  # accumulators and gradients are kept in the same place
    assert same()
    model.zero_grad()
    model.double()
    assert same()


def test_flags_of_what_others_made_are_not_read() -> None:
    made = nn.Linear(2, 2).weight * 2
    assert isinstance(requires.native_same([made], [True]), str)
