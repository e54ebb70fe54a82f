"""`hotfuse cache` and `hotfuse keys` on real folders."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.cache.address import Address
from hotfuse.cache.bundle import write_bundle
from hotfuse.cache.keys import Key, TrustedKeys
from hotfuse.cache.place import folder_of
from hotfuse.cli import app


def _run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(args))
    return done.exit_code, done.output


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HOTFUSE_CACHE", str(tmp_path / "code"))
    held = folder_of(Settings(cache_dir=tmp_path))
    assert held is not None
    for i in range(4):
        held.put(Address("unit", str(i)), {"n": i}, [bytes(1000)])
    return tmp_path


def _json(*args: str) -> Any:
    return json.loads(_run(*args, "--json")[1])


def test_what_there_is_is_listed_checked_and_made_smaller(place: Path) -> None:
    found = _json("cache", "ls")
    assert len(found["entries"]) == 8 and found["bytes"] > 4000  # each with its head
    assert _run("cache", "verify")[0] == 0 and "8 entries" in _run("cache", "ls")[1]
    broken = next((place / "code").glob("??/*.hf"))
    broken.write_bytes(broken.read_bytes()[:-1])
    code, said = _run("cache", "verify")
    assert code == 1 and "refused" in said
    assert _json("cache", "verify")["refused"].keys() == {broken.stem}
    assert _json("cache", "gc", "--bytes", "0")["entries"] == 0


def test_entries_that_cannot_be_removed_are_an_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    code, said = _run("cache", "gc", "--bytes", "0")
    assert code == 2 and "cannot be removed" in said


def test_keys_are_named_and_never_shown(place: Path) -> None:
    secret = (place / "cache.key").read_text().strip()
    code, said = _run("keys")
    assert code == 0 and str(place / "cache.key") in said.replace("\n", "") and secret not in said
    made = place / "fleet.key"
    assert _run("keys", "--make", str(made))[0] == 0 and stat.S_IMODE(made.stat().st_mode) == 0o600
    assert _run("keys", "--make", str(made))[0] == 2
    assert _run("keys", "--make", str(place / "a"), "--make-pair", str(place / "b"))[0] == 2 and not (place / "a").exists()


def test_a_folder_that_is_not_there_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTFUSE_CACHE", str(tmp_path / "none"))
    code, said = _run("cache", "ls")
    assert code == 2 and "there is no cache" in said
    (tmp_path / "file").touch()
    code, said = _run("cache", "ls", "--folder", str(tmp_path / "file"))
    assert code == 2 and "it is no folder" in said
    monkeypatch.setenv("HOTFUSE_CACHE", "off")
    assert _run("cache", "verify")[0] == 2


def test_a_key_that_cannot_be_written_is_an_error_in_words(place: Path) -> None:
    (place / "file").touch()
    for target in (place / "file" / "key", Path("/proc/nothing/key")):
        code, out = _run("keys", "--make", str(target))
        assert code == 2 and "cannot be used" in out and "because:" in out, out
        assert "Traceback" not in out
    found = _json("keys", "--make", str(place / "file" / "key"))
    assert "cannot be used" in json.dumps(found)


@pytest.mark.parametrize("trouble", ["a file for a folder", "a foreign bundle", "nothing"])
def test_the_first_lines_say_that_nothing_is_kept_or_was_refused(tmp_path: Path, trouble: str) -> None:
    (tmp_path / "file").touch()
    settings = Settings(cache_dir=tmp_path)
    match trouble:
        case "a file for a folder":
            settings = settings.with_(cache_dir=tmp_path / "file")
        case "a foreign bundle":
            stranger = Key(bytes(32))
            write_bundle(tmp_path / "b", [], {}, TrustedKeys(stranger, (stranger,)))
            settings = settings.with_(artifacts=str(tmp_path / "b"))
        case _:
            pass
    with hotfuse.jit(torch.nn.Linear(3, 3).eval(), settings=settings) as fast:
        (line,) = [text for text in str(fast.explain()).splitlines() if text.startswith("noticed: ")]
    said = {"a file for a folder": "no key could be made", "a foreign bundle": "kept code was refused: it was signed with a key",
            "nothing": "nothing"}  # fmt: skip
    assert said[trouble] in line and (trouble == "nothing") is (line == "noticed: nothing"), line


def test_the_first_lines_say_that_the_fleets_database_is_away(tmp_path: Path) -> None:
    """Of every model that shares it, and only as long as it lasts."""
    settings = Settings(cache_dir=tmp_path, profiles=f"postgresql://nobody@/none?host={tmp_path}", profiles_s=600)
    with hotfuse.jit(torch.nn.Linear(3, 3).eval(), settings=settings) as fast:
        shared = fast._engine.recorder._here()
        assert shared.sync is not None and not shared.sync.once()
        (line,) = [text for text in str(fast.explain()).splitlines() if text.startswith("noticed: ")]
        assert "the fleet's database cannot be used; rows wait in a file of this machine (connection" in line, line
        shared.sync.report.state = "in use"
        assert "noticed: nothing" in str(fast.explain())
        shared.sync.stop()
