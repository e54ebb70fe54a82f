"""Lines of print for the recognizer, and its answers as text."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SHORT, LONG = "short", "long"
WORDS = {SHORT: (1, 3), LONG: (5, 8)}
HEIGHT, STEP = 48, 16
TEXT = "kernel graph latency memory vector matrix tensor cache register schedule compiler garden winter river orange station window"


@dataclass(frozen=True, slots=True)
class Line:
    """One line: what is on it, and the pixels as the model wants them."""

    kind: str
    text: str
    image: np.ndarray[Any, Any]


def text_lines(kind: str, count: int = 24) -> list[Line]:
    """Seeded lines of so many words; their widths differ, as those of real lines do."""
    rng = random.Random(kind)
    out: list[Line] = []
    for _ in range(count):
        text = " ".join(rng.choices(TEXT.split(), k=rng.randint(*WORDS[kind]))) + f" {rng.randint(10, 9999)}"
        out.append(Line(kind, text, drawn(text)))
    return out


def drawn(text: str) -> np.ndarray[Any, Any]:
    """Black on white, in [-1, 1], as wide as the text needs."""
    font = ImageFont.load_default(30)
    width = int(font.getlength(text)) + 20
    image = Image.new("RGB", (-(-width // STEP) * STEP, HEIGHT), "white")
    ImageDraw.Draw(image).text((10, 6), text, fill="black", font=font)
    return (np.asarray(image, np.float32).transpose(2, 0, 1)[None] / 127.5 - 1).astype(np.float32)


def reader(session: Any) -> Callable[[np.ndarray[Any, Any]], str]:
    """From the model's scores to text: the likeliest sign at each position, repetitions and blanks left out."""
    signs = ["", *session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]

    def read(scores: np.ndarray[Any, Any]) -> str:
        best = scores[0].argmax(-1)
        return "".join(signs[i] for i, before in zip(best, [0, *best[:-1]], strict=True) if i and i != before)

    return read
