"""A measurement in a process of its own, with a budget; whatever becomes of it is its record."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.model_rows import ROOT
from benchmarks.page.measurements import HOME_OF_ITS_OWN, OUT, Measurement, machine
from benchmarks.page.records import Figure, Outcome, PageRecord, Stamp
from benchmarks.side.turns import environment
from benchmarks.zoo.wheels import FOLDER_VARIABLE, zoo_folder

PACKAGES = ("torch", "onnxruntime", "openvino", "transformers")
SOURCES = ("src", "benchmarks", "examples", "pyproject.toml", "constraints.txt", "requirements-dev.txt")
"""What decides figures: changes elsewhere (this page, say) leave a commit what it is."""


class ChangedSources(Exception):
    """Sources that no commit has."""


def stamp(*, dirty_allowed: bool, root: Path = ROOT) -> Stamp:
    """What this tree, machine and environment are; raises ChangedSources where sources are not those of a commit."""
    changed = _git(root, "status", "--porcelain", "--untracked-files=normal", "--", *SOURCES)
    if changed and not dirty_allowed:
        several = changed.splitlines()
        raise ChangedSources(f"{len(several)} changed files, {several[0].strip()} for one: commit them, or ask for --dirty, and "
                             "the page will say so")  # fmt: skip
    return Stamp(_git(root, "rev-parse", "HEAD"), bool(changed), machine(), len(os.sched_getaffinity(0)), _versions())


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout.strip()


def _versions() -> dict[str, str]:
    found = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def measure(row: Measurement, of: Stamp) -> PageRecord:
    """Run its command; figures, or why there are none."""
    begun, date = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%d")
    with tempfile.TemporaryDirectory(prefix="hotfuse-page-") as folder:
        out = Path(folder) / "document.json"
        filled = [a.replace(OUT, str(out)).replace("{folder}", folder) for a in row.arguments]
        command = [sys.executable, "-m", f"benchmarks.{filled[0]}", *filled[1:]]
        outcome, text = _ended(command, _environment(row, Path(folder)), row.budget_s)
        if outcome == "ok" and OUT in row.arguments:
            outcome, text = ("ok", out.read_text(encoding="utf-8")) if out.exists() else ("failed", "it wrote no document")
    figures: tuple[Figure, ...] = ()
    if outcome == "ok":
        try:
            figures, text = tuple(row.read(row.document(text))), ""
        except (KeyError, ValueError, TypeError) as e:  # what it wrote is not what a document of it looks like, or has no figures
            outcome, text = "failed", f"{type(e).__name__}: {e}"
    return PageRecord(row.name, row.command, of, row.threads, date, round(time.monotonic() - begun, 1), outcome, text, figures)


def _environment(row: Measurement, folder: Path) -> dict[str, str]:
    """Of one thread or several; nothing that earlier processes compiled, and the same model files."""
    several = environment(row.threads, folder)
    if row.arguments[0] in HOME_OF_ITS_OWN:
        for name in ("HOTFUSE_PROFILES", "HOTFUSE_CACHE"):
            several.pop(name, None)
    return {**several, FOLDER_VARIABLE: str(zoo_folder())}


def _ended(command: list[str], env: dict[str, str], budget_s: float) -> tuple[Outcome, str]:
    """Its standard output; or the last line of what it said when it failed. All of its processes end with it."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            status = process.wait(budget_s)
        except subprocess.TimeoutExpired:
            return "late", f"not done after {budget_s:g} s"
        finally:
            _end_all(process)
        for file in (out, err):
            file.seek(0)
        if status:
            said = err.read().strip().splitlines()
            return "failed", f"status {status}: {said[-1][:200] if said else 'no word'}"
        return "ok", out.read()


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """The process and those that it began: they have a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
