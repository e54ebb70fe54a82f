"""`SessionOptions` and `RunOptions`: every option of ONNX Runtime is accepted, and what has no effect is said.

Thread count, log level and free-dimension overrides are honoured. The rest steer machinery Hotfuse does not have
(memory arenas, graph optimization levels, ...); a session records each one that was changed as an ignored option.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from hotfuse.session.ort_errors import Unavailable, UnsupportedFeed, WrongCall


class GraphOptimizationLevel(IntEnum):
    """ONNX Runtime's levels; Hotfuse decides by measurement instead."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Whether independent nodes run at the same time in ONNX Runtime."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(IntEnum):
    """The order of nodes in ONNX Runtime."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


_LOG_FIELDS: dict[str, Any] = {"log_severity_level": -1, "log_verbosity_level": 0, "logid": ""}
_SESSION_FIELDS: dict[str, Any] = {
    **_LOG_FIELDS,
    "enable_cpu_mem_arena": True,
    "enable_mem_pattern": True,
    "enable_mem_reuse": True,
    "enable_profiling": False,
    "execution_mode": ExecutionMode.ORT_SEQUENTIAL,
    "execution_order": ExecutionOrder.DEFAULT,
    "graph_optimization_level": GraphOptimizationLevel.ORT_ENABLE_ALL,
    "inter_op_num_threads": 0,
    "intra_op_num_threads": 0,
    "optimized_model_filepath": "",
    "profile_file_prefix": "onnxruntime_profile_",
    "use_deterministic_compute": False,
    "use_per_session_threads": True,
}
_HONOURED = frozenset({"intra_op_num_threads", "log_severity_level", "log_verbosity_level", "logid"})
_RUN_FIELDS: dict[str, Any] = {**_LOG_FIELDS, "only_execute_path_to_fetches": False, "terminate": False}

_default_severity = 2
_severity_lock = threading.Lock()


def set_default_logger_severity(severity: int) -> None:
    """The log level of sessions whose options leave it open; 0 is verbose, 4 only what is fatal."""
    global _default_severity
    check_severity(severity)
    with _severity_lock:
        _default_severity = severity


def check_severity(severity: int) -> None:
    """Refuse what is no log level, as ONNX Runtime does."""
    if not 0 <= severity <= 4:
        raise UnsupportedFeed(
            f"Invalid session log severity level. Not a valid severity value: {severity}", hint="a number from 0 to 4"
        )


class _Options:
    """Named fields with fixed types; a misspelt name is an error, not a new attribute."""

    _fields: Mapping[str, Any] = {}

    def __init__(self) -> None:
        for name, default in self._fields.items():
            object.__setattr__(self, name, default)
        object.__setattr__(self, "_config", dict[str, str]())

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._fields:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        kind = type(self._fields[name])
        allowed = str if kind is str else int
        try:
            if not isinstance(value, allowed) and not (allowed is int and hasattr(value, "__index__")):
                raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
            object.__setattr__(self, name, kind(value))
        except (TypeError, ValueError) as e:
            raise WrongCall(f"{type(self).__name__}.{name} cannot be {value!r}", because=str(e)) from e

    def _add_config(self, key: str, value: str) -> None:
        config: dict[str, str] = getattr(self, "_config")  # noqa: B009
        config[str(key)] = str(value)

    def _get_config(self, key: str, what: str) -> str:
        config: dict[str, str] = getattr(self, "_config")  # noqa: B009
        if key not in config:
            raise UnsupportedFeed(f"{what} does not have configuration with key: {key}")
        return config[key]


class SessionOptions(_Options):
    """ONNX Runtime's session options."""

    _fields = _SESSION_FIELDS

    log_severity_level: int
    log_verbosity_level: int
    logid: str
    enable_cpu_mem_arena: bool
    enable_mem_pattern: bool
    enable_mem_reuse: bool
    enable_profiling: bool
    execution_mode: ExecutionMode
    execution_order: ExecutionOrder
    graph_optimization_level: GraphOptimizationLevel
    inter_op_num_threads: int
    intra_op_num_threads: int
    optimized_model_filepath: str
    profile_file_prefix: str
    use_deterministic_compute: bool
    use_per_session_threads: bool

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "_free_dims", dict[str, int]())

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Keep a configuration string; none has an effect."""
        self._add_config(key, value)

    def get_session_config_entry(self, key: str) -> str:
        """A configuration string set earlier."""
        return self._get_config(key, "SessionOptions")

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Fix a symbolic dimension of the inputs to a size, which every feed must then have."""
        self.free_dimensions[str(name)] = int(size)

    def add_free_dimension_override_by_denotation(self, denotation: str, size: int) -> None:
        """Accepted; denotations are rare and are not read, so this is recorded as ignored."""
        self._add_config(f"free_dimension_by_denotation.{denotation}", str(size))

    @property
    def free_dimensions(self) -> dict[str, int]:
        """Symbolic dimensions fixed by name."""
        return getattr(self, "_free_dims")  # noqa: B009

    def add_initializer(self, name: str, value: object) -> None:
        """Not available: initializers come from the model's own files."""
        raise Unavailable(f"initializer {name!r} cannot be replaced through SessionOptions",
                             hint="declare it as a graph input and feed it, or write it into the model")

    def add_external_initializers(self, names: object, values: object) -> None:
        """Not available: external data is read from the model's folder."""
        raise Unavailable("external initializers cannot be given through SessionOptions",
                             hint="keep the data file next to the model")

    def register_custom_ops_library(self, path: str) -> None:
        """Not available: custom operators are compiled for ONNX Runtime's own interface."""
        raise Unavailable(f"custom operator library {path!r} cannot be loaded",
                             because="it is compiled against ONNX Runtime's interface")

    @property
    def threads(self) -> int | None:
        """The number of threads asked for, or None for the default."""
        return self.intra_op_num_threads if self.intra_op_num_threads > 0 else None

    @property
    def debug(self) -> int:
        """The log level as Hotfuse's debug level: verbose and info print every decision, the others none."""
        severity = _default_severity if self.log_severity_level == -1 else self.log_severity_level
        return {0: 1 + max(0, self.log_verbosity_level), 1: 1}.get(severity, 0)

    def ignored(self) -> dict[str, str]:
        """Options that were changed from their defaults and have no effect here."""
        changed = {
            name: str(getattr(self, name))
            for name, default in _SESSION_FIELDS.items()
            if name not in _HONOURED and getattr(self, name) != default
        }
        config: dict[str, str] = getattr(self, "_config")  # noqa: B009
        return {**changed, **{f"config {key}": value for key, value in config.items()}}


def adopted(given: object) -> SessionOptions:
    """The options of a session: ours, or another runtime's of the same kind, whose fields are read once.

    An application that changes only which `InferenceSession` it makes hands over ONNX Runtime's options. What cannot be read off
    such an object (configuration strings, free dimensions) has no effect.
    """
    if isinstance(given, SessionOptions):
        return given
    if not all(hasattr(given, name) for name in ("intra_op_num_threads", "graph_optimization_level", *_LOG_FIELDS)):
        raise WrongCall("sess_options must be a SessionOptions", because=f"it is a {type(given).__name__}",
                        hint="make it with hotfuse.SessionOptions() or onnxruntime.SessionOptions()")
    options = SessionOptions()
    for name, default in _SESSION_FIELDS.items():
        value = getattr(given, name, default)
        setattr(options, name, value if isinstance(default, str) else int(value))
    return options


class RunOptions(_Options):
    """ONNX Runtime's run options; `terminate` stops a run before it starts, the rest has no effect."""

    _fields = _RUN_FIELDS

    log_severity_level: int
    log_verbosity_level: int
    logid: str
    only_execute_path_to_fetches: bool
    terminate: bool

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Keep a configuration string; none has an effect."""
        self._add_config(key, value)

    def get_run_config_entry(self, key: str) -> str:
        """A configuration string set earlier."""
        return self._get_config(key, "RunOptions")
