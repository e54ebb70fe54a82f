"""`hotfuse show --stage kernels|tile|llvm|asm`: every kernel can be seen, also where several have one name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hotfuse.base.errors import InputError
from hotfuse.cli import app, kernels
from hotfuse.lower.cpu.group import lower_group
from hotfuse.tile.text import parse, show
from tests.contract.lowering import group_of


def kernel_of(width: int) -> str:
    """A kernel for rows of some width; all have one name."""
    group = group_of(lambda x: torch.relu(x) + 1, [torch.ones(3, width)])
    text = show(lower_group(group.graph).kernel)
    name = parse(text).name
    return text.replace(f"kernel {name}(", "kernel relu_add(", 1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the worker answers: two kernels of one name, and a node for the library."""
    texts = [kernel_of(16), kernel_of(40)]
    about = {"ops": "relu+add", "compile_s": 0.01, "kernel_us": 1.0, "library_us": 2.0}
    header = {"kernels": [{"kernel": t, **about} for t in texts], "parts": [[0, 2, 0], [2, 3, -1], [3, 5, 1]], "branches": {},
              "notes": ["sort stays with the library"]}  # fmt: skip
    monkeypatch.setattr(kernels, "_made", lambda *_a: header)
    return texts


def shown(capsys: pytest.CaptureFixture[str], stage: str, wanted: str = "") -> Any:
    kernels.show_kernels(None, [], stage, wanted, as_json=True)  # type: ignore[arg-type]
    return json.loads(capsys.readouterr().out)["kernels"]


@pytest.mark.parametrize(("stage", "sign"), [("tile", "kernel relu_add("), ("llvm", "define "), ("asm", "relu_add:")])
def test_kernels_of_one_name_are_all_shown(made: list[str], capsys: pytest.CaptureFixture[str], stage: str, sign: str) -> None:
    both = shown(capsys, stage)
    assert [(k["number"], k["name"], k["ops"]) for k in both] == [(0, "relu_add", "relu+add"), (1, "relu_add", "relu+add")]
    assert all(sign in k["text"] for k in both) and both[0]["text"] != both[1]["text"]
    assert shown(capsys, stage, "relu") == both
    assert shown(capsys, stage, "1") == both[1:], "by its number"
    kernels.show_kernels(None, [], stage, "", as_json=False)  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "kernel 0, relu_add: relu+add\n" in said and "kernel 1, relu_add: relu+add\n" in said


def test_tile_text_is_what_runs(made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert [show(parse(k["text"])) for k in shown(capsys, "tile")] == made


def test_the_table_numbers_them(made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert [(k["number"], k["uses"]) for k in shown(capsys, "kernels")] == [(0, 1), (1, 1)]
    kernels.show_kernels(None, [], "kernels", "", as_json=False)  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "2 kernels; 1 nodes stay with the library" in said and "# sort stays with the library" in said


def test_what_is_not_there_names_what_is(made: list[str]) -> None:
    with pytest.raises(InputError, match="there is no kernel number 7"):
        kernels.show_kernels(None, [], "tile", "7", as_json=False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'gelu' in its name") as found:
        kernels.show_kernels(None, [], "tile", "gelu", as_json=False)  # type: ignore[arg-type]
    assert found.value.hint == "0 relu_add, 1 relu_add"


def test_a_graph_without_kernels_says_where_the_reasons_are(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    header = kernels._made(None, [])  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "_made", lambda *_a: {**header, "kernels": [], "parts": [[0, 5, -1]]})
    for wanted in ("", "gelu", "0"):
        with pytest.raises(InputError, match="no part of the graph has a kernel") as found:
            kernels.show_kernels(None, [], "llvm", wanted, as_json=False)  # type: ignore[arg-type]
        assert "--stage kernels" in (found.value.hint or "")


def test_the_command_says_how(made: list[str]) -> None:
    done = CliRunner().invoke(app, ["show", "--help"], terminal_width=200)
    assert done.exit_code == 0 and "number" in done.stdout
