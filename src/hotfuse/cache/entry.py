"""One entry as bytes.

    magic   8 bytes
    length  of the header, 4 bytes, little-endian
    header  JSON: its name, the key that signed it, the features its code needs, the sizes of its blobs, and its body
    blobs   one behind the other
    sign    a signature over all of the above: 32 bytes by a shared key, 64 by a key pair

A reader trusts nothing before the signature holds: lengths are bounded by the file's own, and the header is parsed only to
know which of the trusted keys to check with.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Any

from hotfuse.cache.keys import TrustedKeys

MAGIC = b"HFCACHE1"
_LENGTH = struct.Struct("<I")
Message = tuple[dict[str, Any], list[bytes]]


class EntryRefusal(StrEnum):
    """Why an entry is not believed."""

    DAMAGED = "it is damaged or cut short"
    FOREIGN = "it was signed with a key that is not trusted here"
    FORGED = "its signature does not hold"
    REPLAYED = "it stands under another entry's name"
    FEATURES = "its code needs instructions that this machine does not execute"


class Refused(Exception):
    """An entry that was not believed."""

    def __init__(self, why: EntryRefusal) -> None:
        super().__init__(why.value)
        self.why = why


def write_head(magic: bytes, head: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The beginning of an entry or bundle, in parts."""
    text = json.dumps(head).encode()
    return magic, _LENGTH.pack(len(text)), text


def read_head(data: bytes, magic: bytes) -> tuple[dict[str, Any], int]:
    """What stands at the beginning, not believed yet, and how many bytes its text has; raises Refused."""
    at = len(magic) + _LENGTH.size
    if len(data) < at or data[: len(magic)] != magic:
        raise Refused(EntryRefusal.DAMAGED)
    (length,) = _LENGTH.unpack_from(data, len(magic))
    if length > len(data) - at:
        raise Refused(EntryRefusal.DAMAGED)
    try:
        return dict(json.loads(data[at : at + length])), length
    except (ValueError, TypeError, RecursionError) as e:
        raise Refused(EntryRefusal.DAMAGED) from e


def pack(name: str, body: dict[str, Any], blobs: Sequence[bytes], keys: TrustedKeys, features: Sequence[str] = ()) -> bytes:
    """An entry, signed."""
    head = {"name": name, "key": keys.own.name, "features": sorted(features), "sizes": [len(b) for b in blobs], "body": body}
    parts = (*write_head(MAGIC, head), *blobs)
    return b"".join((*parts, keys.own.sign(*parts)))


def unpack(data: bytes, name: str, keys: TrustedKeys, usable: AbstractSet[str]) -> Message:
    """What an entry holds; raises Refused."""
    at = len(MAGIC) + _LENGTH.size
    head, length = read_head(data, MAGIC)
    try:
        signer, stated = str(head["key"]), str(head["name"])
        sizes, needs, body = [int(n) for n in head["sizes"]], [str(f) for f in head["features"]], dict(head["body"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
        raise Refused(EntryRefusal.DAMAGED) from e
    key = keys.named(signer)
    if key is None:
        raise Refused(EntryRefusal.FOREIGN)
    signed = len(data) - key.signature_bytes
    if signed < at + length:
        raise Refused(EntryRefusal.DAMAGED)
    if not key.holds(memoryview(data)[:signed], data[signed:]):
        raise Refused(EntryRefusal.FORGED)
    if stated != name:
        raise Refused(EntryRefusal.REPLAYED)
    if min(sizes, default=0) < 0 or sum(sizes) != signed - at - length:
        raise Refused(EntryRefusal.DAMAGED)
    if not usable >= set(needs):
        raise Refused(EntryRefusal.FEATURES)
    blobs: list[bytes] = []
    at += length
    for size in sizes:
        blobs.append(data[at : at + size])
        at += size
    return body, blobs
