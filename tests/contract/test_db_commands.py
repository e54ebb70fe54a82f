"""`hotfuse db` on what a fleet learned: on a file and on a real PostgreSQL alike."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hotfuse.base.errors import InputError
from hotfuse.cli import app
from hotfuse.cli.build_bundle import _features
from hotfuse.machine.fingerprint import Fingerprint, fingerprint
from hotfuse.profile.rows import Measurement, SubgraphProfile
from hotfuse.profile.store import Store
from tests.postgres import new_database

OTHER = Fingerprint((("arch", "x86_64"), ("features", "avx")), (("cores", "64"), ("cpu", "another")))
NAME = f"{OTHER.key[:8]}-{OTHER.tuning_key[:8]}"


def _run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["db", *args])
    return done.exit_code, done.output


def _json(*args: str) -> Any:
    code, out = _run(*args, "--json")
    assert code == 0, out
    return json.loads(out)


def _profile(name: str, us: float, at: float = 0.0) -> SubgraphProfile:
    numbers = (us * 1e3, us * 1e3, us * 1e3, us * 1e3, 1.0, 1.0, 0.5)
    return SubgraphProfile(name, "linear gelu", "16x64", 1, 1, 10, *numbers, "memory", {"source": "derived"}, at)


def _filled(place: str) -> None:
    with Store.open(place) as store:
        for who, slow in ((fingerprint(), 1.0), (OTHER, 3.0)):
            machine = store.machine(who, {"rate": 1})
            store.record_subgraphs([_profile("aaaa", 10 * slow), _profile("bbbb", 99 * slow)], machine)
            store.record_measurements([Measurement("k", "gemm", {"n": 1.0}, "f32", 1, 5.0, 0.1, "serve")], machine)
            store.remember("arms", {"x": [1.0]}, machine)
        store.save_model("m", {"w": np.arange(4.0)}, {"error": 0.1}, machine)


@pytest.fixture(params=["file", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found = str(tmp_path / "p.sqlite") if request.param == "file" else new_database()
    _filled(found)
    return found


def test_machines_pieces_and_differences_are_shown(place: str) -> None:
    machines = _json("machines", "--store", place)
    assert {m["machine"] for m in machines} >= {NAME} and all(m["measurements"] == 1 for m in machines)
    top = _json("top", "--store", place, "--machine", NAME)
    assert [t["subgraph"] for t in top] == ["bbbb", "aaaa"] and top[0]["us"] == 297 and top[0]["bound"] == "memory"
    shown = _json("show", "bb", "--store", place)
    assert {s["p50_us"] for s in shown} == {99.0, 297.0} and shown[0]["evidence"] == {"source": "derived"}
    here = next(m["machine"] for m in machines if m["machine"] != NAME)
    assert [d["ratio"] for d in _json("diff", here, NAME, "--store", place)] == [3.0, 3.0]
    for args in (("machines",), ("top",), ("show", "aaaa"), ("diff", here, NAME)):
        assert _run(*args, "--store", place)[0] == 0
    code, out = _run("show", "nothing", "--store", place)
    assert code == 2 and "no piece is called" in out
    assert _run("top", "--store", place, "--machine", "nobody")[0] == 2
    code, out = _run("show", "", "--store", place)
    assert code == 2 and "names 2 pieces" in out


def test_a_machine_of_the_store_or_of_the_fleets_database_is_a_target(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTFUSE_PROFILES", place)
    assert _features(NAME[:6]) == (NAME, "avx")
    with Store.open(place) as store:
        store.machine(Fingerprint((("arch", "x86_64"), ("features", "avx")), (("cores", "8"),)))
        store.machine(Fingerprint((("arch", "aarch64"), ("features", "neon")), ()))
        far = next(m.name for m in store.machines() if m.identity["arch"] == "aarch64")
    assert _features(NAME[:8])[1] == "avx"  # several that execute the same are one target
    for name, said in (("nobody", f"knows .*{NAME}"), ("", "knows"), (far, "aarch64 machine")):
        with pytest.raises(InputError, match=said):
            _features(name)


def test_the_oldest_rows_leave(place: str) -> None:
    with Store.open(place) as store:
        machine = store.machine(OTHER)
        store.record_subgraphs([_profile("cccc", 1, time.time() - 10 * 86_400), _profile("dddd", 1)], machine)
    assert _json("prune", "--store", place, "--days", "5")["dropped"]["subgraph_profiles"] == 1
    assert _json("prune", "--store", place, "--keep", "1")["dropped"]["subgraph_profiles"] == 4


def test_what_is_exported_is_imported_once(place: str, tmp_path: Path) -> None:
    out, other = tmp_path / "rows.jsonl", tmp_path / "other.sqlite"
    assert _run("export", "--store", place, "--out", str(out))[0] == 0
    with Store.open(other) as store:
        store.machine(Fingerprint((("arch", "arm"),), ()))  # numbers of machines differ
    added = _json("import", str(out), "--store", str(other))["added"]
    assert added["subgraph_profiles"] == 4 and added["hpm_arrays"] == 1
    again = _json("import", str(out), "--store", str(other))["added"]
    assert set(again.values()) == {0}
    with Store.open(other) as store:
        machine = next(m.id for m in store.machines() if m.name == NAME)
        assert store.remembered("arms", machine) == {"x": [1.0]} and len(store.subgraphs()) == 4
        model = store.load_model("m", machine=machine)
        assert model is not None and model.arrays["w"].tolist() == [0, 1, 2, 3]
        assert all(p.origin in store.origins() for p in store.subgraphs())


def test_a_number_that_no_database_takes_is_an_error_in_words(place: str) -> None:
    code, out = _run("top", "--store", place, "--limit", "9" * 23)
    assert code == 2 and "--limit" in out, out


def test_an_import_begins_a_store_that_is_not_there(place: str, tmp_path: Path) -> None:
    out, new = tmp_path / "rows.jsonl", tmp_path / "new" / "profiles.sqlite"
    code, said = _run("import", str(out), "--store", str(new))
    assert code == 2 and "there is no file" in said and not new.exists()
    assert _run("export", "--store", place, "--out", str(out))[0] == 0
    assert _json("import", str(out), "--store", str(new))["added"]["subgraph_profiles"] == 4
    assert _run("machines", "--store", str(new))[0] == 0


@pytest.mark.parametrize("line", [
    "no json", "[]", '{"table": "measurements"}', '{"table": "pg_user", "row": {}}', '{"table": "decisions", "row": {"x": 1}}',
    '{"table": [], "row": {}}', '{"table": "drift", "row": {"id": 1e999}}', '{"table": "hpm_arrays", "row": {"data": "zz"}}',
    '{"table": "measurements", "row": {"id": 1, "threads": 99999999999999999999}}',
    '{"table": "measurements", "row": {"id": 1, "machine_id": 77}}', '{"table": "hpm_arrays", "row": {"id": 1, "model_id": 3}}',
])  # fmt: skip
def test_a_file_that_holds_something_else_is_an_error_in_words(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad").write_text(line + "\n")
    Store.open(tmp_path / "p.sqlite").close()
    code, out = _run("import", str(tmp_path / "bad"), "--store", str(tmp_path / "p.sqlite"))
    assert code == 2 and "line" in out, out
