"""What a program does with constants alone is done once, when it first runs.

Exporters write down how weights are put together (slices and concatenations of an LSTM's gates), and operators put them into
torch's order; interpreting that in every call took more of a small model's time than the model. A step whose inputs are all
constants is run here and leaves the program; one with some constant inputs may have a `prepare` of its own.

Nobody outside can write to a model's constants. Where a call brings other values for initializers, a program of its own
is made of those (`OnnxModule.run_with`), and prepared anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx import control, limits
from hotfuse.frontends.onnx.constant_products import ConstantProduct
from hotfuse.frontends.onnx.constant_products import available as products_available
from hotfuse.frontends.onnx.conv_kernels import ConvKernels
from hotfuse.frontends.onnx.convs import Folded, folded
from hotfuse.frontends.onnx.int8.dynamic import dynamic_layers
from hotfuse.frontends.onnx.int8.qdq import on_bytes
from hotfuse.frontends.onnx.model_file import OnnxNode
from hotfuse.frontends.onnx.native_floats.native_recurrent import NativeRecurrent
from hotfuse.frontends.onnx.onnx_program import ABSENT, UNUSED, CallSource, Program, ProgramStep, Ready
from hotfuse.frontends.onnx.recording.recorded_runs import Call
from hotfuse.frontends.onnx.registry import VARIES
from hotfuse.frontends.onnx.values import Value
from hotfuse.ops.folded_conv import is_floats

RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators that may give something else in every call."""
EXTRA_BYTES = 1 << 20
"""How much more than the constants it is made of what is kept may take: weights of bytes stay bytes."""


def ready(program: Program) -> Ready:
    """The program with its constants prepared; as it stands where that fails, which is counted, and the run says what is wrong."""
    try:
        return _folded(program)
    except Exception as e:  # whatever an operator raises: the run meets the same one at the same node, and names it
        plain = [_made(s, s.call, nested=s.programs) for s in program.steps]
        why = error_text(e)  # not the exception, whose frames hold what was made so far
        return replace(_ready(program, program.template, plain, set(program.consts)), unprepared=why)


@dataclass(frozen=True, slots=True)
class _FixedCall:
    """A call that is part of every run."""

    call: Callable[..., Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    node: OnnxNode
    bytes: int = 0
    nested: tuple[Program, ...] = ()
    note: str = ""
    step: ProgramStep | None = None
    """None where it stands for several, or for none."""


def _made(
    step: ProgramStep, call: Callable[..., Any], bytes: int = 0, nested: tuple[Program, ...] = (), note: str = ""
) -> _FixedCall:
    return _FixedCall(call, step.ins, step.outs, step.node, bytes, nested, note, step)


def _folded(program: Program) -> Ready:
    known = {ABSENT, *program.consts}
    env = program.template.copy()
    read: dict[int, int] = {}
    """Of memory that steps are run on: its address, and how large it is."""
    made: dict[int, int] = {}
    left: list[ProgramStep] = []
    steps = program.steps
    if program.pack:
        for change in (on_bytes, dynamic_layers):
            steps = change(steps, known - {ABSENT}, env, program.out_slots)
    for step in steps:
        if _constant(step, known, program.out_slots):
            read.update(_memory(env[i] for i in step.ins))
            result = step.call(*[env[i] for i in step.ins])
            outs = result if isinstance(result, tuple) else (result,)
            new = {a: n for a, n in _memory(outs).items() if a not in read}
            tensors = len(outs) >= len(step.outs) and all(isinstance(v, torch.Tensor) for v in outs)
            if tensors and sum(made.values()) + sum(new.values()) <= sum(read.values()) + EXTRA_BYTES:
                for slot, value in zip(step.outs, outs):  # noqa: B905  an operator may return outputs nobody declared
                    env[slot] = value
                known.update(step.outs)
                made.update(new)
                continue
        left.append(step)
    used = {i for s in left for i in s.ins} | set(program.out_slots) | set(program.consts)
    template = [v if i in used else None for i, v in enumerate(env)]
    template[UNUSED] = None
    return _ready(program, template, _all_prepared(program, left, known, env), known)


def _all_prepared(program: Program, left: Sequence[ProgramStep], known: set[int], env: Sequence[Value]) -> list[_FixedCall]:
    """The steps that are left, each prepared; convolutions together with what follows them."""
    if not program.pack:
        return [_prepared(s, known, env, pack=False) for s in left]
    found = folded(left, known, env, program.out_slots) or Folded({}, frozenset(), {}, ())
    sums = _with_biases(left, known, env, program.out_slots)
    added = {place for place, _ in sums.values()}
    made: list[_FixedCall] = []
    for place, step in enumerate(left):
        made.extend(_in_rows(slot, step.node) for slot in found.rows.get(place, ()))
        if place in sums:
            last, product = sums[place]
            made.append(_FixedCall(product, step.ins[:1], left[last].outs, step.node))
        elif place in found.instead:
            conv, chain = found.instead[place]
            last = left[chain.places[-1]]
            call = Bounded(ConvKernels(conv), step, env[step.ins[1]])
            made.append(_FixedCall(call, step.ins[:1], last.outs, step.node, conv.bytes))
        elif place not in found.gone and place not in added:
            made.append(_prepared(step, known, env, pack=True))
    return [*made, *(_in_rows(slot, left[-1].node) for slot in found.rows_last)]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A folded convolution, refused where the one in the file would be (`limits`)."""

    conv: ConvKernels
    step: ProgramStep
    weight: Value

    def __call__(self, x: Any) -> Any:
        """The result for an image."""
        limits.check(self.step.node, (x, self.weight), self.step.attrs, limits.PREDICT[self.step.node.op])
        return self.conv(x)


def _in_rows(slot: int, node: OnnxNode) -> _FixedCall:
    return _FixedCall(torch.Tensor.contiguous, (slot,), (slot,), node)


def _ready(program: Program, template: list[Value], made: Sequence[_FixedCall], known: set[int]) -> Ready:
    originals = _memory(program.template)
    kept = {a: n for a, n in _memory(template).items() if a not in originals}
    nested = {id(p): p for m in made for p in m.nested}
    size, notes = sum(kept.values()) + sum(m.bytes for m in made), tuple(m.note for m in made if m.note)
    sources = tuple(CallSource(m.step, m.nested) for m in made)
    calls = [m.call.conv if isinstance(m.call, Bounded) else m.call for m in made]
    packs = tuple(call for call in calls if isinstance(call, (ConvKernels, ConstantProduct, NativeRecurrent)))
    return Ready(template, _calls(program, made, known), sources, size, tuple(nested.values()), notes=notes, packs=packs)


def _constant(step: ProgramStep, known: set[int], outputs: Sequence[int]) -> bool:
    """Whether a step gives the same in every call. What a call returns is its own: such a step stays."""
    return (
        step.kind == "op"
        and step.node.op not in RANDOM
        and any(i != ABSENT for i in step.ins)
        and all(i in known for i in step.ins)
        and not any(i in outputs for i in step.outs)
    )


def _prepared(step: ProgramStep, known: set[int], env: Sequence[Value], *, pack: bool) -> _FixedCall:
    """A step that knows which of its inputs are constants; with `pack` it may hold copies of them."""
    if pack and (product := _product(step, known, env)) is not None:
        return _made(step, product)
    if step.kind == "control":
        captures = len(step.programs[0].captures)
        given = {k: env[i] for k, i in enumerate(step.ins[len(step.ins) - captures :]) if i in known}
        if given:
            nested = tuple(p.knowing(given) for p in step.programs)
            return _made(step, control.bind(step.node, step.opset, nested, step.attrs), nested=nested)
    if step.prepare is not None:
        inputs = [env[i] if i in known else VARIES for i in step.ins]
        if (made := step.prepare(step.ctx, inputs, step.attrs)) is not None:
            call = made.call.plain if isinstance(made.call, (ConstantProduct, NativeRecurrent)) and not pack else made.call
            return _made(step, limits.guard(step.node, step.attrs, call), made.bytes, note=made.note)
    return _made(step, step.call, nested=step.programs)


def _with_biases(
    left: Sequence[ProgramStep], known: set[int], env: Sequence[Value], outputs: Sequence[int]
) -> dict[int, tuple[int, ConstantProduct]]:
    """Products with a constant matrix to whose results alone a constant row is added: by their places, those of the sums, and what
    computes both at once."""
    readers: dict[int, list[int]] = {}
    for place, step in enumerate(left):
        for slot in step.ins:
            readers.setdefault(slot, []).append(place)
    found: dict[int, tuple[int, ConstantProduct]] = {}
    for place, step in enumerate(left):
        after = readers.get(step.outs[0], [])
        if step.node.op != "MatMul" or len(after) != 1 or step.outs[0] in outputs:
            continue
        add = left[after[0]]
        if add.kind != "op" or add.node.domain not in ("", "ai.onnx") or add.node.op != "Add" or add.attrs:
            continue
        slot = next(i for i in add.ins if i != step.outs[0])
        bias, product = env[slot] if slot in known else None, _product(step, known, env)
        if product is None or not isinstance(bias, torch.Tensor) or not is_floats(bias, 1) or len(bias) != len(product.rows):
            continue
        found[place] = (after[0], ConstantProduct(product.rows, bias, _sum_of(product.rows, bias)))
    return found


def _sum_of(rows: torch.Tensor, bias: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.nn.functional.linear(x, rows, bias)


def _product(step: ProgramStep, known: set[int], env: Sequence[Value]) -> ConstantProduct | None:
    """A step's call where it multiplies something that varies with a constant matrix; None for others."""
    if step.kind != "op" or step.node.domain not in ("", "ai.onnx") or step.node.op not in ("MatMul", "Gemm"):
        return None
    if len(step.ins) < 2 or step.ins[0] in known or not products_available():
        return None
    weight = env[step.ins[1]] if step.ins[1] in known else None
    if not isinstance(weight, torch.Tensor) or not is_floats(weight, 2) or not weight.numel():
        return None
    if step.node.op == "MatMul":
        return ConstantProduct(weight.t(), None, step.call)
    if step.attrs.get("transA") or any(step.attrs.get(k, 1.0) != 1.0 for k in ("alpha", "beta")):
        return None
    rows = weight if step.attrs.get("transB") else weight.t()
    if len(step.ins) < 3:
        return ConstantProduct(rows, None, step.call)
    bias = env[step.ins[2]] if step.ins[2] in known else None
    if not isinstance(bias, torch.Tensor) or not is_floats(bias, 1) or bias.shape[0] != rows.shape[0]:
        return None
    return ConstantProduct(rows, bias, step.call)


def _calls(program: Program, made: Sequence[_FixedCall], known: set[int]) -> tuple[Call, ...]:
    seen = {ABSENT, UNUSED, *program.out_slots, *known}
    calls: list[Call] = []
    for m in reversed(made):
        last = tuple(i for i in dict.fromkeys((*m.ins, *m.outs)) if i not in seen)
        seen.update(last)
        calls.append((m.call, m.ins, m.outs, last, m.node))
    return tuple(reversed(calls))


def _memory(values: Iterable[Value]) -> dict[int, int]:
    """Blocks of memory behind tensors: address and size."""
    blocks = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided]
    return {b.data_ptr(): b.nbytes() for b in blocks}
