"""A feature is believed only after it ran: a trapping one must be found out, and must not hurt us."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hotfuse.base.errors import InternalError
from hotfuse.machine import probe as probe_module
from hotfuse.machine.cpu_features import Feature, known_features
from hotfuse.machine.fingerprint import fingerprint, make_fingerprint
from hotfuse.machine.probe import advertised_flags, features, probe, usable_features
from hotfuse.machine.topology import parse_cpu_list, parse_size, topology

X86 = platform.machine() in ("x86_64", "AMD64")
needs_x86_linux = pytest.mark.skipif(not (X86 and sys.platform == "linux"), reason="x86 machine code on Linux")

RETURN = bytes.fromhex("b85a000000c3")
TRAP = Feature("trap", "trap", bytes.fromhex("0f0b"))  # ud2
FINE = Feature("fine", "fine", RETURN)
SEGFAULT = Feature("segfault", "segfault", bytes.fromhex("31c08b00") + RETURN)  # xor eax, eax; mov eax, [rax]
WRONG = Feature("wrong", "wrong", bytes.fromhex("b801000000c3"))  # returns 1


@needs_x86_linux
def test_a_trapping_feature_is_found_out_and_the_parent_survives() -> None:
    flags = frozenset({"trap", "fine", "segfault", "wrong"})
    trap, fine, segfault, wrong = probe([TRAP, FINE, SEGFAULT, WRONG], flags)
    assert (trap.executes, trap.detail, trap.usable) == (False, "killed by SIGILL", False)
    assert (segfault.executes, segfault.detail) == (False, "killed by SIGSEGV")
    assert (wrong.executes, wrong.detail) == (False, "returned 1")
    # A trial after the trap still ran: each had a process of its own.
    assert (fine.executes, fine.detail, fine.usable) == (True, "ran", True)


@needs_x86_linux
def test_code_that_runs_without_being_advertised_is_not_usable() -> None:
    (fine,) = probe([FINE], frozenset())
    assert fine.executes and not fine.advertised and not fine.usable


@needs_x86_linux
def test_what_a_compiler_could_use_here_is_not_refused() -> None:
    """The probe may believe less than is advertised, but SSE4.2 runs wherever it is advertised."""
    found = {p.name: p for p in features()}
    assert found["sse4.2"].usable == found["sse4.2"].advertised


def test_every_feature_of_this_machine_is_reported_with_a_reason() -> None:
    report = features()
    assert [p.name for p in report] == [f.name for f in known_features()]
    assert all(p.detail for p in report)
    assert usable_features() == {p.name for p in report if p.advertised and p.executes}


def test_feature_tables_have_unique_names_and_end_in_a_return() -> None:
    for machine, end in (("x86_64", "c3"), ("aarch64", "c0035fd6")):
        table = known_features(machine)
        assert len({f.name for f in table}) == len(table) > 5
        assert all(f.code.hex().endswith(end) for f in table)
    assert known_features("vax") == ()


def test_flags_are_read_from_either_spelling() -> None:
    assert advertised_flags("processor : 0\nflags\t\t: fpu avx2 amx_tile\n") == {"fpu", "avx2", "amx_tile"}
    assert advertised_flags("Features\t: fp asimd sve\n") == {"fp", "asimd", "sve"}
    assert advertised_flags("") == frozenset()


@pytest.mark.skipif(sys.platform != "linux", reason="probing needs Linux")
def test_a_broken_probe_process_is_our_error_not_a_guess(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "probe_child.py"
    broken.write_text("raise SystemExit('broken')")
    monkeypatch.setattr(probe_module, "_TRIAL", broken)
    with pytest.raises(InternalError, match="probe's process failed"):
        probe([FINE], frozenset())


def make_machine(root: Path) -> None:
    """A made-up machine: 4 logical CPUs on 2 cores, one cache, half a CPU of quota, 1 GiB limit of 8."""
    for cpu in range(4):
        top = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        top.mkdir(parents=True)
        (top / "physical_package_id").write_text("0\n")
        (top / "core_id").write_text(f"{cpu // 2}\n")
    cache = root / "sys/devices/system/cpu/cpu0/cache/index0"
    cache.mkdir(parents=True)
    facts = {"level": "1", "type": "Data", "size": "48K", "coherency_line_size": "64", "shared_cpu_list": "0-1"}
    for name, text in facts.items():
        (cache / name).write_text(text + "\n")
    (root / "sys/devices/system/node/node0").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    (root / "sys/fs/cgroup/memory.max").write_text(f"{1 << 30}\n")
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal:        8388608 kB\nMemFree: 1 kB\n")
    (root / "proc/cpuinfo").write_text("processor : 0\nmodel name\t: Test CPU 9000\n")


def test_topology_of_a_made_up_machine(tmp_path: Path) -> None:
    make_machine(tmp_path)
    top = topology(tmp_path / "sys", tmp_path / "proc")
    assert (top.cpu, top.physical_cores, top.packages, top.numa_nodes) == ("Test CPU 9000", 2, 1, 1)
    assert (top.cpu_quota, top.memory_bytes, top.memory_limit_bytes) == (0.5, 8 << 30, 1 << 30)
    (cache,) = top.caches
    assert (cache.level, cache.kind, cache.bytes, cache.line, cache.shared_by) == (1, "data", 48 << 10, 64, 2)


def test_topology_where_the_system_says_nothing(tmp_path: Path) -> None:
    top = topology(tmp_path, tmp_path)
    assert top.caches == () and top.memory_bytes is None and top.cpu_quota is None and top.logical_cpus >= 1


def test_small_parsers() -> None:
    assert parse_size("48K") == 49152 and parse_size("33M") == 33 << 20 and parse_size("7") == 7
    assert parse_cpu_list("0-3,8") == (0, 1, 2, 3, 8) and parse_cpu_list("5") == (5,) and parse_cpu_list("") == ()


def test_identity_ignores_what_a_reboot_or_a_container_changes_and_tuning_does_not() -> None:
    top, usable = topology(), frozenset({"avx2", "fma"})
    base = make_fingerprint(top, usable)
    rebooted = make_fingerprint(replace(top, kernel="9.9", usable_cpus=1, memory_limit_bytes=1 << 30), usable)
    assert rebooted.key == base.key
    assert rebooted.tuning_key != base.tuning_key or top.usable_cpus == 1
    assert make_fingerprint(replace(top, kernel="9.9"), usable) == base
    assert make_fingerprint(top, usable | {"avx512f"}).key != base.key
    assert make_fingerprint(replace(top, arch="other"), usable).key != base.key
    assert fingerprint() == fingerprint()
