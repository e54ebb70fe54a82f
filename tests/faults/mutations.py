"""Seeded damage to a model file: bytes flipped, cut, moved; fields set to absurd values, dropped, doubled."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, Message
from onnx import ModelProto

Damage = Callable[[bytes, random.Random], bytes]


def _cut(data: bytes, r: random.Random) -> bytes:
    return data[: r.randrange(len(data))]


def _flip(data: bytes, r: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(r.choice((1, 1, 1, 2, 4, 16))):
        out[r.randrange(len(out))] ^= 1 << r.randrange(8)
    return bytes(out)


def _run(data: bytes, r: random.Random) -> bytes:
    at, n = r.randrange(len(data)), r.choice((1, 2, 4, 8, 64))
    fill = r.choice((b"\0" * n, b"\xff" * n, b"\x7f" * n, r.randbytes(n)))
    return data[:at] + fill + data[at + n :]


def _delete(data: bytes, r: random.Random) -> bytes:
    at, n = r.randrange(len(data)), r.choice((1, 2, 8, 100))
    return data[:at] + data[at + n :]


def _insert(data: bytes, r: random.Random) -> bytes:
    at, src, n = r.randrange(len(data)), r.randrange(len(data)), r.choice((1, 2, 8, 100))
    return data[:at] + data[src : src + n] + data[at:]


def _swap(data: bytes, r: random.Random) -> bytes:
    n = r.choice((1, 4, 16, 128))
    a, b = sorted((r.randrange(len(data) - n), r.randrange(len(data) - n)))
    if b - a < n:
        return _flip(data, r)
    return data[:a] + data[b : b + n] + data[a + n : b] + data[a : a + n] + data[b + n :]


def _messages(m: Message) -> list[Message]:
    found = [m]
    for field, value in m.ListFields():
        if field.message_type is not None:
            for child in value if field.is_repeated else [value]:
                found += _messages(child)
    return found


_NUMBERS = (0, 1, -1, 2, 3, 5, 7, 64, 255, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
_TEXTS = ("", "x", "conv", "y", "Relu", "MatMul", "Loop", "If", "Nope", "ai.onnx.ml", "com.microsoft", "é" * 40)
_REALS = (0.0, -1.0, 1e-30, 1e30, math.inf, -math.inf, math.nan)


def _odd(field: Any, r: random.Random) -> Any:
    """A value of the field's type that nobody would write."""
    match field.cpp_type:
        case field.CPPTYPE_STRING:
            text = r.choice(_TEXTS)
            return text.encode() if field.type == field.TYPE_BYTES else text
        case field.CPPTYPE_FLOAT | field.CPPTYPE_DOUBLE:
            return r.choice(_REALS)
        case field.CPPTYPE_ENUM:
            return r.choice(list(field.enum_type.values_by_number))
        case field.CPPTYPE_INT32:
            return max(-(2**31), min(2**31 - 1, r.choice(_NUMBERS)))
        case field.CPPTYPE_UINT64:
            return abs(r.choice(_NUMBERS))
        case _:
            return r.choice(_NUMBERS)


def _field(data: bytes, r: random.Random) -> bytes:
    """Change one field somewhere in the parsed model."""
    model = ModelProto.FromString(data)
    target = r.choice([m for m in _messages(model) if m.ListFields()])
    field, value = r.choice(target.ListFields())
    many = field.is_repeated
    move = r.choice(("set", "set", "set", "clear", "double", "drop", "swap"))
    if move == "clear" or (field.message_type is not None and not many):
        target.ClearField(field.name)
    elif many and move == "double":
        value.extend([value[r.randrange(len(value))]])
    elif many and move == "drop":
        del value[r.randrange(len(value))]
    elif many and (move == "swap" or field.message_type is not None):
        i, j = r.randrange(len(value)), r.randrange(len(value))
        items = list(value)
        items[i], items[j] = items[j], items[i]
        copies = [type(x).FromString(x.SerializeToString()) for x in items] if field.message_type is not None else items
        del value[:]
        value.extend(copies)
    elif many:
        value[r.randrange(len(value))] = _odd(field, r)
    else:
        setattr(target, field.name, _odd(field, r))
    return model.SerializeToString()


DAMAGE: tuple[Damage, ...] = (_cut, _flip, _flip, _run, _delete, _insert, _swap, _field, _field, _field, _field, _field)


def mutate(data: bytes, seed: int) -> tuple[str, bytes]:
    """The name of the damage, and the damaged bytes."""
    r = random.Random(seed)
    damage = r.choice(DAMAGE)
    out = data
    for _ in range(r.choice((1, 1, 1, 3))):
        try:
            out = damage(out, r)
        except DecodeError:
            break
        if len(out) < 200:
            break
    return damage.__name__.strip("_"), out
