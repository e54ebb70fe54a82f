"""Options for the whole suite."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest

# The suite keeps every core busy; captures that tests wait for must not starve behind it.
os.environ.setdefault("HOTFUSE_WORKER_NICE", "0")
# Nothing of the suite learns from or writes to the store of whoever runs it: neither what reads the environment, nor what does not.
os.environ.setdefault("HOTFUSE_PROFILES", ":memory:")
os.environ.setdefault("MPLCONFIGDIR", os.path.expanduser("~/.config/matplotlib"))
os.environ.setdefault("HOTFUSE_CACHE_DIR", os.path.expanduser("~/.cache/hotfuse"))
os.environ["HOME"] = tempfile.mkdtemp(prefix="hotfuse-home-")
atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)


def pytest_configure() -> None:
    """No test is disturbed by what idle time is used for; those about it begin sooner."""
    from hotfuse.runtime import idle

    idle.AFTER_S = 1e9


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write golden files anew instead of comparing with them")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update"))
