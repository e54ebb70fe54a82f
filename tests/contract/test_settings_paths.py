"""A folder for what is kept may be said as text; what cannot be meant is refused where it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotfuse import InputError, Settings


def test_a_folder_as_text_is_a_path() -> None:
    assert Settings(cache_dir="some/folder").cache_dir == Path("some/folder")  # pyright: ignore[reportArgumentType]
    assert Settings().with_(cache_dir="other").cache_dir == Path("other")
    assert Settings(cache_dir=Path("x")) == Settings(cache_dir="x")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("given", [None, 3, b"bytes"])
def test_what_is_no_path_is_refused(given: object) -> None:
    with pytest.raises(InputError, match="cache_dir=.* is no path"):
        Settings(cache_dir=given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["objective", "precision", "padding", "devices", "capture", "workers", "weights", "caches"])
@pytest.mark.parametrize("given", ["chosen", None, 1])
def test_a_choice_that_there_is_none_of_is_refused(name: str, given: object) -> None:
    with pytest.raises(InputError, match=f"{name}=.* is not among the choices"):
        Settings().with_(**{name: given})


@pytest.mark.parametrize(
    ("name", "given"), [("tiers", "1"), ("rtol", None), ("watch", "no"), ("threads", "all"), ("hot_calls", [3])]
)
def test_what_is_no_number_is_refused(name: str, given: object) -> None:
    with pytest.raises(InputError, match=f"{name}=.* is no number"):
        Settings().with_(**{name: given})
    assert Settings(threads=None, rtol=1, watch=True).rtol == 1
