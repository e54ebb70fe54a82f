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


@pytest.mark.parametrize(("name", "given"), [("tiers", 1.5), ("threads", 2.0), ("cache_bytes", 1e9), ("watch", 0.5)])
def test_what_is_no_whole_number_is_refused(name: str, given: object) -> None:
    with pytest.raises(InputError, match=f"{name}=.* is no whole number"):
        Settings().with_(**{name: given})


@pytest.mark.parametrize(("name", "given"), [("threads", 0), ("race_s", -1.0), ("cache_bytes", -1), ("rtol", float("nan"))])
def test_what_is_too_small_is_refused(name: str, given: object) -> None:
    with pytest.raises(InputError, match=f"{name}=.* is too small"):
        Settings().with_(**{name: given})


@pytest.mark.parametrize("name", ["profiles", "cache", "cache_key", "trusted_keys", "artifacts"])
def test_places_are_text_or_paths(name: str) -> None:
    assert getattr(Settings().with_(**{name: Path("some/place")}), name) == "some/place"
    assert getattr(Settings().with_(**{name: None}), name) is None
    with pytest.raises(InputError, match=f"{name}=3 is no path"):
        Settings().with_(**{name: 3})


@pytest.mark.parametrize(("name", "given"), [("backend", None), ("backend", 3), ("cache_shared", 3)])
def test_what_is_no_text_is_refused(name: str, given: object) -> None:
    with pytest.raises(InputError, match=f"{name}=.* is no text"):
        Settings().with_(**{name: given})
