# pyright: reportPrivateUsage=false
# Torch keeps what a front end needs private.
"""A PyTorch module or function becomes a graph, through torch.export on fake weights.

This runs in a worker process (or in the caller's, for tools and tests). Nothing is decomposed: `linear`, `layer_norm`,
`scaled_dot_product_attention` stay whole. Dims that the calls showed to vary are left to torch to generalize (`Dim.AUTO`);
what tracing assumed about them becomes the graph's guards.
"""

from __future__ import annotations

import functools
import traceback
import types
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from hotfuse.base.changed_arguments import contents, take_after
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.faults import error_text
from hotfuse.base.structure import Spec, StructureBuilder, read_beside
from hotfuse.frontends.as_in_eager.exporting import not_exported
from hotfuse.frontends.as_in_eager.extremes import extremes_as_in_eager
from hotfuse.frontends.as_in_eager.fused_layers import with_eagers_masks
from hotfuse.frontends.as_in_eager.idle_conversions import without_idle_conversions
from hotfuse.frontends.as_in_eager.nested import without_nested_tensors
from hotfuse.frontends.as_in_eager.packed_sequences import over_padded_sequences, padded
from hotfuse.frontends.assumptions import assumptions, input_symbols
from hotfuse.frontends.captured import Asked, CallSpec, Captured
from hotfuse.frontends.derived_weights import computed_in_the_layer
from hotfuse.frontends.fx import PlaceholderRole, location, to_graph
from hotfuse.frontends.model_parts import hold
from hotfuse.frontends.paths.follow import AssumedReads, without_assertions
from hotfuse.frontends.paths.join import joined
from hotfuse.frontends.paths.reads import Path as DataPath
from hotfuse.frontends.plain_numbers import TruthsAreRead, plain_numbers
from hotfuse.frontends.questions.asked_tensors import Questions, asked_identity
from hotfuse.frontends.questions.asked_types import NAME, naming, types_as_in_eager
from hotfuse.frontends.ship import TensorInfo, describe, unship
from hotfuse.frontends.side_effects import Observed, observed
from hotfuse.frontends.tracing import grad_mode_asked


class Given:
    """What a traced call gave; export puts attributes of modules back, and knows nothing of this one's."""

    spec: Spec | None = None
    """How what it gives and changes is nested."""
    marked: frozenset[str] = frozenset()
    """Symbols of which everything that was asked is marked."""
    asked: tuple[Asked, ...] = ()
    """What was asked of arguments."""


class Flat(nn.Module):
    """The user's model with flat tensors in and flat leaves out."""

    def __init__(self, target: Any, spec: Spec, call: CallSpec, path: DataPath | None, seen: Observed) -> None:
        super().__init__()
        self._path = path
        self.given = Given()
        self.seen = seen
        self.target = _as_forward(target)
        self._spec = spec
        self._equal, self._same = call.equal, call.same

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Put the call together, make it, take apart what it gives and what it changes."""
        for (i, d), *others in self._equal:
            for j, e in others:
                torch._check(tensors[i].shape[d] == tensors[j].shape[e])  # one symbol from here on, and a guard
        tensors = tuple(tensors[i] for i in self._same) or tensors
        builder = StructureBuilder(tensors)
        args, kwargs = builder.build(self._spec)
        holders = tuple(builder.holders)
        before = [contents(h) for h in holders]
        reads = AssumedReads(self._path, tensors) if self._path is not None else None
        wanted, named = [t.requires_grad for t in tensors], [_attributes(t) for t in tensors]
        questions = Questions(tensors, self._weights(), self.seen.done.append)
        with (
            self.seen.call(self.target, read_beside(self._spec)) as reached, questions, questions.of_attributes(),
            types_as_in_eager(naming(NAME, reached.functions), questions.of_class),
            reads or TruthsAreRead(), extremes_as_in_eager(followed=reads is not None),
        ):  # fmt: skip
            result = self.target(*args, **kwargs)
        for what in sorted({*map(asked_identity, reached.functions)} - {""}):
            questions.of_identity(what)
        self.given.asked = tuple(questions.asked)
        if wanted != [t.requires_grad for t in tensors]:
            self.seen.done.append("makes an argument require gradients")
        if any(t.is_leaf and t.grad is not None for t in (*tensors, *self._weights())):
            self.seen.done.append("gives a tensor a gradient")
        after = take_after(result, holders, before)
        made = [leaf for leaf in after.leaves if isinstance(leaf, torch.Tensor) and not any(leaf is t for t in tensors)]
        if named != [_attributes(t) for t in tensors] or any(map(_attributes, made)):
            self.seen.done.append("gives a tensor an attribute of its own")
        self.given.spec = after.spec
        if reads is not None:
            self.given.marked = reads.finish()
        return tuple(after.leaves)

    def _weights(self) -> list[torch.Tensor]:
        return [*self.parameters(), *self.buffers()]


@functools.cache
def _torchs_attributes() -> frozenset[str]:
    """What torch keeps in a traced tensor."""
    return frozenset(vars(FakeTensorMode().from_tensor(torch.empty(0)))) | {"_is_param"}


def _attributes(t: torch.Tensor) -> set[str]:
    """What code has written on a tensor (`x.scale = 2`): a graph's tensors have nothing of that."""
    return {name for name in vars(t) if name not in _torchs_attributes() and not name.startswith("_dynamo")}


class _Method(nn.Module):
    """A method of a module; the function itself is called, whatever the module's attribute of that name is by now."""

    def __init__(self, owner: nn.Module, function: Any) -> None:
        super().__init__()
        self.owner = owner
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.function(self.owner, *args, **kwargs)


def _as_forward(target: Any) -> Any:
    """A function under the name `forward`: export keeps the source lines of frames with that name only.

    A method of a module is a module, too, or its parameters would be constants of the graph.
    """
    if isinstance(target, types.MethodType) and isinstance(target.__self__, nn.Module):
        return _Method(target.__self__, target.__func__)
    if not isinstance(target, types.FunctionType):
        return target
    code = target.__code__.replace(co_name="forward")
    named = types.FunctionType(code, target.__globals__, "forward", target.__defaults__, target.__closure__)
    named.__kwdefaults__ = target.__kwdefaults__
    return named


def capture_shipment(blob: bytes, call: CallSpec) -> Captured:
    """Capture what `ship((module, spec))` packed."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    target, spec, tensors = unship(blob, mode)
    traced_as_in_eager(hold(target, spec).modules)
    return capture(target, spec, tensors, call, mode)


def traced_as_in_eager(modules: Iterable[nn.Module]) -> None:
    """Have modules that are traced, and nobody else's, compute what they do in eager, where torch runs other code for a trace."""
    modules = tuple(modules)
    without_nested_tensors(modules)
    with_eagers_masks(modules)
    over_padded_sequences(modules)
    computed_in_the_layer(modules)
    without_idle_conversions(modules)


def capture(
    target: Any, spec: Spec, tensors: Sequence[torch.Tensor], call: CallSpec, mode: FakeTensorMode,
    twins: Sequence[torch.Tensor] = (),
) -> Captured:
    """Export `target` for calls that look like `call`; raises CaptureError with the user's line.

    `twins` are what stands for each of the tensors while tracing, where that is something else. Where the model's code reads its
    data, each path that calls took through it is traced.
    """
    if call.paths is None:
        return _traced(target, spec, tensors, call, None, mode, twins)[0]
    return joined([_traced(target, spec, tensors, call, path, mode, twins) for path in call.paths])


def _traced(
    target: Any, spec: Spec, tensors: Sequence[torch.Tensor], call: CallSpec, path: DataPath | None, mode: FakeTensorMode,
    twins: Sequence[torch.Tensor],
) -> tuple[Captured, Spec]:
    """Along one path, which is marked in the graph; and how what it gives is nested."""
    with mode:
        args = tuple(torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=t.device) for t in call.inputs)
    auto = torch.export.Dim.AUTO
    dynamic = tuple({d: auto for d in sorted(t.dynamic)} for t in call.inputs)
    with (
        torch.set_grad_enabled(call.grad_mode), grad_mode_asked() as asked, observed() as seen, padded(),
        plain_numbers(seen.done.append), not_exported(),
    ):  # fmt: skip
        flat = Flat(target, spec, call, path, seen)
        program = _export(flat, args, dynamic)
    given = [location(node) for node in program.graph.nodes if node.target is _GIVES_MEMORY]
    seen.done += [f"gives a tensor other memory @ {at.file}:{at.line}" for at in given]
    seen.refuse()
    if _maps(program):
        # nothing of the model's code runs any more: what happens is torch's doing, and nobody's to hear
        with torch.set_grad_enabled(call.grad_mode), warnings.catch_warnings(), _told_as_capture_error(flat):
            warnings.simplefilter("ignore")
            program = program.run_decompositions({})
    if path is not None:
        without_assertions(program.graph_module.graph, flat.given.marked)
    numbers = {_memory(t): i for each in (tensors, twins) for i, t in enumerate(each)}
    roles: list[PlaceholderRole] = []
    shared: dict[str, int] = {}
    constants: dict[str, TensorInfo] = {}
    for entry in program.graph_signature.input_specs:
        if entry.kind is InputKind.USER_INPUT:
            roles.append(PlaceholderRole("input" if _is_tensor(program, entry.arg.name) else "unused"))
            continue
        key, found = _weight(flat, program, entry)
        roles.append(PlaceholderRole("param", key))
        if (number := numbers.get(_memory(found))) is not None:
            shared[key] = number
        elif isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor):
            constants[key] = describe(found.detach(), with_data=True)
        else:
            raise CaptureError(f"the graph holds {entry.kind.name.lower()} {key!r} whose data is not known here")
    done = to_graph(program.graph_module, roles, strip_prefix="target", writable=True)
    used = {p.key for p in done.graph.params}
    guards = assumptions(_shape_env(program), input_symbols(done.graph))
    captured = Captured(
        replace(done.graph, guards=guards),
        {k: n for k, n in shared.items() if k in used},
        {k: c for k, c in constants.items() if k in used},
        bool(asked),
        written=done.written,
        returned=done.returned,
        draws=done.draws,
        warned=tuple(seen.warned),
        logged=tuple(seen.logged),
        asked=flat.given.asked,
    )
    assert flat.given.spec is not None
    return captured, flat.given.spec


def _export(flat: Flat, args: tuple[torch.Tensor, ...], dynamic: tuple[dict[int, Any], ...]) -> Any:
    shapes = {"tensors": dynamic} if args else None  # a function of nothing has no name to give shapes to
    with _told_as_capture_error(flat):
        return torch.export.export(flat, args, dynamic_shapes=shapes, strict=False)


@contextmanager
def _told_as_capture_error(flat: Flat) -> Generator[None]:
    try:
        yield
    except CaptureError:
        flat.seen.refuse()
        raise
    except Exception as e:
        flat.seen.refuse()
        raise CaptureError(
            "the model cannot be captured", where=_user_line(e), because=error_text(e),
            hint="it keeps running as it is; avoid branches on tensor values for a graph",
            why=Why.READS_DATA if _reads_data(e) else Why.NOT_CAPTURABLE,
        ) from e


def _maps(program: Any) -> bool:
    """Whether a graph has `torch.vmap` in it, which is traced as what begins and ends it; without decompositions of its own export
    writes the operators down that it comes to, and leaves others whole."""
    calls = (n.target for n in program.graph.nodes if n.op == "call_function")
    return any(getattr(t, "__module__", "") == "torch._functorch.predispatch" for t in calls)


def _reads_data(e: BaseException | None) -> bool:
    """Whether tracing ended where the model's code asks for what data decide."""
    while e is not None:
        if isinstance(e, GuardOnDataDependentSymNode | DataDependentOutputException | DynamicOutputShapeException):
            return True
        e = e.__cause__ or e.__context__
    return False


_GIVES_MEMORY = torch.ops.aten._has_compatible_shallow_copy_type.default
"""All that a trace shows of `t.data = ...`; what `t` stands for in the graph goes on being what it was."""
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)


def _user_line(e: BaseException) -> str:
    """The deepest frame of the traceback that is the user's own."""
    lines = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith((_TORCH, _OURS, "<"))]
    return f"{lines[-1].filename}:{lines[-1].lineno} in {lines[-1].name}" if lines else ""


def _memory(t: Any) -> Any:
    """What makes two tensors the same one; export keeps memory, not always objects."""
    if not isinstance(t, torch.Tensor):
        return None
    return t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), tuple(t.stride()), t.dtype


def _shape_env(program: Any) -> ShapeEnv:
    """The environment that export traced with: not the one of the fakes it was given."""
    for node in program.graph.nodes:
        if isinstance(val := node.meta.get("val"), FakeTensor) and val.fake_mode.shape_env is not None:
            return val.fake_mode.shape_env
    return ShapeEnv()


def _is_tensor(program: Any, name: str) -> bool:
    node = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name == name)
    return isinstance(node.meta.get("val"), torch.Tensor)


def _weight(flat: Flat, program: Any, entry: Any) -> tuple[str, Any]:
    """A placeholder's key in the model's terms, and the tensor it stands for."""
    name = str(entry.target)
    key = name.removeprefix("target.") or name
    if entry.kind is InputKind.PARAMETER:
        return key, flat.get_parameter(name)
    if entry.kind is InputKind.BUFFER:
        return key, flat.get_buffer(name)
    return key, program.constants.get(name)
