"""`hotfuse watch`: serve a model for some seconds and show, as it goes on, what was seen of its values, what is bet on them, how
often that held and what it saved.

    hotfuse watch model.onnx --seconds 30            a table every few seconds, the last one at the end
    hotfuse watch mymodels:encoder --hold 1          the second input stays the same from call to call, the others change
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from hotfuse.base.errors import InputError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.cli.model_inputs import make_feeds, owning_up
from hotfuse.cli.output import pairs, print_json, reports_errors
from hotfuse.cli.torch_models import is_torch_name, load_torch, owning_errors

if TYPE_CHECKING:
    from hotfuse.explain import Explanation

class WatchedModel(Protocol):
    """A model that is served, in torch or of a file."""

    def wait(self, timeout: float | None = None) -> bool:
        """Until background work is done."""
        ...

    def explain(self, *, full: bool = False) -> Explanation:
        """What runs now and why."""
        ...


FEEDS = 32
"""Sets of inputs that calls take in turn, so that they differ."""


@reports_errors
def watch(
    model: Annotated[str, typer.Argument(help="An ONNX model, or package.module:name of a PyTorch one.")],
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to serve it.")] = 20.0,
    calls: Annotated[int | None, typer.Option(min=1, help="How many calls at most.")] = None,
    wait: Annotated[bool, typer.Option(help="Now and then, wait until background work is done.")] = True,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two tables.")] = 5.0,
    hold: Annotated[list[str] | None, typer.Option(help="An input (by name, or its number) that stays as it is.")] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="name=file.npy, or name=number to fill the input; random otherwise. PyTorch: 2x16:int64."),
    ] = None,
    dims: Annotated[list[str] | None, typer.Option("--dim", help="name=size of a dynamic dim.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to use.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, at the end.")] = False,
) -> None:
    """Serve a model and show per value what was seen, what is bet on it, how often that held and what it saved."""
    def show(found: Explanation) -> None:
        if not as_json:
            typer.echo("\n".join(watched_lines(found.to_dict())) + "\n")

    pace = Pace(seconds, calls, every, wait, show)
    serve = _torch if is_torch_name(model) else _onnx
    last = serve(model, inputs or [], dims or [], hold or [], threads, seed, pace)
    if as_json:
        print_json(last.to_dict())


def watched_lines(data: dict[str, Any]) -> list[str]:
    """What was seen, and what is bet on it."""
    from hotfuse.runtime.observe.savings import bet_text, input_lines, inside_text

    lines = [f"{data['model']}: {sum(p['calls'] for s in data['sites'] for p in s['plans'])} calls in captured graphs"]
    for site in data["sites"]:
        for plan in site["plans"]:
            lines.append(f"  plan of tier {plan['tier']}, {plan['calls']} calls"
                         + (f", {plan['measured_us']} us a call" if plan.get("measured_us") else ""))  # fmt: skip
            lines += [f"    {line}" for line in input_lines(plan)]
            lines += [f"    bet: {bet_text(b)}" for b in plan["bets"]] or ["    bet: nothing so far"]
            lines += [f"    decided inside kernels: {inside_text(i)}" for i in plan["inside"]]
            lines += [f"    refused: {what}: {why}" for what, why in plan["refused"].items()]
            if plan["trying"]:
                lines.append(f"    being tried: {plan['trying']}")
    return lines + [f"  {line}" for line in data["watching"].splitlines()]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to serve, and when to show something."""

    seconds: float
    calls: int | None
    every: float
    wait: bool
    show: Callable[[Explanation], None]

    def serve(self, call: Callable[[int], object], model: WatchedModel) -> Explanation:
        """Calls one after the other; what was seen in the end."""
        begin = shown = time.monotonic()
        end, i = begin + self.seconds, 0
        while i == 0 or ((now := time.monotonic()) < end and (self.calls is None or i < self.calls)):
            call(i)
            if self.wait and i & (i + 1) == 0:  # after 1, 2, 4, 8, ... calls
                model.wait(max(0.0, end - time.monotonic()))
            i += 1
            if (now := time.monotonic()) >= shown + self.every:
                self.show(model.explain(full=True))
                shown = now
        last = model.explain(full=True)
        self.show(last)
        return last


def _torch(
    name: str, inputs: list[str], _dims: list[str], hold: list[str], threads: int | None, seed: int, pace: Pace
) -> Explanation:
    import torch

    from hotfuse.api import jit

    torch.manual_seed(seed)
    target, args, _ = load_torch(name, inputs)
    held = {_number(h, len(args)) for h in hold}
    turns: list[list[Any]] = []
    for _ in range(FEEDS):
        turns.append([a if i in held or not isinstance(a, torch.Tensor) else _other(a) for i, a in enumerate(args)])
    with torch.no_grad(), jit(target, threads=threads) as fast, owning_errors(name):
        return pace.serve(lambda i: fast(*turns[i % FEEDS]), fast)


def _other(t: Any) -> Any:
    """A tensor of the same kind with other contents: the elements in another order, so that whatever they mean stays possible."""
    import torch

    return t.flatten()[torch.randperm(t.numel())].reshape(t.shape)


def _number(name: str, count: int) -> int:
    if not name.isdigit() or int(name) >= count:
        raise InputError(f"no input {name}", because=f"the model takes {count}", hint="name it by its number, from 0 on")
    return int(name)


def _onnx(
    model: str, inputs: list[str], dims: list[str], hold: list[str], threads: int | None, seed: int, pace: Pace
) -> Explanation:
    from hotfuse.session import InferenceSession, SessionOptions

    options = SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    given, sizes = pairs(inputs, "--input"), pairs(dims, "--dim")
    with InferenceSession(Path(model), options) as session:
        declared = session.get_inputs()
        names = [d.name for d in declared]
        held = {h if h in names else names[_number(h, len(names))] for h in hold}
        feeds = [make_feeds(declared, given, sizes, seed + i) for i in range(FEEDS)]
        for feed in feeds[1:]:
            feed.arrays.update({name: feeds[0].arrays[name] for name in held})

        def call(i: int) -> None:
            with owning_up(feeds[i % FEEDS]):
                session.run(None, feeds[i % FEEDS].arrays)

        return pace.serve(call, session)
