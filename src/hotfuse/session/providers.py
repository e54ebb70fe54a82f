"""Execution providers: there is one, the host's processor; asking for another is answered as ONNX Runtime answers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

from hotfuse.session.errors import WrongCall

CPU = "CPUExecutionProvider"
Provider = str | tuple[str, dict[Any, Any]]


def get_available_providers() -> list[str]:
    """The providers a session can use."""
    return [CPU]


def get_all_providers() -> list[str]:
    """The providers this package knows."""
    return [CPU]


def get_device() -> str:
    """The device sessions run on, in ONNX Runtime's words."""
    return "CPU"


def refused(providers: Sequence[Provider] | None, provider_options: Sequence[dict[Any, Any]] | None) -> dict[str, str]:
    """What was asked for and will not be used, with the reason; unavailable providers are also warned about."""
    if providers is None:
        return {}
    if not isinstance(providers, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WrongCall("'providers' should be a sequence.", because=f"it is a {type(providers).__name__}")
    wanted = [providers] if isinstance(providers, str) else list(providers)
    options = list(provider_options) if provider_options is not None else [{}] * len(wanted)
    ignored: dict[str, str] = {}
    if len(options) != len(wanted):
        text = "'providers' and 'provider_options' should be the same length if both are given."
        warnings.warn(text, stacklevel=4)
        ignored["provider_options"] = text
        options = [{}] * len(wanted)
    for entry, extra in zip(wanted, options, strict=True):
        name, own = _split(entry)
        if name != CPU:
            text = f"Specified provider '{name}' is not in available provider names. Available providers: '{CPU}'"
            warnings.warn(text, stacklevel=4)
            ignored[name] = "not available"
        for key, value in {**own, **extra}.items():
            ignored[f"{name}.{key}"] = str(value)
    return ignored


def _split(entry: object) -> tuple[str, dict[Any, Any]]:
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, tuple):
        parts = cast(tuple[Any, ...], entry)
        if len(parts) == 2 and isinstance(parts[0], str) and isinstance(parts[1], dict):
            return parts[0], cast(dict[Any, Any], parts[1])
    raise WrongCall("'providers' values must be either strings or (string, dict) tuples.", because=f"one is {entry!r}")
