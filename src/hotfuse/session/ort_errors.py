"""ONNX Runtime's exception names, so that code which tells them apart by name keeps working.

Each is also one of Hotfuse's own kinds: a broken model is a `ModelError`, a wrong call an `InputError`. A run that
fails inside the model is both, since feed and model do not fit each other and neither alone shows which is at fault.
Where ONNX Runtime raises a built-in exception (`RuntimeError`, `TypeError`), ours is a subclass of it.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from hotfuse.base.errors import HotfuseError, InputError, ModelError


class InvalidArgument(InputError):
    """An unknown input or output name, or a value of the wrong type, rank or size."""


class UnsupportedFeed(InputError, RuntimeError):
    """A Python object that is not a tensor, or whose element type no ONNX type matches."""


class WrongCall(InputError, TypeError):
    """An argument of the wrong Python type."""


class NoSuchFile(ModelError):
    """The model's path names no file."""


class InvalidProtobuf(ModelError):
    """The bytes do not parse as an ONNX model."""


class InvalidGraph(ModelError):
    """The model parses but breaks ONNX's rules."""


class NotImplemented(ModelError):
    """The model or the option needs something that is not there."""


Unavailable = NotImplemented
"""The same class under a name that cannot be taken for Python's constant."""


class Fail(ModelError, InputError):
    """A run that failed inside the model, or was told to stop."""


def retype(error: HotfuseError, cls: type[HotfuseError], prefix: str = "") -> HotfuseError:
    """The same error under another name; chain it with `from error`."""
    return cls(prefix + error.what, where=error.where, because=error.because, hint=error.hint)


def load_error(error: ModelError) -> HotfuseError:
    """The name ONNX Runtime gives to a model that cannot be loaded."""
    if isinstance(error.__cause__, FileNotFoundError):
        return retype(error, NoSuchFile)
    if isinstance(error.__cause__, (DecodeError, OSError)):
        return retype(error, InvalidProtobuf)
    return retype(error, InvalidGraph)


def run_error(error: HotfuseError) -> HotfuseError:
    """The name ONNX Runtime gives to a run that failed inside the model."""
    if isinstance(error, (Fail, InvalidArgument, UnsupportedFeed, WrongCall, NotImplemented)):
        return error
    return retype(error, Fail) if isinstance(error, (ModelError, InputError)) else error
