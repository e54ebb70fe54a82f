"""Bundles and who is believed: what comes back is what went in, signed by a key that is trusted, or nothing does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hotfuse
from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.cache.address import Address
from hotfuse.cache.bundle import Bundle, open_bundle, write_bundle
from hotfuse.cache.entry import EntryRefusal, Refused, pack, unpack
from hotfuse.cache.folder import Folder
from hotfuse.cache.keys import Key, PrivateKey, TrustedKeys, keys_for, make_pair, read_key, read_public
from hotfuse.cache.place import cache_stats
from hotfuse.cli import app
from hotfuse.cli.build_bundle import CallKind, _answered, _given

BODY: dict[str, Any] = {"kernel": "text"}
HERE = Address("plan", "subject", {"program": "1", "machine": "x86_64 avx avx2", "sizes": "[1]"})


def _keys(byte: int = 1) -> TrustedKeys:
    key = Key(bytes([byte]) * 32)
    return TrustedKeys(key, (key,))


def _bundle(path: Path, keys: TrustedKeys, address: Address = HERE, machine: str = "x86_64 avx avx2") -> Path:
    """A bundle of one entry with its head, as `hotfuse build` makes it."""
    source = Folder(path.parent / f"{path.name}-made", keys, 1 << 20)
    source.put(address, BODY, [b"code" * 64])
    held = [(f.name, data) for f in source.entries() if (data := source.raw(f)) is not None]
    write_bundle(path, held, {"machine": machine, "host": "there"}, keys)
    return path


def _over(root: Path | None, path: Path, keys: TrustedKeys) -> Folder:
    return Folder(root, keys, 1 << 20, (open_bundle(path, keys),))


def test_what_the_folder_has_not_comes_from_the_bundle(tmp_path: Path) -> None:
    made = _bundle(tmp_path / "b", _keys())
    for root in (tmp_path / "empty", None):
        folder = _over(root, made, _keys())
        assert folder.get(HERE) == (BODY, [b"code" * 64]) and folder.stats()["from_bundles"] == 1
        assert folder.get(Address("plan", "another")) is None and folder.stats()["misses"] == 1
    assert _over(None, made, _keys()).put(HERE, BODY) is False  # there is nowhere to keep it


def test_a_miss_says_what_the_bundle_was_made_for(tmp_path: Path) -> None:
    folder = _over(None, _bundle(tmp_path / "b", _keys()), _keys())
    assert folder.get(Address("plan", "subject", {**HERE.basis, "program": "2"})) is None
    assert "plan: it was made by another version of Hotfuse" in folder.stats()["told"]


def test_code_for_a_lesser_machine_serves_and_code_for_a_better_one_does_not(tmp_path: Path) -> None:
    usable = {"machine": "x86_64 avx avx2 avx512f"}
    better = Address("plan", "subject", {**HERE.basis, **usable})
    assert better.serves(HERE.basis, {"avx", "avx2", "avx512f"}) and not HERE.serves(better.basis, {"avx", "avx2"})
    assert not better.serves({**HERE.basis, "machine": "aarch64"}, {"avx"})
    assert not better.serves({**HERE.basis, "program": "2"}, {"avx", "avx2", "avx512f"})
    assert HERE.serves({**HERE.basis, "threads": "64"}, {"avx", "avx2"}), "teams are as large as torch's when a kernel runs"
    lesser = _bundle(tmp_path / "b", _keys(), Address("plan", "subject", {**HERE.basis, "machine": "x86_64"}), "x86_64")
    near = _over(None, lesser, _keys()).latest(HERE)
    assert near is not None and near[0] == (BODY, [b"code" * 64]) and near[1] == "it was made for another machine"
    assert _over(None, lesser, _keys()).get(HERE) is None


def test_code_that_needs_what_does_not_execute_is_refused(tmp_path: Path) -> None:
    source = Folder(tmp_path / "made", _keys(), 1 << 20)
    source.put(HERE, BODY, [b"code"], ["an instruction of tomorrow"])
    data = (source._path(HERE.name)).read_bytes()
    write_bundle(tmp_path / "b", [(HERE.name, data)], {}, _keys())
    folder = _over(None, tmp_path / "b", _keys())
    assert folder.get(HERE) is None and folder.stats()["reasons"][f"refused: {EntryRefusal.FEATURES.value}"] == 1


def test_an_entry_under_another_name_is_refused(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", [(HERE.name, pack("another", BODY, [], _keys()))], {}, _keys())
    folder = _over(None, tmp_path / "b", _keys())
    assert folder.get(HERE) is None and folder.stats()["reasons"][f"refused: {EntryRefusal.REPLAYED.value}"] == 1


def test_who_holds_only_the_public_key_believes_and_cannot_sign(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "fleet.key")
    assert isinstance(pair, PrivateKey) and pair.secret.hex() not in repr(pair)
    public = read_public(tmp_path / "fleet.key.pub")
    assert public.name == pair.name == read_key(tmp_path / "fleet.key").name
    here = keys_for(tmp_path / "home", None, str(tmp_path))  # the folder of public keys
    made = pack("n", BODY, [b"x"], TrustedKeys(pair, (pair,)))
    assert unpack(made, "n", here, frozenset()) == (BODY, [b"x"])
    with pytest.raises(Refused) as e:
        unpack(made[:-1] + bytes([made[-1] ^ 1]), "n", here, frozenset())
    assert e.value.why is EntryRefusal.FORGED
    with pytest.raises(InputError):
        read_key(tmp_path / "fleet.key.pub")
    (tmp_path / "fleet.key.pub").chmod(0o666)
    with pytest.raises(InputError, match="not trusted"):
        keys_for(tmp_path / "home", None, str(tmp_path))


def test_no_damage_of_a_bundle_is_believed(tmp_path: Path) -> None:
    """Five hundred: bits turned, pieces cut off, put in, left out, headers written anew."""
    random.seed(11)
    keys = _keys()
    good = _bundle(tmp_path / "b", keys).read_bytes()
    path, opened = tmp_path / "bad", 0
    for i in range(500):
        bad = bytearray(good)
        match i % 5:
            case 0:
                bad[random.randrange(len(bad))] ^= 1 << random.randrange(8)
            case 1:
                del bad[random.randrange(len(bad)) :]
            case 2:
                at = random.randrange(len(bad))
                bad[at:at] = random.randbytes(random.randrange(1, 40))
            case 3:
                a, b = sorted(random.sample(range(len(bad)), 2))
                del bad[a:b]
            case _:
                head = json.dumps({"key": keys.own.name, "made": {}, "entries": {HERE.name: [random.randrange(-9, 99), 9, ""]},
                                   "bytes": 9}).encode()
                bad[8:12] = len(head).to_bytes(4, "little")
                bad[12 : 12 + len(head)] = head
        path.write_bytes(bad)
        found: Bundle | None = None
        try:
            found = open_bundle(path, keys)
        except Refused:
            continue
        folder = Folder(None, keys, 1 << 20, (found,))
        opened += 1
        assert folder.get(HERE) in (None, (BODY, [b"code" * 64]))
        if bytes(bad) != good:
            assert folder.stats()["refused"] or folder.get(HERE) is not None
    assert opened < 200  # damage of the entries themselves is found when they are read


@pytest.mark.parametrize(("how", "why"), [("cut", EntryRefusal.DAMAGED), ("foreign", EntryRefusal.FOREIGN)])
def test_a_model_starts_without_a_bundle_that_is_not_believed_and_says_so(tmp_path: Path, how: str, why: EntryRefusal) -> None:
    home = tmp_path / "home"
    keys = _keys(9) if how == "foreign" else keys_for(home, None)
    path = _bundle(tmp_path / "model.bundle", keys)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    settings = Settings(cache_dir=home, profiles=":memory:")
    with hotfuse.jit(torch.nn.ReLU(), artifacts=path, settings=settings) as fast:
        x = torch.randn(3)
        assert torch.equal(fast(x), x.relu())
        assert f"the bundle model.bundle was refused: {why.value}" in str(fast.explain(full=True))
        assert fast.stats()["cache"]["refused"] == 1 and fast.stats()["cache"]["bundles"] == []


def test_a_bundle_that_is_not_there_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no bundle at"):
        hotfuse.jit(torch.nn.ReLU(), artifacts=tmp_path / "none")
    assert cache_stats(Settings(cache_dir=tmp_path, cache="off")) == {"state": "switched off by the settings"}


def _run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(args))
    return done.exit_code, done.output


@pytest.mark.parametrize(("text", "said"), [
    ("{}", "list"), ("[]", "list"), ("[{]", "calls"), ('[{"sizes": 1}]', "sizes"), ('[{"calls": 0}]', "calls is 0"),
])  # fmt: skip
def test_traffic_that_cannot_be_understood_is_an_error_in_words(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "shapes.json").write_text(text)
    code, out = _run("build", "m.onnx", "--traffic", str(tmp_path / "shapes.json"), "-o", str(tmp_path / "b"))
    assert code == 2 and said in out and not (tmp_path / "b").exists()


@pytest.mark.parametrize(("options", "said"), [
    (["m:net", "--dim", "batch=2"], "no named dims"), (["m.onnx", "--dim", "batch"], "batch"),
    (["m:net", "--input", "2x16", "--traffic", "shapes.json"], "described twice"),
])  # fmt: skip
def test_options_that_describe_a_call_are_checked(tmp_path: Path, options: list[str], said: str) -> None:
    code, out = _run("build", *options, "-o", str(tmp_path / "b"))
    assert code == 2 and said in out and not (tmp_path / "b").exists()


def test_a_bundle_that_cannot_be_written_is_told_before_anything_is_built(tmp_path: Path) -> None:
    for out, said in ((tmp_path, "it is a folder"), (tmp_path / "none" / "b", "there is no folder")):
        code, text = _run("build", "m.onnx", "-o", str(out))
        assert code == 2 and said in text and "m.onnx" not in text
    code, text = _run("build", "m.onnx", "--traffic", str(tmp_path / "none.json"), "-o", str(tmp_path / "b"))
    assert code == 2 and "cannot be read" in text and '"dims"' in text
    code, text = _run("build", "m.onnx", "--key", str(tmp_path / "none.key"), "-o", str(tmp_path / "b"))
    assert code == 2 and "cannot be signed" in text and "none.key" in text.replace("\n", "") and "m.onnx" not in text


def test_what_a_model_raises_is_told_with_the_kind_of_call() -> None:
    with pytest.raises(InputError, match="no call of kind 2") as raised:
        _answered(lambda: torch.nn.Linear(4, 4)(torch.ones(2, 3)), 2)
    assert "RuntimeError: mat1 and mat2" in str(raised.value)


def test_a_call_is_described_as_in_other_commands() -> None:
    assert _given("m:net", ["2x16", "4:int64"], []) == CallKind({}, ["2x16", "4:int64"], 1)
    assert _given("m.onnx", ["x=0.5"], ["batch=3"]) == CallKind({"batch": "3"}, {"x": "0.5"}, 1)
    assert _given("m.onnx", [], []) == CallKind({}, None, 1)


def test_code_cannot_be_built_for_what_does_not_execute_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTFUSE_PROFILES", str(tmp_path / "p.sqlite"))
    code, out = _run("build", "m.onnx", "--for", "neon", "-o", str(tmp_path / "b"))
    assert code == 2 and ("does not execute neon" in out or "m.onnx" in out)
    code, out = _run("build", "m.onnx", "--for", "nobody", "-o", str(tmp_path / "b"))
    assert code == 2 and "no machine is called 'nobody'" in out


def test_a_pair_is_made_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTFUSE_CACHE_DIR", str(tmp_path / "home"))
    assert _run("keys", "--make-pair", str(tmp_path / "k"))[0] == 0 and (tmp_path / "k.pub").exists()
    monkeypatch.setenv("HOTFUSE_TRUSTED_KEYS", str(tmp_path / "k.pub"))
    code, out = _run("keys")
    assert code == 0 and "trusted" in out and _run("keys", "--make-pair", str(tmp_path / "k"))[0] == 2
