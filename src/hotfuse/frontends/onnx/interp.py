"""Run an ONNX model at once, as a torch module over its compiled program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from hotfuse.base.errors import InputError, ModelError
from hotfuse.frontends.onnx.model_file import OnnxModel, Port
from hotfuse.frontends.onnx.program_builder import Compiler
from hotfuse.frontends.onnx.values import Value, from_any
from hotfuse.machine.turnstile import UNMEASURED, Turnstile


class OnnxModule(torch.nn.Module):
    """A loaded model as a torch module: `forward(*inputs) -> tuple` in the order of the graph's inputs and outputs."""

    def __init__(self, model: OnnxModel, on_fallback: Callable[[str], None] | None = None, *, pack: bool = True) -> None:
        super().__init__()
        self.model = model
        self.fallbacks: Counter[str] = Counter()
        """Per operator, how often it ran through `onnx.reference`."""
        self._on_fallback = on_fallback
        self._turnstile = Turnstile()
        compiler = Compiler(model.functions, self._fell_back, pack=pack)
        try:
            self.program = compiler.graph(model.graph, model.opsets)
        except ModelError as e:
            raise ModelError(
                f"cannot load {model.source}: {e.what}", where=e.where, because=e.because, hint=e.hint
            ) from e
        self.weights: dict[str, Value] = compiler.weights
        """Every constant by name: initializers, Constant nodes, those of nested graphs under a path.

        Strings and 4-bit numbers are NumPy arrays.
        """

    def _fell_back(self, op: str) -> None:
        self.fallbacks[op] += 1
        if self._on_fallback is not None:
            self._on_fallback(op)

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The inputs a call must give, in order."""
        return self.model.inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """The outputs, in order."""
        return self.model.outputs

    @property
    def prepared_bytes(self) -> int:
        """Memory of what was computed of constants when the model first ran."""
        return self.program.prepared_bytes

    @property
    def unprepared(self) -> tuple[str, ...]:
        """Programs of the model whose constants are computed with in every call, and why."""
        return self.program.unprepared

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of how the interpreter runs it, and of how many nodes."""
        found = [f"{note} ({n} of its nodes)" for note, n in Counter(self.program.notes).items()]
        if kinds := self.program.recordings:
            told = f"sizes that come again have calls of their own in it: {kinds} recordings"
            found.append(f"{told}, {self.program.recorded_steps} calls at most instead of {self.program.prepared_steps}")
        return tuple(found)

    @property
    def callers(self) -> str:
        """What limits the calls that run at once; empty where no call has waited."""
        most, waited = self._turnstile.most, self._turnstile.waited
        return f"{most} calls run in it at once, as Python's lock allows; {waited} have waited for a place" if waited else ""

    def forward(self, *inputs: Value) -> tuple[Value, ...]:
        """Run the model on tensors (NumPy arrays are taken too)."""
        if len(inputs) != len(self.program.in_slots):
            raise InputError(
                f"the model takes {len(self.program.in_slots)} inputs, {len(inputs)} were given",
                hint="in order: " + ", ".join(p.name for p in self.inputs),
            )
        since = self._turnstile.enter(measurable=self.program.prepared)
        try:
            args = [x if isinstance(x, torch.Tensor) else from_any(x) for x in inputs]
            if torch.is_grad_enabled():
                with torch.no_grad():
                    made = self.program.run(args)
            else:  # a session has seen to it, and the context costs as much as an operator
                made = self.program.run(args)
            if since != UNMEASURED:
                self._turnstile.measure(since, self.program.recorded_steps or self.program.prepared_steps)
            return made
        finally:
            self._turnstile.leave()

    def run_with(self, inputs: Sequence[Value], overrides: Mapping[str, Value]) -> tuple[Value, ...]:
        """Run with other values for initializers that the model also declares as inputs."""
        program = self.program
        template = program.template.copy()
        allowed = {p.name for p in self.model.overridable}
        for name, value in overrides.items():
            if name not in allowed:
                raise InputError(f"unknown input {name!r}", hint="one of " + ", ".join(p.name for p in self.inputs))
            default = self.model.graph.initializers[name]
            template[next(i for i in program.consts if program.template[i] is default)] = from_any(value)
        other = replace(program, template=template, captures=(), graph=None, pack=False, record=None, _ready=None, _runs=None)
        with torch.no_grad():
            return other.run([from_any(x) for x in inputs])
