"""Where the profile store is: known without opening it, and without the library that would."""

from __future__ import annotations

import hashlib

from hotfuse.base.settings import Settings

FILE = "profiles.sqlite"
AWAY = "away: "
"""How the state of a server's database begins while it cannot be used."""

SERVERS = ("postgresql://", "postgresql+psycopg://", "postgres://")


def location(settings: Settings) -> str:
    """Where the settings put the store: what they name, or a file in the cache folder. What is meant for a server's database is
    written to a file there first, and sent from it (`profile.exchange`)."""
    folder = settings.folder
    if (url := central(settings)) is not None:
        return str(folder / f"profiles-{hashlib.sha256(url.encode()).hexdigest()[:12]}.sqlite")
    return settings.profiles or str(folder / FILE)


def central(settings: Settings) -> str | None:
    """The server's database that the settings name, if they do."""
    named = settings.profiles
    return named.replace("postgres://", "postgresql://", 1) if named is not None and named.startswith(SERVERS) else None
