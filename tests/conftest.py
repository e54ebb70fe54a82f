"""Options for the whole suite."""

from __future__ import annotations

import os

import pytest

# The suite keeps every core busy; captures that tests wait for must not starve behind it.
os.environ.setdefault("HOTFUSE_WORKER_NICE", "0")
# Workers must neither learn from nor write to the store of whoever runs the suite.
os.environ.setdefault("HOTFUSE_PROFILES", ":memory:")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write golden files anew instead of comparing with them")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update"))
