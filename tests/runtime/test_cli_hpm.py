"""What `hotfuse hpm` says of a calibration that was disturbed: scores without slow phases and as measured, and which is which."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hotfuse.cli import app
from hotfuse.compile import host as hosts
from hotfuse.compile.host import Host, this_host
from hotfuse.compile.learn import measure
from hotfuse.hpm import calibrate as rows
from hotfuse.hpm import model
from hotfuse.hpm.features import NAMES, derive
from hotfuse.hpm.row_cache import RowCache
from hotfuse.profile.store import Store
from tests.contract.test_hpm import AT, candidates, drawn

PROBLEMS, ROWS_OF_A_BATCH, SLOWER = 110, 60, 1.3


@pytest.fixture(autouse=True, scope="module")
def machine() -> Iterator[None]:
    """The same machine wherever this runs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hosts, "this_host", lambda *a, **k: replace(this_host(*a, **k), at=AT))
        yield


def fill(store: Store, *, slow: bool, batch_s: float = 2.0) -> Host:
    """A calibration whose times follow a law that features show; two phases of it at 1.3 times the time, if asked for."""
    host = hosts.this_host(store, measure_peaks=False)
    problems = drawn(PROBLEMS)
    found = candidates(problems)
    table = RowCache(measure.tile_of).rows(found)
    known = derive(table, host.at)
    seconds = known.roofline.seconds * (1.2 + 1.8 / (1 + np.exp(known.x[:, NAMES.index("compute")])))
    part = np.arange(len(found)) / len(found)
    if slow:
        seconds *= np.where(((part > 0.1) & (part < 0.3)) | (part > 0.8), SLOWER, 1.0)
    number = {id(p.graph): n for n, p in enumerate(problems)}
    names = [f"problem{number[id(c.graph)]}:{n}:way" for n, c in enumerate(found)]
    made = rows.measurements(names, table, seconds.tolist(), [0.01] * len(found), host.at.threads)
    batch = np.arange(len(found)) // ROWS_OF_A_BATCH
    store.record_measurements([replace(m, at=1.7e9 + batch_s * int(b)) for m, b in zip(made, batch, strict=True)], host.machine)
    assert rows.train(store, host.machine, host.at) is not None
    return host


def said(place: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["hpm", "--store", str(place), *options])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("disturbed") / "p.sqlite"
    with Store.open(place) as store:
        fill(store, slow=True)
    return place


def test_scores_of_a_disturbed_calibration_are_told_both_ways(disturbed: Path) -> None:
    found = json.loads(said(disturbed, "--json"))
    slow = found["slowed"]
    assert slow["corrected"] and 0.2 < slow["rows"] < 0.6 and slow["by"] == pytest.approx(SLOWER - 1, abs=0.1)
    assert found["held_out"]["mape"] < found["held_out_as_measured"]["mape"]
    assert found["interval"]["held"] >= model.KEPT - 0.05 and found["interval"]["held"] > found["interval"]["held_as_measured"]
    assert found["held_out"] == pytest.approx(found["trained"][-1]["held_out"]), "what training said of itself"


def test_the_text_names_the_phases_and_which_score_is_which(disturbed: Path) -> None:
    text, found = said(disturbed), json.loads(said(disturbed, "--json"))
    slow, interval = found["slowed"], found["interval"]
    told = f"{slow['rows']:.0%} of all rows were measured while the machine was slow, by about {slow['by']:.0%}: taken out of "
    assert told + "what is learned and judged, but for 'as measured'" in re.sub(r"\s+", " ", text)
    held = f"hold 80% of measurements hold {interval['held']:.0%} (as measured: {interval['held_as_measured']:.0%})"
    assert held in re.sub(r"\s+", " ", text)
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert f"{found['held_out']['mape']:.1%}" in lines["all"]
    assert f"{found['held_out_as_measured']['mape']:.1%}" in lines["all, as measured"]
    assert "older program" not in text


def test_a_version_that_knew_of_no_phases_is_named(disturbed: Path, tmp_path: Path) -> None:
    place = tmp_path / "p.sqlite"
    place.write_bytes(disturbed.read_bytes())
    with Store.open(place) as store:
        machine = this_host(store, measure_peaks=False).machine
        made = model.load(store, machine)
        assert made is not None
        model.save(store, replace(made, facts={k: v for k, v in made.facts.items() if k != "slowed"}), machine)
    assert "trained by an older program" in said(place)


def test_where_no_phase_is_told_there_is_one_score(tmp_path: Path) -> None:
    """All rows at one time, as those of another program's store may be: nothing is slower than anything near it."""
    place = tmp_path / "p.sqlite"
    with Store.open(place) as store:
        fill(store, slow=True, batch_s=0.0)
    text, found = said(place), json.loads(said(place, "--json"))
    assert found["slowed"]["rows"] == 0 and found["held_out"] == found["held_out_as_measured"]
    assert found["interval"]["held"] == found["interval"]["held_as_measured"]
    assert "as measured" not in text and "the machine was slow" not in text
