# pyright: reportPrivateUsage=false
"""Entries that machines share through a file system of `fsspec`: believed under a trusted key, harmless otherwise."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import hotfuse
from hotfuse.base.errors import InputError
from hotfuse.base.faults import is_alive
from hotfuse.base.settings import Settings
from hotfuse.cache import shared as shared_module
from hotfuse.cache.address import Address
from hotfuse.cache.entry import EntryRefusal
from hotfuse.cache.folder import Folder
from hotfuse.cache.keys import Key, TrustedKeys
from hotfuse.cache.shared import SharedStore

HERE = Address("unit", "subject", {"program": "1"})
BODY: dict[str, Any] = {"a": 1}


def _folder(root: Path | None, url: str, byte: int = 1) -> Folder:
    key = Key(bytes([byte]) * 32)
    store = SharedStore(url)
    return Folder(root, TrustedKeys(key, (key,)), 1 << 20, (store,), store)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path / 'shared'}"


def test_what_one_machine_made_another_has(tmp_path: Path, url: str) -> None:
    first, second = _folder(tmp_path / "a", url), _folder(tmp_path / "b", url)
    assert first.put(HERE, BODY, [b"code"]) and first.shared is not None and first.shared.drain(20)
    assert second.get(HERE) == (BODY, [b"code"]) and second.stats()["from_shared"] == 1
    assert second.get(HERE) == (BODY, [b"code"]) and second.stats()["from_shared"] == 1  # from its own folder now
    assert _folder(None, url).get(HERE) == (BODY, [b"code"])  # also where nothing is kept
    assert second.get(Address("unit", "subject", {"program": "2"})) is None
    assert "unit: it was made by another version of Hotfuse" in second.stats()["told"]


def test_what_is_signed_by_others_or_damaged_is_refused_and_not_kept(tmp_path: Path, url: str) -> None:
    first = _folder(tmp_path / "a", url)
    assert first.put(HERE, BODY, [b"code"]) and first.shared is not None and first.shared.drain(20)
    foreign = _folder(tmp_path / "b", url, 2)
    assert foreign.get(HERE) is None and foreign.stats()["reasons"][f"refused: {EntryRefusal.FOREIGN.value}"]
    files, root = fsspec.core.url_to_fs(url)
    path = next(f for f in files.find(root) if HERE.name in f)
    whole = files.cat_file(path)
    for bad in (whole[:-1], whole[:40], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        files.pipe_file(path, bad)
        folder = _folder(tmp_path / "c", url)
        assert folder.get(HERE) is None and folder.stats()["refused"]
        assert HERE.name not in [f.name for f in folder.entries()]


class _Broken:
    """A file system that fails."""

    def open(self, *_args: object) -> None:
        raise ConnectionError("no route")

    makedirs = open


def test_a_store_that_fails_is_left_alone_for_a_while_and_counted(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "a", "memory://broken")
    assert folder.shared is not None
    folder.shared._files = _Broken()
    assert folder.get(HERE) is None and folder.get(HERE) is None
    assert folder.shared.to_dict()["failed"] == 1 and "no route" in folder.shared.to_dict()["state"]
    assert folder.put(HERE, BODY) and folder.shared.drain(20)  # kept here all the same
    assert folder.get(HERE) == (BODY, []) and folder.shared.to_dict()["left_out"] == 2


class _Silent:
    """A file system that takes what it is asked and never answers."""

    def __init__(self) -> None:
        self.asked, self.end = 0, threading.Event()

    def open(self, *_args: object) -> None:
        self.asked += 1
        self.end.wait(120)
        raise ConnectionError("gone")

    def makedirs(self, *_args: object, **_more: object) -> None:
        self.end.wait(120)


def test_a_store_that_says_nothing_holds_nobody_up_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "ANSWER_S", 0.2)
    monkeypatch.setattr(shared_module, "AWAY_S", 0.0)
    folder, silent = _folder(tmp_path / "a", "memory://silent"), _Silent()
    assert folder.shared is not None
    folder.shared._files = silent
    try:
        begin = time.monotonic()
        assert folder.get(HERE) is None and folder.get(HERE) is None
        assert time.monotonic() - begin < 60 and silent.asked == 1, "who waits for an answer is not asked more"
        assert folder.shared.to_dict()["failed"] == 1 and "no answer" in folder.shared.to_dict()["state"]
        silent.end.set()
        until = time.monotonic() + 60
        while is_alive(folder.shared._unanswered) and time.monotonic() < until:
            time.sleep(0.01)
        folder.shared._files = fsspec.filesystem("memory")
        assert folder.put(HERE, BODY) and folder.shared.drain(20) and folder.shared.counts["written"] == 2
        silent.end.clear()
        folder.shared._files = silent
        folder.shared.write("n" * 64, b"entry")
        until = time.monotonic() + 60
        while "no answer for" not in folder.shared.to_dict()["state"] and time.monotonic() < until:
            time.sleep(0.01)
        assert "no answer for" in folder.shared.to_dict()["state"]
    finally:
        silent.end.set()


def test_a_model_says_which_store_it_shares(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path, profiles=":memory:", cache_shared=f"file://{tmp_path / 's'}")
    with hotfuse.jit(torch.nn.ReLU(), settings=settings) as fast:
        fast(torch.randn(2))
        assert f"shared cache file://{tmp_path / 's'}: in use" in str(fast.explain(full=True))
    with pytest.raises(InputError, match="shared cache"):
        SharedStore("nosuchsystem://x")
