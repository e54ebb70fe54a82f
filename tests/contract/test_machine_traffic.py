"""Memory traffic: counted by controllers as their files describe them, else derived from cache misses, and labelled so."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from hotfuse.machine.memory_traffic import LINE, Traffic, encoded, look, meters, of_misses


def device(root: Path, name: str, events: dict[str, str], formats: dict[str, str], cpumask: str = "0") -> None:
    for folder, files in (("events", events), ("format", formats)):
        (root / name / folder).mkdir(parents=True)
        for file, text in files.items():
            (root / name / folder / file).write_text(text + "\n")
    (root / name / "type").write_text("23\n")
    (root / name / "cpumask").write_text(cpumask + "\n")


INTEL = {
    "cas_count_read": "event=0x04,umask=0x03", "cas_count_read.scale": "6.103515625e-5", "cas_count_read.unit": "MiB",
    "cas_count_write": "event=0x04,umask=0x0c", "cas_count_write.scale": "6.103515625e-5", "cas_count_write.unit": "MiB",
}  # fmt: skip
WORDS = {"event": "config:0-7", "umask": "config:8-15"}


def test_controllers_are_found_by_what_the_system_says_of_them(tmp_path: Path) -> None:
    device(tmp_path, "uncore_imc_0", INTEL, WORDS, "4,20")
    device(tmp_path, "amd_umc_1", {}, {"event": "config:0-7", "rdwrmask": "config:8-9"})
    device(tmp_path, "uncore_cha_0", INTEL, WORDS)
    device(tmp_path, "uncore_imc_1", {"cas_count_read": "event=0x04,chmask=1"}, WORDS)
    (tmp_path / "uncore_imc_2").mkdir()
    found = {(m.device, m.writes): (m.number, m.cpu, m.bytes) for m in meters(tmp_path)}
    assert found == {
        ("uncore_imc_0", False): (0x0304, 4, 64.0), ("uncore_imc_0", True): (0x0C04, 4, 64.0),
        ("amd_umc_1", False): (0x010A, 0, 64.0), ("amd_umc_1", True): (0x020A, 0, 64.0),
    }  # fmt: skip


@pytest.mark.parametrize(("text", "number"), [("event=0x3", 3), ("event=0x100", None), ("event=?", None), ("other=1", None)])
def test_words_that_do_not_fit_are_no_events(tmp_path: Path, text: str, number: int | None) -> None:
    device(tmp_path, "uncore_imc_0", {}, WORDS)
    assert encoded(text, tmp_path / "uncore_imc_0" / "format") == number


class Fakes:
    """Counts in files, each as far as it is told."""

    def __init__(self, root: Path) -> None:
        self.root, self.opened, self.now = root, list[Path](), 0.0

    def open(self, kind: int, number: int, cpu: int) -> int:
        path = self.root / f"{len(self.opened)}"
        self.opened.append(path)
        self.count(path, 100)
        return os.open(path, os.O_RDONLY)

    def count(self, path: Path, value: int) -> None:
        path.write_bytes(struct.pack("=QQQ", value, 50, 25))  # counted half of the time

    def clock(self) -> float:
        return self.now


def test_traffic_is_what_all_controllers_counted_since_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(tmp_path, "uncore_imc_0", INTEL, WORDS)
    device(tmp_path, "uncore_imc_1", INTEL, WORDS)
    (tmp_path / "counts").mkdir()
    fakes = Fakes(tmp_path / "counts")
    monkeypatch.setattr("hotfuse.machine.memory_traffic.os.read", lambda file, n: os.pread(file, n, 0))
    traffic = Traffic(tmp_path, fakes.open, fakes.clock)
    for nth, path in enumerate(fakes.opened):
        fakes.count(path, 100 + 10 * (nth + 1))
    fakes.now = 2.0
    found = traffic.read()
    assert found is not None and traffic.controllers == ("uncore_imc_0", "uncore_imc_1") and not traffic.missing
    assert (found.read, found.written) == (2 * 64 * (10 + 30), 2 * 64 * (20 + 40)) and found.source == "counted"
    assert found.per_s == (found.read + found.written) / 2
    traffic.close()
    assert traffic.read() is None


def test_a_system_that_forbids_it_says_why_and_leaves_nothing_open(tmp_path: Path) -> None:
    device(tmp_path, "uncore_imc_0", INTEL, WORDS)
    (tmp_path / "counts").mkdir()
    fakes = Fakes(tmp_path / "counts")

    def some(kind: int, number: int, cpu: int) -> int:
        if fakes.opened:
            raise OSError(errno.EACCES, "no")
        return fakes.open(kind, number, cpu)

    traffic = Traffic(tmp_path, some)
    assert traffic.read() is None and "perf_event_paranoid" in traffic.missing and not traffic.controllers
    assert "no memory controller" in Traffic(tmp_path / "nothing").missing


def test_here_it_is_counted_or_says_why_not() -> None:
    found, why = look(0.001)
    assert (found is None) == bool(why)
    assert found is None or (found.source == "counted" and found.per_s >= 0)


def test_misses_of_a_thread_are_lines() -> None:
    found = of_misses(1000, 1e-3)
    assert found.per_s == 1000 * LINE / 1e-3 and found.source == "derived" and "cache misses" in found.of
