"""Notes for the next process: believed in the same circumstances and under a trusted key, and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hotfuse.cache import address
from hotfuse.cache.keys import Key, TrustedKeys
from hotfuse.cache.notes import StartNotes
from hotfuse.machine import probe
from hotfuse.machine.cpu_features import known_features


def _keys(byte: int = 1) -> TrustedKeys:
    key = Key(bytes([byte]) * 32)
    return TrustedKeys(key, (key,))


def test_a_note_holds_in_its_circumstances_only(tmp_path: Path) -> None:
    notes = StartNotes(tmp_path, _keys())
    assert notes.recall("sources", "here") is None
    notes.keep("sources", "here", ["a", 1])
    assert notes.recall("sources", "here") == ["a", 1] and notes.recall("sources", "there") is None
    assert StartNotes(tmp_path, _keys(2)).recall("sources", "here") is None, "signed by somebody else"
    (tmp_path / "features.note").write_bytes((tmp_path / "sources.note").read_bytes())
    assert notes.recall("features", "here") is None, "it stands under another name"


@pytest.mark.parametrize("at", range(0, 200, 11))
def test_damaged_notes_are_none(tmp_path: Path, at: int) -> None:
    notes = StartNotes(tmp_path, _keys())
    notes.keep("sources", "here", "value" * 20)
    path = tmp_path / "sources.note"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert notes.recall("sources", "here") is None
    path.write_bytes(bytes(data)[:at])
    assert notes.recall("sources", "here") is None


def test_where_nothing_can_be_written_nothing_is_noted(tmp_path: Path) -> None:
    notes = StartNotes(tmp_path / "missing", _keys())
    notes.keep("sources", "here", "x")
    assert notes.recall("sources", "here") is None


def test_sources_are_read_again_when_a_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "cache").mkdir(parents=True)
    (package / "one.py").write_text("x = 1\n")
    monkeypatch.setattr(address, "__file__", str(package / "cache" / "address.py"))
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(address, "_notes", StartNotes(tmp_path / "notes", _keys()))
    whole = address.program.__wrapped__
    first = whole()
    assert whole() == first and (tmp_path / "notes" / "sources.note").exists()
    (package / "one.py").write_text("x = 22\n")
    second = whole()
    (package / "two.py").write_text("")
    third = whole()
    monkeypatch.setattr(address, "_notes", None)
    assert len({first, second, third}) == 3 and whole() == third, "a note says what the files say"


@pytest.mark.skipif(sys.platform != "linux", reason="nobody can tell one boot from another elsewhere")
def test_trials_are_noted_and_tried_again_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_memory", StartNotes(tmp_path, _keys()))
    tried: list[int] = []
    real = probe.probe
    monkeypatch.setattr(probe, "probe", lambda *a: (tried.append(1), real(*a))[1])
    fresh = probe.features.__wrapped__
    first = fresh()
    assert fresh() == first and len(tried) == 1, "an earlier process tried them during this boot"
    before = probe.circumstances(known_features())
    assert before and probe.circumstances(known_features()) == before
    monkeypatch.setattr(probe, "circumstances", lambda _known: "another boot")
    assert fresh() == first and len(tried) == 2
    monkeypatch.setattr(probe, "circumstances", lambda _known: "")
    assert fresh() == first and len(tried) == 3, "where nobody can tell, nothing is believed"
