"""`hotfuse db` and the limits in `hotfuse doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotfuse.base.settings import Settings
from hotfuse.cli import app
from hotfuse.cli.machine_limits import limits, show_limits
from hotfuse.machine.fingerprint import Fingerprint
from hotfuse.machine.peaks import Bandwidth, ForkCost, MachinePeaks, Rate
from hotfuse.profile.rows import Measurement
from hotfuse.profile.store import Store
from hotfuse.profile.store_schema import STEPS

WHO = Fingerprint((("arch", "x"),), (("cores", "2"),))
PEAKS = MachinePeaks(
    "avx2",
    (Rate("f32", 1, 1e11, 0.01),),
    (Bandwidth("L2", "read", 1, 5e10, 0.02, 1024),),
    (ForkCost(2, 900.0, 60000.0),),
    80.0,
    1.0,
    1.0,
)


def invoke(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["db", *args])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("HOTFUSE_PROFILES", raising=False)
    place = tmp_path / "profiles.sqlite"
    with Store.open(place) as store:
        store.machine(WHO, PEAKS.to_dict())
        store.record_measurements(
            [Measurement("k", "gemm", {"n": float(i)}, "f32", 1, 1.0, 0.0, "serve", 1.0 + i) for i in range(2000)]
        )
    return place


def test_info(path: Path) -> None:
    code, text, _ = invoke("info", "--json")
    found = json.loads(text)
    assert code == 0 and found["path"] == str(path) and found["rows"]["measurements"] == 2000 and found["version"] == len(STEPS)
    code, text, _ = invoke("info", "--store", f"sqlite:///{path}")
    assert code == 0 and "measurements        2000" in text and "wal" in text


@pytest.mark.parametrize("command", ["machines", "top", "prune", "info", "export"])
def test_a_file_that_is_no_store_is_left_as_it_is(path: Path, command: str) -> None:
    """It may be somebody's model, given by mistake."""
    other = path.with_name("model.onnx")
    other.write_bytes(b"something else" * 100)
    for place in (str(other), f"sqlite:///{other}"):
        code, text, said = invoke(command, "--store", place)
        assert code == 2 and not text and "is no profile store, or a damaged one" in said
    assert other.read_bytes() == b"something else" * 100 and not list(path.parent.glob("model.onnx.*"))


def test_vacuum(path: Path) -> None:
    code, text, _ = invoke("vacuum", "--keep", "100", "--json")
    found = json.loads(text)
    assert code == 0 and found["dropped"]["measurements"] == 1900 and found["bytes_after"] < found["bytes_before"]
    assert len(Store.open(path).measurements()) == 100
    assert "before" in invoke("vacuum")[1]


def test_export(path: Path, tmp_path: Path) -> None:
    code, text, _ = invoke("export")
    lines = [json.loads(line) for line in text.splitlines()]
    assert code == 0 and len(lines) == 2002 and [d["table"] for d in lines[:2]] == ["origins", "machines"]
    assert lines[-1]["row"]["family"] == "gemm"
    out = tmp_path / "all.jsonl"
    assert invoke("export", "--out", str(out))[0] == 0 and out.read_text() == text
    code, _, error = invoke("export", "--out", str(tmp_path))
    assert code == 2 and "cannot be written" in error


def test_looking_begins_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTFUSE_CACHE_DIR", str(tmp_path))
    for command in ("info", "vacuum", "export"):
        code, _, error = invoke(command)
        assert code == 2 and "there is no profile store" in error
    found = limits(Settings(cache_dir=tmp_path), WHO, measure=False)
    assert found.peaks is None and "--peaks" in found.peaks_note
    assert list(tmp_path.iterdir()) == []


def test_limits_are_kept_and_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = limits(Settings(cache_dir=path.parent), WHO, measure=False)
    assert found.peaks == PEAKS and "earlier" in found.peaks_note and found.to_dict()["peaks"] == PEAKS.to_dict()
    show_limits(found)
    text = capsys.readouterr().out
    for part in ("100.0 Gop/s", "50.0 GB/s", "0.90 us", "80 ns", "task_clock_ns", "profile store", "2000 measurements"):
        assert part in text
    other = limits(Settings(cache_dir=path.parent), Fingerprint(WHO.identity, (("cores", "9"),)), measure=False)
    assert other.peaks is None
    with Store.open(path) as store:
        store.machine(WHO, {"target": 1})
    assert "cannot be read" in limits(Settings(cache_dir=path.parent), WHO, measure=False).peaks_note


def test_limits_can_be_measured_now(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotfuse.backends.llvm import peak_kernels as measuring

    monkeypatch.setattr(measuring, "measure", lambda _threads: PEAKS)
    who = Fingerprint(WHO.identity, (("cores", "3"),))
    assert limits(Settings(cache_dir=path.parent), who, measure=True).peaks_note == "measured now"
    assert limits(Settings(cache_dir=path.parent), who, measure=False).peaks == PEAKS
