"""Options for the whole suite."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import hashlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.zoo.wheels import FOLDER_VARIABLE, zoo_folder
from hotfuse.base.passes import verifying
from hotfuse.base.settings import Settings
from tests import process, quick
from tests.levels import one_level_each
from tests.seeds import begin, shuffled

gc.disable()  # until all is collected: what is imported stays, and looking through it again and again is a seventh of that time

NAME = pytest.StashKey[str]()

# The suite keeps every core busy; captures that tests wait for must not starve behind it.
os.environ.setdefault("HOTFUSE_WORKER_NICE", "0")
# Models that were fetched are shared. Nothing else of the suite reads or writes what the user who runs it keeps, and no test learns
# from another one: each has a home of its own, and settings that name no store put it there.
os.environ.setdefault(FOLDER_VARIABLE, str(zoo_folder()))
for variable in ("XDG_CACHE_HOME", *(f.metadata["variable"] for f in dataclasses.fields(Settings) if "variable" in f.metadata)):
    os.environ.pop(variable, None)
os.environ.setdefault("XDG_CONFIG_HOME", os.path.expanduser("~/.config"))  # where pip is told where packages come from
os.environ.setdefault("MPLCONFIGDIR", os.path.expanduser("~/.config/matplotlib"))
HOMES = tempfile.mkdtemp(prefix="hotfuse-home-")
os.environ["HOME"] = HOMES
OWNER = os.getpid()


@atexit.register
def _tidy() -> None:
    """Not by a child that some test forked: the homes are in use."""
    if os.getpid() == OWNER:
        shutil.rmtree(HOMES, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """No test is disturbed by what idle time is used for; those about it begin sooner. Neither clock nor chance picks examples."""
    import hypothesis

    from hotfuse.runtime.observe import idle

    idle.AFTER_S = 1e9
    same = config.getoption("--hypothesis-seed") is None
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        "suite", derandomize=same, deadline=None, database=None, print_blob=True, suppress_health_check=slow
    )
    hypothesis.settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)
def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a file draws when it is imported is the same whichever others are."""
    begin(collector.config.getoption("--seed"), collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> None:
    """A fixture's data are the same whichever test asks for it first."""
    begin(request.config.getoption("--seed"), f"{named(request.node)} {fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    begin(item.config.getoption("--seed"), named(item))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every worker comes to the same order, whatever it runs of it; names are kept as they are before groups are added to them."""
    for item in items:
        item.stash[NAME] = item.nodeid
    if not config.getoption("--every-level"):
        drawn = one_level_each([named(item) for item in items])
        config.hook.pytest_deselected(items=[item for item in items if named(item) not in drawn])
        items[:] = [item for item in items if named(item) in drawn]
    if config.getoption("--quick"):
        budgets = {quick.function_of(named(i)): float(m.args[0]) for i in items if (m := i.get_closest_marker("budget_s"))}
        drawn = quick.drawn(map(named, items), quick.costs(), budgets)
        config.hook.pytest_deselected(items=[item for item in items if named(item) not in drawn])
        items[:] = [item for item in items if named(item) in drawn]
        places = {name: i for i, name in enumerate(quick.long_ones_first(map(named, items), quick.costs()))}
        items.sort(key=lambda item: places[named(item)])
    if number := config.getoption("--shuffle"):
        places = shuffled(number, map(named, items))
        items.sort(key=lambda item: places[named(item)])


def pytest_collection_finish() -> None:
    """A collection of garbage looks at what tests made, not at all that was imported for thirteen thousand of them."""
    process.freeze()
    gc.enable()


TOOK: dict[str, float] = {}
"""Seconds of each test that this process has heard of, for `--costs`."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    TOOK[report.nodeid] = TOOK.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Workers hear of their own tests alone; the process that began them writes."""
    if session.config.getoption("--costs") and not hasattr(session.config, "workerinput"):
        quick.write(TOOK)


def named(node: Any) -> str:
    """A test's name whether or not it runs in a group: its data follow from it."""
    return node.stash.get(NAME, node.nodeid)


def pytest_report_header(config: pytest.Config) -> str:
    return f"random data: --seed {config.getoption('--seed')}; order: --shuffle {config.getoption('--shuffle')}"


@pytest.fixture(scope="session", autouse=True)
def what_workers_import_is_there() -> None:
    """Every test has workers of its own, forked from this process: what they would each import for seconds is imported once."""
    gc.disable()
    for module in ("torch.export._trace", "hotfuse.frontends.torch_module", "torch.fx.experimental.validator",
                   "hotfuse.frontends.onnx.capture", "hotfuse.compile.unit.units", "hotfuse.compile.run.runs",
                   "hotfuse.backends.llvm.emission.emit"):  # fmt: skip
        importlib.import_module(module)
    process.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def every_pass_is_verified() -> Iterator[None]:
    """Workers that begin as forks of this process do so as well."""
    with verifying():
        yield


@pytest.fixture(scope="module", autouse=True)
def homes(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module's tests share has a home, too, and not that of other modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", _home_of(request.node))
        yield
    process.freeze()


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test taught this machine's store is not what the next one begins with, whichever that is."""
    monkeypatch.setenv("HOME", _home_of(request.node))


def _home_of(node: Any) -> str:
    own = os.path.join(HOMES, hashlib.sha256(named(node).encode()).hexdigest()[:16])
    os.makedirs(own, exist_ok=True)
    return own


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Background jobs end with the test that began them, while what it patched is still so; then the process forgets."""
    yield
    process.finish()
    process.forget()
    process.as_at_first()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-level", action="store_true", help="every kernel's case on every level, not on a drawn one")
    parser.addoption("--quick", action="store_true", help="of costly tests, the cases that fit into a budget (tests/quick.py)")
    parser.addoption("--costs", action="store_true", help="write what tests took to tests/costs.txt, for --quick")
    parser.addoption("--update", action="store_true", help="write golden files anew instead of comparing with them")
    parser.addoption("--seed", type=int, default=0, help="random data of all tests follow from this number and the test's name")
    parser.addoption("--shuffle", type=int, default=0, help="order of files and of the tests in them; 0: as they are written")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update"))
