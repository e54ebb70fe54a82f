"""Settings are one frozen value that is passed in. A field that nobody gives is what its environment variable says, read once, when
the value is made; without that it is the default (decision 500).

A field marked `affects_code` belongs to every cache key (`Settings.code_key`), so adding a field
can never make two different programs share a cache entry.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, cast, get_args

from hotfuse.base.errors import InputError

Objective = Literal["latency", "energy", "memory"]
Precision = Literal["fp32", "bf16"]
CaptureMode = Literal["background", "inline", "off"]
Workers = Literal["auto", "fork", "spawn"]
Padding = Literal["exact", "ignore", "keep"]
Caches = Literal["grow", "copy"]
Weights = Literal["watched", "checked", "frozen"]
Devices = Literal["same", "auto"]


BF16_RTOL = 2e-2
"""What products of operands rounded to 8 significant bits may be off by, relative to the largest magnitude."""
NO_HOME = Path("/nonexistent")
"""What Debian calls the home of users that have none: nobody makes it."""
INEXACT: Mapping[str, str] = {"precision": "bf16", "padding": "ignore"}
"""Choices that allow transformations which are not equal in real arithmetic; no default is among them."""


def _code(default: object) -> object:
    return field(default=default, metadata={"affects_code": True})


def _variable(name: str, *, default: Any) -> Any:
    """A field that an environment variable can choose where nobody gives it."""
    return field(default_factory=lambda: _read(name, default), metadata={"variable": name, "default": default})


def cache_home() -> Path:
    """Where caches of this user are, by the convention of Linux desktops: `$XDG_CACHE_HOME/hotfuse` where that variable names an
    absolute path, else `~/.cache/hotfuse`. A folder from before the variable was set stays in use until the other one is there."""
    usual, home = Path("~/.cache/hotfuse"), os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):
        return usual
    named = Path(home) / "hotfuse"
    return usual if os.path.isdir(os.path.expanduser(usual)) and not named.is_dir() else named


def _read(name: str, default: object) -> object:
    """What an environment variable says; the default where it is not set or empty."""
    text = os.environ.get(name, "")
    if not text:
        return default
    if isinstance(default, bool):
        if text not in ("0", "1"):
            raise InputError(f"{name}={text!r} is neither 0 nor 1", hint=f"{name}=1 in the environment, or none")
        return text == "1"
    if isinstance(default, int):
        if not text.isdecimal():
            raise InputError(f"{name}={text!r} is not a whole number", hint=f"{name}={default} in the environment is the default")
        return int(text)
    choices = _CHOICES.get(_FIELD_OF.get(name, ""), ())
    if choices and text not in choices:
        raise InputError(f"{name}={text!r} is not among the choices", hint="one of " + ", ".join(choices))
    return text


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that may be chosen about a run."""

    objective: Objective = _code("latency")  # type: ignore[assignment]
    """What a new plan has to be better in on real calls: the time of a call, its energy, or its memory."""
    precision: Precision = _code("fp32")  # type: ignore[assignment]
    """`bf16`: products of fp32 tensors with constant weights round both operands to bfloat16 and add up in fp32, where the machine
    has instructions for that (seen to execute). Plans may then differ from the model by 2% of the largest magnitude."""
    backend: str = _code("auto")  # type: ignore[assignment]
    """Which back end makes the kernels of tier 1 and 2, by its name in the registry: `llvm` (what `auto` is), `interp` (the tile
    interpreter, to check others with; slow), or one that an installed package brings."""
    threads: int | None = _code(None)  # type: ignore[assignment]
    """Torch's threads during a call, and those that kernels are compiled for; None is what torch has."""
    partition_nodes: int = _code(256)  # type: ignore[assignment]
    """Most nodes in one partition at tier 0; keeps later re-planning cheap."""

    padding: Padding = "exact"
    """Batches with an attention mask: `exact` leaves padded rows out where no output shows them; `ignore` also where outputs do,
    which may then be 0 at padded rows; `keep` computes every row."""
    devices: Devices = _variable("HOTFUSE_DEVICES", default="same")
    """`same`: models run where their tensors are. `auto`: a model of the host may run on a CUDA device, with copies of its weights
    there, where live calls are faster so, copies of inputs and results included."""
    tiers: int = 2
    """The highest tier to try: 0 stays on library kernels, 1 adds generated ones, 2 those that bet on what recurs."""
    hot_calls: int = 3
    """Calls in a captured graph after which the next tier is tried."""
    race_s: float = 1.0
    """Most seconds spent measuring a new plan against the one it would replace."""
    capture: CaptureMode = _variable("HOTFUSE_CAPTURE", default="background")
    """`background`: in a worker process; `inline`: in the call (tools and tests); `off`: never."""
    capture_timeout_s: float = 300.0
    """Most seconds that a capture may take in a worker."""
    compile_workers: int = 0
    """Worker processes for background work; 0 is half the cores."""
    workers: Workers = _variable("HOTFUSE_WORKERS", default="auto")
    """How they begin. `auto`: as a fork of this process, which has torch and the model's library loaded, unless that is not safe
    (CUDA in use, other systems) or would make calls wait (a process of more than 2 GiB); `fork`: whatever the size; `spawn`: always
    as fresh interpreters."""
    compile_memory_mb: int = 4096
    """Memory of one worker beyond its libraries; one that needs more is ended."""
    compile_share: float = 0.1
    """The part of the throughput that workers may cost while the whole machine is in use: all of it for what is expected to save
    much of the calls' time, less for less, none where nothing is to be gained. A minute's share may be taken at once, at three
    times the rate, so that first plans come soon. Where a call has one thread, it is a part of all cores; where it has several,
    which wait for each other, so many times less."""
    unit_timeout_s: float = 60.0
    """Most seconds spent on compiling and trying one kernel."""
    max_entries: int = 8
    """Captured graphs kept per model before the least recently used is dropped."""
    watch: bool = True
    """Whether calls are sampled for statistics of the data that flows through the graph."""
    watch_rate: int = 64
    """In the steady state, one call in so many is looked at; of very fast calls fewer, some hundred a second."""
    max_versions: int = 4
    """Plans of tier 2 kept beside a captured graph: more kinds of calls than that share the generic plan."""
    code_bytes: int = 4 << 30
    """Memory that compiled plans of one model may hold: packed weights and arenas; the least recently used go first."""
    release_weights: bool = False
    """True: weights that a deployed plan has packed copies of give their memory back, and come from a file when they are read.
    They must not be written while that happens; later they may. Only where the cache folder is on a disk, and on Linux."""
    weights: Weights = "watched"
    """Writes to weights that torch does not show (`p.data`, NumPy views, shared memory, tensors of inference mode), where plans
    serve copies. `watched`: noticed within `weights_calls` calls and `weights_ms` milliseconds. `checked`: every call compares
    everything first. `frozen`: nobody writes so, and nothing is compared. What torch shows the next call notices in any case."""
    caches: Caches = "grow"
    """Tensors that a cache object holds and a call puts more behind (keys and values of a decode step). `grow`: they lie in memory
    with room to grow, where the next call appends without a copy; they are not row-major then, and hold up to half as much again.
    `copy`: as the model's own code makes them."""
    weights_calls: int = 1000
    """Most calls that are served after such a write before it is noticed."""
    weights_ms: float = 30_000.0
    """No call that begins so many milliseconds after such a write is served from copies made before it."""
    sample_bytes: int = 4 << 20
    """Memory for inputs of real calls, kept to prove new plans on."""
    keep_inputs: bool = True
    """False: inputs are never kept; plans are proven on made-up ones of the same shapes."""
    max_captures: int = 16
    """Captures tried per model; after that one more for every 256 calls in plans of earlier ones, up to eight times as many."""
    rtol: float = 1e-4
    """Relative error allowed between a captured graph and the model's own fp32 outputs."""
    record: bool = True
    """Whether what was learned is written to the profile store."""
    idle: bool = True
    """Whether idle time is used to measure kernels of the models served and to train the performance model; needs `record`."""
    profiles: str | None = _variable("HOTFUSE_PROFILES", default=None)
    """The store: a path or URL; None is a file in the cache folder. `postgresql://…` is a database that a fleet shares: rows go to
    a file in the cache folder and from there to the database and back, beside serving."""
    profiles_s: float = 10.0
    """Seconds between two exchanges with the fleet's database."""
    profiles_rows: int = 200_000
    """Rows kept of each table of the local store that grows with use; the oldest leave first."""
    cache_dir: Path = field(
        default_factory=lambda: Path(os.environ.get("HOTFUSE_CACHE_DIR") or cache_home()),
        metadata={"variable": "HOTFUSE_CACHE_DIR", "default": Path("~/.cache/hotfuse")},
    )
    """Where the profile store, and whatever else outlives a process, is kept. Without a choice it is `$XDG_CACHE_HOME/hotfuse`
    where that variable is set, unless only `~/.cache/hotfuse` is there."""
    cache: str | None = _variable("HOTFUSE_CACHE", default=None)
    """Where captured graphs, object code and verdicts are kept for later processes: a folder; `off` keeps none. None is a folder in
    the cache folder, or none where `profiles` is in memory, which asks for nothing to be kept."""
    cache_bytes: int = _variable("HOTFUSE_CACHE_BYTES", default=1 << 30)
    """Size of that folder; the least recently used entries leave first."""
    cache_key: str | None = _variable("HOTFUSE_CACHE_KEY", default=None)
    """A file with a key that signs entries and is trusted beside the user's own: one that all machines of a fleet share, or the
    private half of a pair."""
    cache_shared: str | None = _variable("HOTFUSE_CACHE_SHARED", default=None)
    """A store of entries that machines share, as a URL that `fsspec` knows (s3://…, file:///mnt/…): asked for what the folder has
    not, and given what it gets. Entries of other machines are believed under the keys here."""
    trusted_keys: str | None = _variable("HOTFUSE_TRUSTED_KEYS", default=None)
    """A public key, or a folder of them (`*.pub`): whose entries and bundles are believed beside those of the keys above."""
    artifacts: str | None = _variable("HOTFUSE_ARTIFACTS", default=None)
    """A bundle that `hotfuse build` made: what the cache has not is taken from there, and nothing is compiled that it holds."""
    debug: int = _variable("HOTFUSE_DEBUG", default=0)
    """What is printed to stderr as it happens, 0 to 7 (docs/debugging.md)."""
    perf_map: bool = _variable("HOTFUSE_PERF_MAP", default=False)
    """Whether generated code is named in the file that `perf` reads."""
    max_events: int = 4096
    """Decisions remembered per model; older ones are forgotten first."""

    def __post_init__(self) -> None:
        for f in fields(self):
            _check(f.name, getattr(self, f.name), f.metadata.get("default", f.default))
        for name in _PATHS:
            given = cast("object", getattr(self, name))
            made = os.fspath(given) if isinstance(given, os.PathLike) else given
            object.__setattr__(self, name, Path(cast("str", made)) if name == "cache_dir" else made)

    @property
    def folder(self) -> Path:
        """The cache folder, under the user's home where it begins with `~`. A user that has none (a number of its own in a
        container, and no HOME) keeps nothing, and is told so."""
        try:
            return self.cache_dir.expanduser()
        except RuntimeError:
            return NO_HOME.joinpath(*self.cache_dir.parts[1:])

    @property
    def exact(self) -> bool:
        """Whether only transformations are allowed that are equal in real arithmetic."""
        return not any(getattr(self, name) == value for name, value in INEXACT.items())

    @property
    def tolerance(self) -> float:
        """The relative error allowed between a compiled plan and the model's own outputs."""
        return self.rtol if self.precision == "fp32" else max(self.rtol, BF16_RTOL)

    def code_key(self) -> tuple[tuple[str, object], ...]:
        """The part of the settings that changes generated code, for cache keys."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self) if f.metadata.get("affects_code"))

    def with_(self, **changes: object) -> Settings:
        """A copy with some fields changed; unknown names are the caller's error."""
        known = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise InputError(
                f"unknown setting {unknown[0]!r}", hint="one of " + ", ".join(sorted(known))
            )
        return replace(self, **changes)  # type: ignore[arg-type]


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "objective": get_args(Objective), "precision": get_args(Precision), "padding": get_args(Padding), "devices": get_args(Devices),
    "capture": get_args(CaptureMode), "workers": get_args(Workers), "weights": get_args(Weights), "caches": get_args(Caches),
}  # fmt: skip
_PATHS = ("cache_dir", "cache", "cache_key", "trusted_keys", "artifacts", "profiles")
"""What names a place: text or a path."""
_FIELD_OF = {f.metadata["variable"]: f.name for f in fields(Settings) if "variable" in f.metadata}
"""By environment variable."""
_NO_SETTINGS = frozenset(("HOTFUSE_FEATURES", "HOTFUSE_WORKER_LEVEL", "HOTFUSE_WORKER_MEMORY", "HOTFUSE_WORKER_NICE"))
"""Variables that are read where they apply."""


def unread_variables(environment: Iterable[str]) -> dict[str, str]:
    """Variables named like ours that nothing reads, each with what to do instead: a mistyped one has no effect, silently."""
    from difflib import get_close_matches  # a process that serves never asks

    ours = sorted(n for n in environment if n.startswith("HOTFUSE_") and n not in _FIELD_OF and n not in _NO_SETTINGS)
    settings = {f.name for f in fields(Settings)}
    hints = dict[str, str]()
    for name in ours:
        setting, near = name.removeprefix("HOTFUSE_").lower(), get_close_matches(name, _FIELD_OF, 1, 0.8)
        hints[name] = (f"Settings({setting}=...) in the program" if setting in settings
                       else f"{near[0]}?" if near else "docs/reference/settings.md has the variables")  # fmt: skip
    return hints


def _check(name: str, given: object, default: object) -> None:
    """Refuse what cannot be meant where it is said: a word that nobody compares with would choose the last alternative silently."""
    because = f"its type is {type(given).__name__}"
    if (choices := _CHOICES.get(name)) is not None:
        if given not in choices:
            raise InputError(f"{name}={given!r} is not among the choices", hint="one of " + ", ".join(choices))
    elif given is None and default is None:
        return
    elif name in _PATHS:
        if not isinstance(os.fspath(given) if isinstance(given, os.PathLike) else given, str):
            raise InputError(f"{name}={given!r} is no path", because=because, hint="a str or a Path")
    elif isinstance(default, bool | int | float) or name == "threads":
        if not isinstance(given, Real):
            raise InputError(f"{name}={given!r} is no number", because=because)
        if not isinstance(default, float) and not isinstance(given, Integral):
            raise InputError(f"{name}={given!r} is no whole number", because=because)
        if not float(given) >= (name == "threads"):
            raise InputError(f"{name}={given!r} is too small", hint="1 or more" if name == "threads" else "0 or more")
    elif not isinstance(given, str):
        raise InputError(f"{name}={given!r} is no text", because=because)
