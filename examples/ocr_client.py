"""A real application on Hotfuse: rapidocr reads pages, with one name in it replaced.

    python examples/ocr_client.py [--pages 6] [--rounds 5] [--threads 1]

rapidocr was written for ONNX Runtime: three models (find lines, turn them upright, read them) with OpenCV between them, and
sizes that differ from page to page. Its code runs as published. The one change is what stands behind the name
`InferenceSession` when it is built:

    rapidocr_onnxruntime.utils.infer_engine.InferenceSession = hotfuse.InferenceSession

The pages are drawn for the purpose. Both versions read all of them; the texts have to be the same, character by character. Then
both take turns, page by page, while Hotfuse goes on compiling beside them, as it would in service.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the zoo, which is not installed

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks import zoo

TEXT = (
    "invoice total amount due within thirty days please quote this number delivery address street window station orange river "
    "compiler kernel graph latency memory bandwidth vector matrix tensor cache register pipeline schedule winter summer garden"
)
NEEDED = ("cv2", "pyclipper", "shapely", "yaml", "onnxruntime")

Page = np.ndarray[Any, Any]
Reader = Callable[[Page], list[str]]


def draw_page(seed: int) -> tuple[Page, list[str]]:
    """A page of print as an RGB array, and the lines on it: their number, length and size change with the seed."""
    rng = random.Random(seed)
    lines = []
    for _ in range(rng.randint(2, 6)):
        words = rng.choices(TEXT.split(), k=rng.randint(1, 5))
        lines.append(" ".join(words).capitalize() + rng.choice([".", f" {rng.randint(10, 9999)}"]))
    sizes = [rng.randint(20, 34) for _ in lines]
    width, height = rng.choice((480, 640, 800)), 40 + sum(2 * size for size in sizes)
    image = Image.new("RGB", (width, height), (rng.randint(235, 255),) * 3)
    pen, top = ImageDraw.Draw(image), 24
    for i, (line, size) in enumerate(zip(lines, sizes, strict=True)):
        font = ImageFont.load_default(size)
        while pen.textlength(line, font=font) > width - 40:  # too long for this page: fewer words
            line = line.rpartition(" ")[0]
        lines[i] = line
        pen.text((20, top), line, fill=(rng.randint(0, 60),) * 3, font=font)
        top += 2 * size
    return np.asarray(image), lines


@contextmanager
def rapidocr(folder: Path | None = None) -> Iterator[Any]:
    """The application's package, importable while the context lasts."""
    for name in NEEDED:
        try:
            __import__(name)
        except ImportError as e:
            raise zoo.ZooUnavailable(f"rapidocr needs {name}", because=str(e), hint="pip install hotfuse[bench]") from e
    with tempfile.TemporaryDirectory(prefix="hotfuse-ocr-") as temporary:
        place = str(zoo.ocr_application(folder or Path(temporary)))
        sys.path.insert(0, place)
        try:
            import rapidocr_onnxruntime

            yield rapidocr_onnxruntime
        finally:
            sys.path.remove(place)
            for name in [n for n in sys.modules if n.partition(".")[0] == "rapidocr_onnxruntime"]:
                del sys.modules[name]


def build(package: Any, session: type | None = None, threads: int = 1) -> tuple[Reader, list[Any]]:
    """Rapidocr as it is, or over another session class; also the sessions of its three models."""
    from rapidocr_onnxruntime.utils import infer_engine  # pyright: ignore[reportMissingImports]

    original = infer_engine.InferenceSession
    if session is not None:
        infer_engine.InferenceSession = session
    try:
        application = package.RapidOCR(intra_op_num_threads=threads, inter_op_num_threads=1)
    finally:
        infer_engine.InferenceSession = original
    parts = (application.text_det.infer, application.text_cls.infer, application.text_rec.session)

    def read(page: Page) -> list[str]:
        found, _seconds = application(page)
        return [text for _box, text, _score in found or []]

    return read, [part.session for part in parts]


def main() -> int:
    """Read the pages both ways, compare, time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    import torch

    import hotfuse

    torch.set_num_threads(options.threads)
    pages = [draw_page(seed) for seed in range(options.pages)]
    with rapidocr() as package:
        theirs, _ = build(package, threads=options.threads)
        ours, sessions = build(package, hotfuse.InferenceSession, options.threads)
        differing = 0
        for page, drawn in pages:
            want, got = theirs(page), ours(page)
            differing += want != got
            print(f"page {page.shape[1]}x{page.shape[0]}, {len(drawn)} lines: " + ("same text" if want == got else "DIFFERS"))
            for line in got:
                print(f"    {line}")
        contenders = {"onnxruntime": theirs, "hotfuse": ours}
        for i in range(options.rounds):
            times: dict[str, list[float]] = {name: [] for name in contenders}
            for page, _ in pages:
                for name, read in contenders.items():
                    start = time.perf_counter()
                    read(page)
                    times[name].append((time.perf_counter() - start) * 1e3)
            said = ", ".join(f"{name} {statistics.fmean(t):.1f} ms a page" for name, t in times.items())
            print(f"round {i + 1}: {said}", flush=True)
            for session in sessions:
                session.wait(60)
        for name, session in zip(("find lines", "turn upright", "read"), sessions, strict=True):
            tiers = session.stats()["calls_per_tier"]
            print(f"{name}: calls by tier {tiers}")
        if differing:
            print(f"{differing} of {len(pages)} pages differ")
        return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
