"""rapidocr, unmodified but for the session class, reads the same text on Hotfuse as on ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

import hotfuse
from benchmarks.zoo import ZooUnavailable
from examples import ocr_client

PAGES = 3
"""At most that many of one size after the first two: the last of them finds its captures done."""


def test_pages_are_drawn_from_their_seed() -> None:
    (a, lines), (b, again) = ocr_client.draw_page(3), ocr_client.draw_page(3)
    assert np.array_equal(a, b) and lines == again and len(lines) >= 2
    assert a.dtype == np.uint8 and a.min() < 80 and a.max() > 230, "dark print on light paper"
    assert ocr_client.draw_page(4)[0].shape != a.shape


@pytest.mark.zoo
def test_same_text_as_with_onnx_runtime() -> None:
    try:
        with ocr_client.rapidocr() as package:
            theirs, _ = ocr_client.build(package)
            ours, sessions = ocr_client.build(package, hotfuse.InferenceSession)
            assert all(isinstance(s, hotfuse.InferenceSession) for s in sessions)
            for seed in (1, 2):
                page, drawn = ocr_client.draw_page(seed)
                want = theirs(page)
                assert len(want) == len(drawn), "every line is found"
                assert "".join(want).replace(" ", "").lower() == "".join(drawn).replace(" ", "").lower()
                assert ours(page) == want
            assert all(s.stats()["calls"] >= 2 for s in sessions), "Hotfuse answered, nobody else"
            page, _ = ocr_client.draw_page(2)
            answered, before = False, [s.stats()["graph_calls"] for s in sessions]
            for _ in range(PAGES):  # a page of another size than the one that was captured asks for one capture more
                assert all(s.wait(300) for s in sessions)
                assert ours(page) == want, "captured graphs read the same"
                answered = all(s.stats()["graph_calls"] > n for s, n in zip(sessions, before, strict=True))
                if answered:
                    break
            assert answered, "graphs, not the files' interpreter"
            for session in sessions:
                session.close()
    except ZooUnavailable as e:
        pytest.skip(str(e))
