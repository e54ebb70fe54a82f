"""Voice activity with silero-vad's own ONNX file: chunk after chunk of a recording, and a state that goes from call to call.

The changed line is `hotfuse.InferenceSession` for `onnxruntime.InferenceSession`. The file comes out of the `silero-vad` wheel,
which is downloaded once where it is not there.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnxruntime

import hotfuse
from benchmarks import zoo
from examples.recipes.common import Outcome, compared

RATE, CHUNK, CONTEXT = 16000, 512, 64
Array = np.ndarray[Any, Any]


def probabilities(session: Any, recording: Array) -> Array:
    """That somebody speaks, for each chunk."""
    state, before, found = np.zeros((2, 1, 128), np.float32), np.zeros((1, CONTEXT), np.float32), list[Array]()
    for at in range(0, recording.shape[1], CHUNK):
        chunk = np.concatenate([before, recording[:, at : at + CHUNK]], 1)
        out, state = session.run(None, {"input": chunk, "state": state, "sr": np.array(RATE, np.int64)})
        before = chunk[:, -CONTEXT:]
        found.append(out[0])
    return np.concatenate(found)


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    (path,) = zoo.fetch("silero-vad")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    theirs = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    ours = hotfuse.InferenceSession(str(path), options)
    chunks = 8 if tiny else 64
    recording = (np.random.default_rng(0).standard_normal((1, CHUNK * chunks)) * 0.1).astype(np.float32)
    return compared("voice activity", lambda: probabilities(theirs, recording), lambda: probabilities(ours, recording), ours,
                    lambda a, b: bool(np.allclose(a, b, rtol=1e-3, atol=1e-4)), 0.0 if tiny else 15.0)  # fmt: skip


if __name__ == "__main__":
    main("--tiny" in sys.argv)
