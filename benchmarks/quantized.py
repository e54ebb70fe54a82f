"""Quantized ONNX files before compiled code is there: the interpreter's steps against ONNX Runtime, in turns in one process.

    python -m benchmarks.quantized [--models bert.int8-dynamic,cnn.int8-tensor] [--threads 1] [--seconds 2] [--steps 8] [--json]

Models are those of the corpus (`python -m benchmarks.corpus list`). `--steps N` also prints the N operators that most of a call's
time goes to. What a whole session does in its first seconds, compiling included: `python -m benchmarks.start --models …`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import onnxruntime
import torch

from benchmarks.corpus import entries
from benchmarks.zoo import ZooModel
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.values import Value
from hotfuse.native.byte_kernels import background

DEFAULT = (
    "mlp.int8-dynamic,mlp.int8-tensor,bert.int8-dynamic,bert.int8-channel,vit.int8-dynamic,gpt2.int8-dynamic,lstm.int8-dynamic,"
    "wake-old-vad.int8-dynamic,resnet18.int8-dynamic,resnet18.int8-channel,resnet18.int8-qoperator,mobilenetv3.int8-dynamic,"
    "mobilenetv3.int8-channel,cnn.int8-dynamic,cnn.int8-channel,ppocr-v4-rec.int8-dynamic,"
    "quartznet.int8-dynamic,quartznet.int8-tensor,wake-embedding.int8-tensor"
)
TURN_S = 0.05
"""Of one contender, before it is the other's."""


def ort_session(model: ZooModel, threads: int) -> onnxruntime.InferenceSession:
    """ONNX Runtime with so many threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    return onnxruntime.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])


def in_turns(contenders: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Median seconds of a call, of each."""
    times: list[list[float]] = [[] for _ in contenders]
    for call in contenders:
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for call, found in zip(contenders, times, strict=True):
            until = time.perf_counter() + TURN_S
            call()  # the caches are the other's
            while True:
                begin = time.perf_counter()
                call()
                now = time.perf_counter()
                found.append(now - begin)
                if now > until:
                    break
    return [statistics.median(t) for t in times]


def by_operator(module: OnnxModule, given: Sequence[Value], calls: int) -> list[tuple[float, int, str]]:
    """Microseconds of a call, and steps, by the operator that a step begins with; the dearest first."""
    ready = module.program.ready()
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for _ in range(calls):
        env = ready.template.copy()
        for slot, value in zip(module.program.in_slots, given, strict=True):
            env[slot] = value
        for call, ins, outs, frees, node in ready.calls:
            args = [env[i] for i in ins]
            begin = time.perf_counter()
            result = call(*args)
            took = time.perf_counter() - begin
            del args
            made = result if isinstance(result, tuple) else (result,)
            for slot, value in zip(outs, made):  # noqa: B905  an operator may return outputs nobody declared
                env[slot] = value
            for slot in frees:
                env[slot] = None
            name = f"{node.op} ({getattr(call, '__qualname__', type(call).__name__).replace('<locals>.', '')})"
            spent[name][0] += took
            spent[name][1] += 1
    return sorted(((s * 1e6 / calls, int(n) // calls, name) for name, (s, n) in spent.items()), reverse=True)


def measure(name: str, threads: int, seconds: float, steps: int) -> float:
    """Print a line, and give how many times as fast as ONNX Runtime the interpreter is."""
    model = entries.find(name).load()
    torch.set_num_threads(threads)
    peer, feed = ort_session(model, threads), model.inputs(1)
    assert model.path is not None
    module = OnnxModule(load(model.path))
    given = [torch.from_numpy(feed[p.name]) for p in module.inputs]
    with torch.no_grad():
        answers = module(*given)
        until = time.perf_counter() + 10
        while background.kernels is None and time.perf_counter() < until:
            time.sleep(0.01)  # the passes over bytes are compiled beside
        theirs, ours = in_turns((lambda: peer.run(None, feed), lambda: module(*given)), seconds)
        wanted = [torch.from_numpy(b) for b in peer.run(None, feed)]
        errors = [
            float((torch.as_tensor(a).double() - b).abs().max() / b.abs().max().clamp(min=1e-9))
            for a, b in zip(answers, wanted, strict=True)
            if b.numel() and b.is_floating_point()
        ]
        ratio = theirs / ours
        print(
            f"{name:30} {ours * 1e3:9.3f} ms, ONNX Runtime {theirs * 1e3:9.3f} ms: {ratio:5.2f}x; "
            f"{len(module.program.ready().calls)} steps; farthest from it {max(errors, default=0.0):.1e}",
            flush=True,
        )
        if steps:
            for spent, count, op in by_operator(module, given, max(1, min(200, int(0.3 / ours))))[:steps]:
                print(f"    {spent:9.1f} us  {count:4}  {op}")
    return ratio


def main() -> None:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=DEFAULT)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ratios = {n: round(measure(n, args.threads, args.seconds, args.steps), 4) for n in args.models.split(",")}
    print(f"geometric mean {statistics.geometric_mean(ratios.values()):.2f}x, worst {min(ratios.values()):.2f}x")
    if args.json:
        print(json.dumps(ratios))


if __name__ == "__main__":
    main()
