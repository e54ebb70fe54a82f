"""What a clean clone installs: every requirement has one exact version, and pips get shares of the list that are about equal."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import install

ROOT = Path(__file__).resolve().parents[2]


def pinned(path: Path) -> dict[str, str]:
    """Versions by name, as a file of pip's has them."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", path.read_text(), re.MULTILINE)
    assert len({canonicalize_name(n) for n, _ in found}) == len(found), f"{path.name} names something twice"
    return {canonicalize_name(n): version for n, version in found}


def test_what_the_project_asks_for_has_one_exact_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dev, others = pinned(install.VERSIONS), pinned(ROOT / "constraints.txt")
    assert not dev.keys() & others.keys() and "-c requirements-dev.txt" in (ROOT / "constraints.txt").read_text().splitlines()
    extras, every = project["optional-dependencies"], dev | others
    for asked, versions in (([*project["dependencies"], *extras["dev"]], dev), ([*extras["bench"], *extras["peers"]], every)):
        for requirement in map(Requirement, asked):
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), str(requirement)


@pytest.mark.parametrize("shares", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 101])
def test_every_line_is_in_one_share(count: int, shares: int) -> None:
    lines = [str(i) for i in range(count)]
    dealt = install.dealt(lines, shares)
    assert sorted((line for share in dealt for line in share), key=int) == lines
    assert all(dealt) and len(dealt) == min(count, shares)
    assert max(map(len, dealt), default=0) - min(map(len, dealt), default=0) <= 1


def test_large_and_small_wheels_are_in_every_share() -> None:
    sizes = [665, 637, 188, 171, 152, 108, 64, 61, 54, 49]
    dealt = install.dealt([str(n) for n in sizes], 2)
    one, two = (sum(map(int, share)) for share in dealt)
    assert abs(one - two) < 0.1 * sum(sizes)
