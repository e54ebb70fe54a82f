"""Execution providers: the host's processor, and a CUDA device where torch has one. Others are answered as ONNX Runtime answers.

Those asked for are taken in their order, and the host follows them all. A provider that is not there is warned about and passed
over; a device that is not there, of a provider that is, is the caller's error.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import field
from typing import Any, cast

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.session.ort_errors import InvalidArgument, WrongCall

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
Provider = str | tuple[str, dict[Any, Any]]


def devices() -> int:
    """CUDA devices that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def get_available_providers() -> list[str]:
    """The providers a session can use, the fastest first."""
    return [CUDA, CPU] if devices() else [CPU]


def get_all_providers() -> list[str]:
    """The providers this package knows."""
    return [CUDA, CPU]


def get_device() -> str:
    """The device sessions can run on, in ONNX Runtime's words."""
    return "GPU" if devices() else "CPU"


@dataclass(frozen=True, slots=True)
class ResolvedProviders:
    """What a session runs on, of what was asked for."""

    names: tuple[str, ...] = (CPU,)
    """In their order; the host's is always among them."""
    device: torch.device | None = None
    """None is the host."""
    ignored: dict[str, str] = field(default_factory=dict[str, str])
    """What was asked for and has no effect, with the reason."""

    def options(self) -> dict[str, dict[str, str]]:
        """The options in use, as ONNX Runtime tells them."""
        at = {} if self.device is None else {"device_id": str(self.device.index)}
        return {name: at if name == CUDA else {} for name in self.names}


def resolve(providers: Sequence[Provider] | None, provider_options: Sequence[dict[Any, Any]] | None) -> ResolvedProviders:
    """What is used of what was asked for; providers that are not available are also warned about."""
    if providers is None:
        return ResolvedProviders()
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
    asked = [_split(entry) for entry in wanted]
    available = get_available_providers() if any(name != CPU for name, _ in asked) else [CPU]
    names: list[str] = []
    device: torch.device | None = None
    for (name, own), extra in zip(asked, options, strict=True):
        given = {**own, **extra}
        if name not in available:
            text = f"Specified provider '{name}' is not in available provider names. Available providers: '{', '.join(available)}'"
            warnings.warn(text, stacklevel=4)
            ignored[name] = "not available"
        elif name == CUDA and CPU not in names:  # behind the host nothing would be left for it
            device = _device(given.pop("device_id", 0))
        if name in available and name not in names:
            names.append(name)
        for key, value in given.items():
            ignored[f"{name}.{key}"] = str(value)
    return ResolvedProviders((CPU,) if device is None else (CUDA, CPU), device, ignored)


def _device(number: object) -> torch.device:
    try:
        index = int(cast(Any, number))
    except (TypeError, ValueError) as e:
        raise InvalidArgument(f"device_id {number!r} is not a number") from e
    if not 0 <= index < (there := devices()):
        raise InvalidArgument(f"there is no CUDA device {index}", because=f"torch sees {there} of them",
                              hint=f"device_id from 0 to {there - 1}")  # fmt: skip
    return torch.device("cuda", index)


def _split(entry: object) -> tuple[str, dict[Any, Any]]:
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, tuple):
        parts = cast(tuple[Any, ...], entry)
        if len(parts) == 2 and isinstance(parts[0], str) and isinstance(parts[1], dict):
            return parts[0], cast(dict[Any, Any], parts[1])
    raise WrongCall("'providers' values must be either strings or (string, dict) tuples.", because=f"one is {entry!r}")
