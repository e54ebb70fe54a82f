"""Where the profile store is: known without opening it, and without the library that would."""

from __future__ import annotations

from hotfuse.base.settings import Settings

FILE = "profiles.sqlite"


def location(settings: Settings) -> str:
    """Where the settings put the store: what they name, or a file in the cache folder."""
    return settings.profiles or str(settings.cache_dir.expanduser() / FILE)
