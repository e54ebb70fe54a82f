"""Answers of workers that outlive the process: asked for once, kept by what they were made of.

What several processes want at once is made by one of them; the others wait for it, a bounded time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hotfuse.base.clock import is_recent
from hotfuse.base.errors import HotfuseError
from hotfuse.base.settings import Settings
from hotfuse.cache.address import Address, digest, machine_text, toolchain, versions
from hotfuse.cache.folder import Folder
from hotfuse.compile import request_context
from hotfuse.compile.workers.wire import Message
from hotfuse.lower.common.effort import OutOfSteps
from hotfuse.lower.common.errors import CannotLower
from hotfuse.native.target import host

Never = Callable[[], bool]
WAIT_S = 30.0
"""Longest wait of a worker for another process that compiles the same group."""
BELIEVED_S = 86_400.0
"""A group that had no kernel worth having is tried again after so long."""


def never() -> bool:
    """Nobody calls it off."""
    return False


def target() -> dict[str, str]:
    """What machine code rests on besides versions: what makes it, and the features that it may use."""
    return {"toolchain": toolchain(), "machine": machine_text(code_features())}


def code_basis(settings: Settings, threads: int, sizes: Mapping[str, int]) -> dict[str, str]:
    """What compiled code rests on."""
    options = [(k, v) for k, v in settings.code_key() if k != "threads"]  # as many as there are, however they were asked for
    return {**versions(), **target(), "threads": str(threads), "options": repr(options), "sizes": repr(sorted(sizes.items()))}


def code_features() -> Sequence[str]:
    """What compiled code needs a machine to execute."""
    return host().features


def answered(
    folder: Folder | None, address: Address, make: Callable[[], Message], patience_s: float, stop: Never = never,
    features: Sequence[str] = (), valid: Callable[[Message], bool] = lambda _: True,
) -> tuple[Message, bool]:
    """What is kept at an address, or what is made of it now and kept; and whether it was there."""
    if folder is None:
        return make(), False
    if (found := folder.get(address)) is not None and valid(found):
        return found, True
    with folder.making(address, patience_s, stop):
        if (found := folder.again(address)) is not None and valid(found):  # another process made it meanwhile
            return found, True
        body, blobs = make()
        folder.put(address, body, blobs, features)
        return (body, blobs), False


# --- in the worker ----------------------------------------------------------------------------------------------------


class Unkept(CannotLower):
    """A reason that holds for one request only."""


def grouping(graph: str, sizes: Mapping[str, int], model: str, seen: str, make: Callable[[], Message]) -> Message:
    """How a graph is grouped, decided once for all processes, as long as the same performance model has a say in it and calls were
    seen to bring the same.
    """
    folder = request_context.folder()
    basis = {**versions(), **target(), "options": repr(request_context.request_settings()), "model": model,
             "sizes": repr(sorted(sizes.items())), **({"seen": digest(seen)} if seen else {})}
    return answered(folder, Address("grouping", digest(graph), basis), make, WAIT_S)[0]


def verdict(kind: str, subject: str, basis: Mapping[str, str], make: Callable[[], Message]) -> Message:
    """Object code and measurements of a group, or the reason it has none (raised as CannotLower), made once for all processes.

    A reason may rest on a measurement beside others, so it is believed for a while only.
    """

    def kept() -> Message:
        try:
            return make()
        except (Unkept, OutOfSteps):
            raise
        except HotfuseError as e:
            return {"because": e.because or e.what, "at": int(time.time())}, []

    folder = request_context.folder()
    if folder is None:
        return make()
    address = Address(kind, digest(subject), {**versions(), **target(), **basis})
    found, _ = answered(folder, address, kept, WAIT_S, features=code_features(), valid=_holds)
    if "because" in found[0]:
        raise CannotLower(str(found[0]["because"]))
    return found


def _holds(found: Message) -> bool:
    return "because" not in found[0] or is_recent(float(found[0]["at"]), BELIEVED_S)
