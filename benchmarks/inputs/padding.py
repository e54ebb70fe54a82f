"""Padded batches: a BERT encoder with a masked mean, 8 sequences padded to 128, shares of real tokens from 10% to 100%.

With `--quick` the model has two layers of BERT-base's width, and the plans are compiled and run as they are, without serving, in
CPU time of the calling thread: that holds on a busy machine, on one thread. There packing runs at every share, also at 100%, where
a served call goes to the plan with every row.

Without it, contenders take turns on the same batches: the model's own code, Inductor, ONNX Runtime, OpenVINO, our plan with every
row (`padding="keep"`) and our plan as it comes by default, for the module and for its ONNX file. Peers have plans for the very
sizes. `error` is the largest difference from the own code's output.

Whole batches are measured twice: right behind padded traffic, where no kernels for them are there yet, and when such batches came
for a while.
"""

from __future__ import annotations

import io
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hotfuse
from benchmarks import quiet
from hotfuse.pipeline import compile_tier1
from hotfuse.runtime.serve.packing import PackedRun
from hotfuse.runtime.tierup.padding import padded_traffic

SEQUENCES, LENGTH, VOCABULARY = 8, 128, 30522
SHARES = (0.10, 0.25, 0.33, 0.50, 0.75, 1.0)
LINES = (*((s, False) for s in SHARES), (0.33, True))
ROUNDS, WARM_S = 3, 120.0
NAMES = ("eager", "every row", "packed", "file", "ONNX Runtime", "OpenVINO", "Inductor")
MOSTLY, USED_S, STEADY = 0.8, 60.0, 3
"""From which share on batches are measured behind such batches as well; seconds of these, at most; looks without another plan."""


class Encoder(torch.nn.Module):
    """A sentence encoder."""

    def __init__(self, layers: int, width: int) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        self.bert = BertModel(BertConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
                                         intermediate_size=4 * width, vocab_size=VOCABULARY), add_pooling_layer=False)  # fmt: skip

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        rows = attention_mask.unsqueeze(-1).to(x.dtype)
        return (x * rows).sum(1) / rows.sum(1).clamp(min=1e-9)


def batch(share: float, holes: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of which so many tokens are real: a prefix of each sequence, of a length of its own, or anywhere."""
    real = round(share * LENGTH)
    lengths = [max(1, min(LENGTH, real + round((i - (SEQUENCES - 1) / 2) * real / SEQUENCES))) for i in range(SEQUENCES)]
    if share >= 1:
        lengths = [LENGTH] * SEQUENCES
    mask = (torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]).long()
    if holes:
        mask = torch.stack([row[torch.randperm(LENGTH)] for row in mask])
    return torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH)), mask


Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def of_session(session: Any) -> Run:
    """A session, called like the model."""
    return lambda ids, mask: torch.from_numpy(
        session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
    )


def exported(model: Encoder) -> bytes:
    """The model's file, sizes open."""
    file, names = io.BytesIO(), ["input_ids", "attention_mask"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, batch(0.5), file, input_names=names, dynamic_axes={n: {0: "b", 1: "s"} for n in names},
                          dynamo=False)  # fmt: skip
    return file.getvalue()


def of_openvino(file: bytes) -> Run:
    """OpenVINO for latency, in f32, at the batches' sizes."""
    ov = quiet.openvino()
    model = ov.Core().read_model(file)
    model.reshape({n: [SEQUENCES, LENGTH] for n in ("input_ids", "attention_mask")})
    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1,
                "INFERENCE_NUM_THREADS": torch.get_num_threads()}  # fmt: skip
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
    return lambda ids, mask: torch.from_numpy(next(iter(request.infer([ids.numpy(), mask.numpy()]).values())).copy())


def of_inductor(model: Encoder) -> Run:
    """Inductor at the batches' sizes."""
    compiled: Any = torch.compile(model, dynamic=False)
    compiled(*batch(0.5))
    return lambda ids, mask: compiled(ids, mask)


def used_to(run: Run, served: Any, share: float) -> None:
    """Serve batches with so many real tokens until no other plan comes for them, within a limit."""
    end, before, same = time.monotonic() + USED_S, None, 0
    while time.monotonic() < end and same < STEADY:
        for _ in range(4):
            run(*batch(share))
        served.wait(max(0.0, end - time.monotonic()))
        swaps = served.stats()["swaps"]
        same, before = (same + 1 if swaps == before else 0), swaps


def warmed(run: Run, served: Any) -> float:
    """Serve padded batches until nothing is being made any more, within a limit; seconds that it took."""
    begin = time.monotonic()
    end = begin + WARM_S
    while time.monotonic() < end:
        before = served.stats()["calls_per_tier"]["2"]
        for _ in range(4):
            run(*batch(0.33))
        served.wait(max(0.0, end - time.monotonic()))
        if before and served.stats()["calls_per_tier"]["2"] > before:
            break
    return time.monotonic() - begin


def rows(quick: bool, contenders: Sequence[str] = NAMES, shares: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Milliseconds a batch, by share of real tokens; of some contenders and shares only, where a run is to be short."""
    torch.manual_seed(0)
    if quick:
        return of_plans(Encoder(2, 768).eval())
    if unknown := sorted(set(contenders) - set(NAMES)):
        raise SystemExit(f"no contender {unknown[0]!r}: {', '.join(NAMES)}")
    model = Encoder(12, 768).eval()
    with torch.no_grad():
        runs: dict[str, Run] = {"eager": model}
        served: dict[str, Any] = {}
        if "every row" in contenders:
            served["every row"] = runs["every row"] = hotfuse.jit(model, settings=hotfuse.Settings(padding="keep"))
        if "packed" in contenders:
            served["packed"] = runs["packed"] = hotfuse.jit(model)
        file = exported(model) if {"file", "ONNX Runtime", "OpenVINO"} & set(contenders) else b""
        if "file" in contenders:
            served["file"] = hotfuse.InferenceSession(file)
            runs["file"] = of_session(served["file"])
        if "ONNX Runtime" in contenders:
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            runs["ONNX Runtime"] = of_session(onnxruntime.InferenceSession(file, options))
        if "OpenVINO" in contenders:
            runs["OpenVINO"] = of_openvino(file)
        if "Inductor" in contenders:
            runs["Inductor"] = of_inductor(model)
        for name, one in served.items():
            took = warmed(runs[name], one)
            print(f"{name}: {took:.0f} s until nothing was being made any more", flush=True)
        found: list[dict[str, Any]] = []
        for share, holes in LINES:
            if not shares or share in shares:
                found.append(measured(runs, share, holes))
                print(found[-1], flush=True)
            if found and share > MOSTLY and (not shares or share in shares):
                for name, one in served.items():
                    used_to(runs[name], one, share)
                found.append(measured(runs, share, holes, behind="such batches"))
                print(found[-1], flush=True)
    for one in served.values():
        one.close()
    return found


def of_plans(model: Encoder) -> list[dict[str, Any]]:
    """The plan with every row and the packed one, side by side, by CPU time."""
    settings = hotfuse.Settings(threads=torch.get_num_threads())
    with torch.no_grad():
        served: Any = hotfuse.jit(model, settings=settings.with_(capture="inline", tiers=0))
        calls = [batch(0.33) for _ in range(3)]
        for call in calls:
            served(*call)
        entry = next(iter(served._engine.sites.values())).entries[0]
        found = padded_traffic(entry.baseline.graph, entry.weights, calls, ignore_outputs=False)
        given = found.packer(calls[0])
        assert isinstance(given, tuple), given
        packed = compile_tier1(found.packing.graph, entry.weights, [*calls[0], *given], settings)
        plain = compile_tier1(entry.baseline.graph, entry.weights, calls[0], settings)
        run = PackedRun(found.packer, packed.run, plain.run)
        contenders: dict[str, Run] = {
            "eager": model, "every row": lambda *call: plain.run(*call)[0], "packed": lambda *call: run(*call)[0]
        }  # fmt: skip
        made = [measured(contenders, s, holes, time.thread_time) for s, holes in LINES]
    served.close()
    return made


def measured(
    contenders: dict[str, Run], share: float, holes: bool, clock: Callable[[], float] = time.perf_counter, behind: str = ""
) -> dict[str, Any]:
    """One line: the median of rounds in turns, on batches of their own."""
    took: dict[str, list[float]] = {name: [] for name in contenders}
    error = 0.0
    for _ in range(ROUNDS):
        inputs = batch(share, holes)
        outputs: dict[str, torch.Tensor] = {}
        for name, run in contenders.items():
            begin = clock()
            outputs[name] = run(*inputs)
            took[name].append((clock() - begin) * 1e3)
        error = max(error, *(float((y - outputs["eager"]).abs().max()) for y in outputs.values()))
    middle = {name: statistics.median(times) for name, times in took.items()}
    over = {f"{n} over eager": round(middle["eager"] / middle[n], 2) for n in ("packed", "file") if n in middle}
    if {"packed", "every row"} <= middle.keys():
        over["packed over every row"] = round(middle["every row"] / middle["packed"], 2)
    if {"packed", "every row"} & middle.keys() and (peers := {"ONNX Runtime", "OpenVINO", "Inductor"} & middle.keys()):
        best = min(middle[n] for n in peers)
        over["packed over the best peer"] = round(best / middle["packed" if "packed" in middle else "every row"], 2)
    real = {"real": f"{share:.0%}{' with holes' if holes else ''}", **({"behind": behind} if behind else {})}
    return {**real, **{n: round(t, 1) for n, t in middle.items()}, **over, "error": f"{error:.1e}"}
