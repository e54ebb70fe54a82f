"""A field that nobody gives is what its environment variable says, else its default; folders follow the user's conventions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hotfuse
from hotfuse import InputError, Settings
from hotfuse.base.settings import unread_variables


def test_what_is_not_given_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTFUSE_PROFILES", ":memory:")
    monkeypatch.setenv("HOTFUSE_CACHE_BYTES", "1000")
    given = Settings(hot_calls=2)
    assert (given.profiles, given.cache_bytes, given.hot_calls) == (":memory:", 1000, 2)
    own = Settings(profiles=None, cache_bytes=5)
    assert own.profiles is None and own.cache_bytes == 5
    monkeypatch.delenv("HOTFUSE_PROFILES")
    assert given.with_(hot_calls=3).profiles == ":memory:" and Settings().profiles is None


def test_settings_that_a_program_gives_leave_the_rest_to_its_user(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOTFUSE_DEBUG", "1")
    with hotfuse.jit(torch.nn.ReLU(), settings=Settings(capture="inline", tiers=0)) as fast:
        for _ in range(4):
            fast(torch.randn(3))
    assert "capture" in capfd.readouterr().err


@pytest.mark.parametrize(("variable", "text", "because"), [
    ("HOTFUSE_DEBUG", "much", "is not a whole number"), ("HOTFUSE_CACHE_BYTES", "1G", "is not a whole number"),
    ("HOTFUSE_CAPTURE", "never", "is not among the choices"), ("HOTFUSE_WORKERS", "two", "is not among the choices"),
    ("HOTFUSE_PERF_MAP", "on", "is neither 0 nor 1"),
])  # fmt: skip
def test_a_variable_that_cannot_be_meant_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, because: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(InputError, match=f"{variable}='{text}' {because}"):
        Settings()


def test_a_variable_that_nothing_reads_is_told_with_what_is_meant() -> None:
    told = unread_variables(["PATH", "HOTFUSE_DEBUG", "HOTFUSE_WORKER_NICE", "HOTFUSE_PRECISION", "HOTFUSE_PROFILE", "HOTFUSE_X"])
    assert told == {
        "HOTFUSE_PRECISION": "Settings(precision=...) in the program", "HOTFUSE_PROFILE": "HOTFUSE_PROFILES?",
        "HOTFUSE_X": "docs/reference/settings.md has the variables",
    }  # fmt: skip


def test_every_variable_of_ours_is_known_to_be_read() -> None:
    named = {n for p in Path(hotfuse.__file__).parent.rglob("*.py") for n in re.findall(r"HOTFUSE_[A-Z_]*[A-Z]", p.read_text())}
    assert len(named) > 12 and unread_variables(named) == {}


def test_the_cache_is_where_other_caches_of_the_user_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    old, new = tmp_path / "home" / ".cache" / "hotfuse", tmp_path / "caches" / "hotfuse"
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert Settings().folder == old
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert Settings().folder == new
    old.mkdir(parents=True)
    assert Settings().folder == old  # what was kept there before the variable was set
    new.mkdir(parents=True)
    assert Settings().folder == new
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")  # the convention: a relative path means nothing
    assert Settings().folder == old
    monkeypatch.setenv("HOTFUSE_CACHE_DIR", str(tmp_path / "own"))
    assert Settings().folder == tmp_path / "own"
    assert Settings(cache_dir=tmp_path / "given").folder == tmp_path / "given"
