"""Reading pages with rapidocr, an application written for ONNX Runtime: three models, with OpenCV between them.

The changed line is what stands behind the name `InferenceSession` where the application makes its sessions (`ocr_client.build`).
"""

from __future__ import annotations

import sys

import hotfuse
from examples import ocr_client
from examples.recipes.common import Outcome, compared

NEEDS = ("cv2", "pyclipper", "shapely", "yaml", "onnxruntime", "PIL")


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    pages = [ocr_client.draw_page(seed)[0] for seed in range(1, 2 if tiny else 4)]
    with ocr_client.rapidocr() as package:
        theirs, _ = ocr_client.build(package)
        ours, sessions = ocr_client.build(package, hotfuse.InferenceSession)
        try:
            return compared("text in pictures", lambda: [theirs(p) for p in pages], lambda: [ours(p) for p in pages], sessions[2],
                            lambda a, b: a == b, 0.0 if tiny else 30.0, 1, 1 if tiny else 5)  # fmt: skip
        finally:
            for session in sessions:
                session.close()


if __name__ == "__main__":
    main("--tiny" in sys.argv)
