"""The fleet of the examples, small: what one server compiled, others serve without compiling it, and all answers are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.postgres import new_database


def test_what_one_server_compiled_the_others_do_not_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples.fleet.__main__ import main

    found = main(["--tiny", "--out", str(tmp_path / "page.html"), "--database", new_database()])
    assert len(found) == 8 and all(row["worst"] < 1e-4 for row in found), found
    first, *others = found[:4]
    assert first["units_compiled"] > 0 and first["compiled_after_s"] is not None, found
    for row in others:
        assert row["units_compiled"] == 0 and row["from_shared"] > 0 and row["compiled_after_s"] is not None, found
    assert "new replica" in (tmp_path / "page.html").read_text() and "rows in the database" in capsys.readouterr().out
