"""The house can be extended in one place: no import cycles, small folders, one meaning a name, back ends behind a seam."""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hotfuse

ROOT = Path(hotfuse.__file__).parent
MAX_MODULES = 25
SEAM = {"hotfuse.backends.registry"}
"""Who may name a back end."""
pytestmark = pytest.mark.xdist_group("house")  # one process reads the sources, which takes seconds


def name(path: Path) -> str:
    return ".".join(("hotfuse", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@cache
def trees() -> dict[Path, ast.Module]:
    """Millions of objects without a cycle: the collector would look through them for longer than parsing takes."""
    gc.disable()
    try:
        return {p: ast.parse(p.read_text()) for p in sorted(ROOT.rglob("*.py"))}
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def no_trees_stay() -> Iterator[None]:
    yield
    trees.cache_clear()


@cache
def names() -> frozenset[str]:
    return frozenset(name(p) for p in trees())


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """All of them, wherever they stand; what is inside expressions, most of a tree, is not walked."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            for inner in getattr(node, name, ()) if not isinstance(node, ast.expr) else ():
                if isinstance(inner, ast.stmt):
                    yield inner
                left.append(inner)


def imports(tree: ast.Module) -> set[str]:
    """Every module of ours that a module imports, wherever in it: lazily and for types, too."""
    found: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {full if (full := f"{node.module}.{a.name}") in names() else node.module for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found & names()


@cache
def graph() -> dict[str, set[str]]:
    """Who imports whom."""
    return {name(p): imports(t) - {name(p)} for p, t in trees().items()}


def test_no_import_closes_a_cycle_not_even_a_lazy_one() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as e:
        pytest.fail(" <- ".join(e.args[1]))


def test_folders_are_small() -> None:
    folders = Counter(str(p.parent.relative_to(ROOT)) for p in trees() if p.name != "__init__.py")
    assert {f: n for f, n in folders.items() if n > MAX_MODULES} == {}


def test_a_class_name_is_one_thing() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name(path))
    assert {n: where for n, where in places.items() if len(where) > 1} == {}

SEVERAL_LEVELS = frozenset((
    "attention", "backend", "build", "calibrate", "contract", "control", "conv", "data_sizes",
    "device_peaks", "distinct_rows", "emit", "errors", "experts", "features", "folded_norm",
    "forks", "gemm", "growth", "idle", "index", "instrument", "loops",
    "model_guard", "movement", "nibbles", "norm", "packed", "packing", "placement", "pool", "quant",
    "recurrent", "reduce", "registry", "repeats", "resize", "skipping", "table", "text", "tiling",
    "traffic", "trial", "units", "varlen", "verify", "windows", "winograd", "work", "zero_rows",
))  # fmt: skip
"""Names that several modules have because they are about one subject at several levels (an operator's meaning in ONNX, its row, its
lowering; how a text is printed and parsed, of graphs and of programs), or the same part of several packages: their errors, their
table, their registry. One of another subject gets a name of its own."""


def test_a_module_name_is_one_subject() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in trees():
        if not path.name.startswith("__"):
            places[path.stem].append(name(path))
    twice = {n for n, where in places.items() if len(where) > 1}
    assert twice - SEVERAL_LEVELS == set() and SEVERAL_LEVELS - twice == set()


def test_a_docstring_is_a_sentence_of_its_own() -> None:
    """A reader may see it without the name or the neighbour that "Of one engine." or "The same for rows." would go on from."""
    fragments = re.compile(r"Of |The same( (of|for|by|with|on|after) |\.$)")
    found = [
        f"{name(path)}: {said}" for path, tree in trees().items() for node in statements(tree)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and (said := ast.get_docstring(node)) and fragments.match(said)
    ]  # fmt: skip
    assert found == []


@pytest.mark.parametrize("folder", ["llvm", "triton", "cuda"])
def test_only_the_registry_names_a_back_end(folder: str) -> None:
    inside = f"hotfuse.backends.{folder}"
    knows = {m for m, deps in graph().items() if not m.startswith(inside) and any(d.startswith(inside) for d in deps)}
    assert knows == SEAM


DOCUMENT = ROOT.parents[1] / "docs" / "architecture.md"


def test_the_architecture_names_modules_that_exist() -> None:
    """A module that is moved or renamed takes its mention along."""
    if not DOCUMENT.exists():
        pytest.skip("an installed package has no documents")
    tops = {n.split(".")[1] for n in names() if n.count(".") == 1}
    dotted = set(re.findall(r"`((?:[a-z_0-9]+\.)+[A-Za-z_0-9]+)`", DOCUMENT.read_text()))
    ours = {d for d in dotted if d.split(".")[0] in tops}

    def known(mention: str) -> bool:
        full = f"hotfuse.{mention}"
        parent, last = full.rsplit(".", 1)
        if full in names():
            return True
        while parent not in names():
            parent, last = parent.rsplit(".", 1)
        path = next(p for p in trees() if name(p) == parent)
        return re.search(rf"\b{last}\b", path.read_text()) is not None

    assert len(ours) > 100 and {d for d in ours if not known(d)} == set()


REPOSITORY = ROOT.parents[1]
PAGES = [p for p in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))) if p.exists()]
"""What readers are sent to; decisions and the change log are history, and may name what is gone."""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_names_files_that_exist(page: Path) -> None:
    """Links, and paths in backticks: of the repository or of the package, a name without ending or with a star included."""
    text = page.read_text()
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    gone = {link for link in links if link and not (page.parent / link).exists()}
    paths = set(re.findall(r"`([a-z_0-9]+(?:/[A-Za-z_0-9*.]+)+)`", text))
    ours = {p for p in paths if (REPOSITORY / p.split("/")[0]).exists() or (ROOT / p.split("/")[0]).exists()}
    gone |= {p for p in ours if not any([*at.glob(p), *at.glob(f"{p}.py")] for at in (REPOSITORY, ROOT))}
    assert gone == set()


def test_decisions_are_listed_once_and_links_between_them_hold() -> None:
    folder = REPOSITORY / "docs" / "decisions"
    if not folder.exists():
        pytest.skip("an installed package has no documents")
    files = {p.name for p in folder.glob("[0-9]*.md")}
    listed = re.findall(r"\]\(([0-9][^)#\s]*\.md)\)", (folder / "README.md").read_text())
    assert set(listed) == files and len(listed) == len(files)
    titles = dict(re.findall(r"\[(\d+\. .*?)\]\((\d{4}-[^)]*\.md)\)", (folder / "README.md").read_text()))
    assert {name: title for title, name in titles.items()} == {
        name: (folder / name).read_text().partition("\n")[0].removeprefix("# ") for name in files
    }
    numbers = {int(name.split("-")[0]) for name in files}
    assert len(numbers) == len(files), "one number, one decision"
    said = {int(n) for page in (DOCUMENT, *folder.glob("[0-9]*.md")) for n in re.findall(r"\bdecision (\d+)\b", page.read_text())}
    assert said - numbers == set()
