"""Captured graphs as workers answer them, and back."""

from __future__ import annotations

from hotfuse.compile.answer_bodies import Answered, CaptureAnswer, TensorHeader, received
from hotfuse.compile.workers.wire import Message
from hotfuse.frontends.captured import Asked, Captured, DeadDraw, TensorInfo, Warned, dtype_name
from hotfuse.ir.text import parse, show
from hotfuse.ops.torch_dtypes import named_dtype


def answer_of(done: Captured) -> Answered:
    """A captured graph as an answer."""
    constants = {k: TensorHeader(dtype_name(c.dtype), tuple(c.shape), c.device) for k, c in done.constants.items()}
    draws = tuple((d.op, tuple(d.shape), dtype_name(d.dtype)) for d in done.draws)
    warned = tuple((w.text, w.category, w.filename, w.lineno, w.module) for w in done.warned)
    body = CaptureAnswer(
        show(done.graph), done.shared, constants, done.asks_grad_mode, done.notes, done.written, done.returned, draws, warned,
        done.paths, done.logged, tuple((a.what, a.at) for a in done.asked),
    )  # fmt: skip
    return body, [c.data or b"" for c in done.constants.values()]


def captured_from(message: Message) -> Captured:
    """The captured graph of an answer, or the refusal raised."""
    said, blobs = received(message, CaptureAnswer)
    constants = {k: _tensor(c, b) for (k, c), b in zip(said.constants.items(), blobs, strict=True)}
    draws = tuple(DeadDraw(op, shape, named_dtype(dtype)) for op, shape, dtype in said.draws)
    return Captured(parse(said.graph), dict(said.shared), constants, said.asks_grad_mode, said.notes, said.written, said.returned,
                    draws, tuple(Warned(*w) for w in said.warned), said.paths, said.logged,
                    tuple(Asked(*a) for a in said.asked))  # fmt: skip


def _tensor(header: TensorHeader, data: bytes) -> TensorInfo:
    """Constants arrive contiguous."""
    return TensorInfo(named_dtype(header.dtype), header.shape, (), header.device, parameter=False, requires_grad=False, data=data)
