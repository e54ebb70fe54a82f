"""Every error Hotfuse raises says what, where, because and try.

`ModelError` and `InputError` are the user's to fix; `InternalError` is ours. Nothing else of ours
reaches a user, and a library's exception is always chained (`raise ... from e`), never replaced.
"""

from __future__ import annotations

from hotfuse.base.events import Why


class HotfuseError(Exception):
    """The root of Hotfuse's errors: a sentence, and up to three lines that help."""

    def __init__(self, what: str, *, where: str = "", because: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.because = because
        self.hint = hint
        lines = [what]
        for label, text in (("where", where), ("because", because), ("try", hint)):
            if text:
                lines.append(f"  {label + ':':<9}{text}")
        super().__init__("\n".join(lines))

    def to_dict(self) -> dict[str, str]:
        """The same four parts for `--json` output."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "where": self.where,
            "because": self.because,
            "try": self.hint,
        }


class ModelError(HotfuseError):
    """A model that cannot be read or is malformed: the user's to fix."""


class InputError(HotfuseError, ValueError):
    """A call with missing, unknown, wrongly shaped or wrongly typed arguments."""


class CaptureError(HotfuseError):
    """A model that runs but cannot become a graph; it keeps running as the user's own code."""

    def __init__(
        self, what: str, *, where: str = "", because: str = "", hint: str = "", why: Why = Why.NOT_CAPTURABLE
    ) -> None:
        super().__init__(what, where=where, because=because, hint=hint)
        self.why = why


class RecordingError(CaptureError):
    """A device refused to record what a call launches there."""


class WrittenInput(CaptureError):
    """A run writes into inputs that it was given copies of."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__("a call cannot be recorded", because="it writes into an input", why=Why.STATEFUL)
        self.places = places


class InternalError(HotfuseError):
    """A broken promise of our own: worth a bug report."""


class CallFault(HotfuseError, IndexError):
    """A call whose data ask for what does not exist, such as an index outside its tensor; nothing outside was read.

    The engine answers such a call with the model's own code, which raises in its own words.
    """
