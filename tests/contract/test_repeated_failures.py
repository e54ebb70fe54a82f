"""What fails beside others runs again alone: chance passes and is named, a defect fails again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "repeat_failed.py"
SUITE = """
from pathlib import Path

def test_once():
    seen = Path("mark").exists()
    Path("mark").touch()
    assert seen

def test_always():
    assert not Path("defect").exists()
"""


def repeated(where: Path) -> subprocess.CompletedProcess[str]:
    (where / "test_some.py").write_text(SUITE)
    first = subprocess.run([sys.executable, "-m", "pytest", "-q", "test_some.py"], cwd=where, capture_output=True, check=False)
    assert first.returncode == 1
    return subprocess.run([sys.executable, str(TOOL)], cwd=where, capture_output=True, text=True, check=False)


def test_chance_passes_and_is_named(tmp_path: Path) -> None:
    done = repeated(tmp_path)
    assert done.returncode == 0 and "UNSTEADY" in done.stdout and "test_some.py::test_once" in done.stdout, done.stdout
    assert "test_always" not in done.stdout.split("UNSTEADY")[1]


def test_a_defect_fails_again(tmp_path: Path) -> None:
    (tmp_path / "defect").touch()
    done = repeated(tmp_path)
    assert done.returncode == 1 and "UNSTEADY" not in done.stdout, done.stdout


def test_nothing_noted_is_no_success(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(TOOL)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "0 failed tests" in done.stdout
