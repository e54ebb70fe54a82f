"""Models that cannot be pickled are captured all the same: in a fork that has them, or in the process, beside its calls."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import hotfuse
from hotfuse import Settings
from hotfuse.base.errors import CaptureError
from hotfuse.compile.workers import fork_once
from hotfuse.frontends import model_parts, present
from hotfuse.frontends.naming import Unnamed, structure_name
from hotfuse.frontends.ship import ship

QUIET = Settings(tiers=0, watch=False)


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


class Holding(nn.Module):
    """A lock, a file, weights in a list, tied weights, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.out.weight = self.fc.weight
        self.lock = threading.Lock()
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.extra = [torch.randn(8), {"k": torch.randn(8)}]
        self.register_buffer("scale", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.out(torch.relu(self.fc(x))) * self.scale + self.extra[0] * self.extra[1]["k"]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(4, 4, 3), dim=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(x))


def deep() -> nn.Module:
    chain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(120)]).eval()
    return torch.export.export(chain, (torch.randn(3, 8),)).module()


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "a lock and a file": (Holding, (3, 8)), "parametrized weights": (Normed, (2, 4, 9)), "a deep graph": (deep, (3, 8)),
}


def reached(model: Any, x: torch.Tensor, settings: Settings) -> hotfuse.Jit:
    """Served by a plan; the results are the model's, also with other weights."""
    fast = hotfuse.jit(model, settings=settings)
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x))
        assert fast.wait(120)
    assert fast.stats()["calls_per_tier"]["0"] > 0, str(fast.explain(full=True))
    if isinstance(model, nn.Module):
        for p in model.parameters():
            p.mul_(1.25)
        torch.testing.assert_close(fast(x), model(x))
    return fast


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("where", ["fork", "spawn", "inline"])
def test_models_that_cannot_be_pickled_are_captured(name: str, where: str) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    settings = QUIET.with_(capture="inline") if where == "inline" else QUIET.with_(workers=where)
    fast = reached(model, x, settings)
    said = "in a fork of this process" if where == "fork" else "in this process" if where == "spawn" else "captured"
    with pytest.raises(CaptureError):
        ship(model)
    assert said in str(fast.explain(full=True))
    assert not present._held  # pyright: ignore[reportPrivateUsage]
    fast.close()


def test_a_fork_that_dies_over_it_is_replaced_by_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fork_once.ForkedWorker

    class Dying(real):  # type: ignore[misc, valid-type]
        def ask(self, header: Any, blobs: Any) -> Any:
            self.kill()
            return super().ask(header, blobs)

    monkeypatch.setattr(fork_once, "ForkedWorker", Dying)
    fast = reached(Holding(), torch.randn(3, 8), QUIET.with_(workers="fork"))
    assert "in this process" in str(fast.explain(full=True))
    fast.close()


def test_capture_in_the_process_leaves_the_model_alone() -> None:
    """Other threads call the model while it is traced: they never see a fake weight."""
    model, x = Holding(), torch.randn(3, 8)
    want, wrong, stop = model(x), [], threading.Event()

    def calling() -> None:
        with torch.no_grad():
            while not stop.is_set():
                if not torch.equal(model(x), want):
                    wrong.append(1)

    threads = [threading.Thread(target=calling) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        fast = hotfuse.jit(model, settings=QUIET.with_(workers="spawn"))
        fast(x)
        assert fast.wait(120)
        fast(x)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not wrong and fast.stats()["calls_per_tier"]["0"] > 0, str(fast.explain(full=True))
    fast.close()


def test_a_function_that_closes_over_what_cannot_be_pickled() -> None:
    lock, model = threading.Lock(), Holding()

    def call(x: torch.Tensor) -> torch.Tensor:
        with lock:
            return model(x) + 1

    fast = reached(call, torch.randn(3, 8), QUIET.with_(workers="fork"))
    x = torch.randn(3, 8)
    model.fc.weight.mul_(2)
    torch.testing.assert_close(fast(x), call(x))
    fast.close()


def test_exported_programs_and_their_modules() -> None:
    chain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(60)]).eval()
    x = torch.randn(3, 8)
    program = torch.export.export(chain, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    for model in (program, program.module(), torch.fx.symbolic_trace(chain)):
        fast = hotfuse.jit(model, settings=QUIET.with_(capture="inline"))
        for rows in (3, 3, 5, 5, 7):
            y = torch.randn(rows, 8)
            torch.testing.assert_close(fast(y), chain(y))
        assert fast.stats()["calls_per_tier"]["0"] > 0, str(fast.explain(full=True))
        fast.close()


def test_what_cannot_be_pickled_is_tried_once_and_an_exported_module_never(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotfuse import api

    tried: list[str] = []
    really = api.ship

    def counted(target: Any, extra: Any = None) -> Any:
        tried.append(type(target).__name__)
        return really(target, extra)

    monkeypatch.setattr(api, "ship", counted)
    chain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).eval()
    exported = torch.export.export(chain, (torch.randn(3, 8),), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
    for model, times in ((exported, 0), (Holding(), 1)):
        fast = hotfuse.jit(model, settings=QUIET.with_(capture="inline"))
        for rows in (3, 3, 5, 5, 7):
            y = torch.randn(rows, 8)
            torch.testing.assert_close(fast(y), model(y))
        stats = fast.stats()
        assert stats["calls_per_tier"]["0"] > 0 and stats["captures"] > 1, str(fast.explain(full=True))
        assert len(tried) == times
        fast.close()


def test_what_has_no_end_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_parts, "MAX_OBJECTS", 5)
    fast = hotfuse.jit(Holding(), settings=QUIET.with_(capture="inline"))
    for _ in range(2):
        fast(torch.randn(3, 8))
    assert "more than 5 objects" in str(fast.explain(full=True))


LEAVES = """
import functools, os, sys, threading, time, torch, hotfuse

@functools.cache
def tell():  # what runs once in a process is no effect of the model's; a file would not be opened for a capture
    os.symlink(str(os.getpid()), sys.argv[1])
    until = time.monotonic() + 300
    while time.monotonic() < until:
        sum(range(10000))

class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lock, self.inner, self.pid = threading.Lock(), torch.nn.Linear(8, 8), os.getpid()

    def forward(self, x):
        if os.getpid() != self.pid:
            tell()
        return self.inner(x)

fast = hotfuse.jit(Slow().eval())
with torch.no_grad():
    until = time.monotonic() + 120
    while not os.path.islink(sys.argv[1]) and time.monotonic() < until:
        fast(torch.randn(3, 8))
        time.sleep(0.01)
"""


def test_a_process_that_ends_takes_the_fork_with_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    subprocess.run([sys.executable, "-c", LEAVES, str(told)], check=True, timeout=240)
    assert not Path(f"/proc/{int(told.readlink().name)}").exists(), "its capture went on for nobody"


class Closing(nn.Module):
    """It removes a file when it is deleted."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fc, self.path = nn.Linear(8, 8), path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


class Temporary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.file = nn.Linear(8, 8), tempfile.NamedTemporaryFile("w+")  # noqa: SIM115

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))


@pytest.mark.parametrize("capture", ["inline", "background"])
def test_what_a_model_does_when_it_is_deleted_no_capture_does(capture: Any, tmp_path: Path) -> None:
    (tmp_path / "held").write_text("x")
    for model in (inner := Closing(tmp_path / "held"), nn.Sequential(inner), temporary := Temporary()):
        with hotfuse.jit(model, settings=Settings(tiers=0, watch=False, capture=capture)) as fast:
            for _ in range(8):
                fast(torch.randn(3, 8))
                assert fast.wait(60)
            assert fast.stats()["graph_calls"] > 0
        assert (tmp_path / "held").exists()
    assert Path(temporary.file.name).exists()


def test_a_text_file_is_not_read_to_send_a_model(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    with (tmp_path / "log").open("w+") as file:
        model.__dict__["log"] = file
        file.write("waits")
        with pytest.raises(CaptureError, match="text file"):
            ship(model)
        with pytest.raises(Unnamed, match="text file"):
            structure_name(model)
        assert (tmp_path / "log").read_text() == ""  # to read it, what waits would have been written


def test_what_a_program_made_while_it_ran_is_captured_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is no fork cannot import it; a library that needs an operator of the program's fails there in the same way."""
    made = types.ModuleType("made_while_running")
    exec("import torch\nclass Made(torch.nn.Module):\n    def forward(self, x):\n        return torch.tanh(x) * 2\n", vars(made))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    fast = reached(made.Made().eval(), torch.randn(3, 8), QUIET.with_(workers="spawn"))
    text = str(fast.explain(full=True))
    assert "captured in this process" in text and "cannot be sent to a worker" in text
