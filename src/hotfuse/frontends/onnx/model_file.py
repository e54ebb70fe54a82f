"""An ONNX model as plain frozen data: what the file says, checked, with tensors decoded.

    model    ::= graph, opset per domain, functions, metadata
    graph    ::= inputs, initializers, nodes in a topological order, outputs, declared types of inner values
    node     ::= outputs = op(inputs, attributes) where an attribute may be a graph
    function ::= nodes over named inputs and attributes, with opsets of its own

Absent optional inputs and outputs are empty names, as in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.values import BY_CODE, Value

PortKind = Literal["tensor", "sparse", "sequence", "optional", "map", "unknown"]
DeclaredDim = int | str | None
"""A size, the name of a symbolic size, or nothing said."""


@dataclass(frozen=True, slots=True)
class PortType:
    """A declared type; `elem` is ONNX's element code (0 when not said) and `shape` None when the rank is not said."""

    kind: PortKind = "unknown"
    elem: int = 0
    shape: tuple[DeclaredDim, ...] | None = None
    of: PortType | None = None
    """The element of a sequence or optional, or the value of a map (`elem` is then the key)."""

    def __str__(self) -> str:
        name = BY_CODE[self.elem].name if self.elem in BY_CODE else "undefined"
        match self.kind:
            case "tensor":
                return f"tensor({name})"
            case "sparse":
                return f"sparse_tensor({name})"
            case "sequence":
                return f"seq({self.of})"
            case "optional":
                return f"optional({self.of})"
            case "map":
                return f"map({name},{self.of})"
            case "unknown":
                return "undefined"


@dataclass(frozen=True, slots=True)
class Port:
    """A graph's named input or output."""

    name: str
    type: PortType = PortType()


@dataclass(frozen=True, slots=True)
class AttrRef:
    """Inside a function: the value of the function's attribute of that name."""

    name: str


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One node; `attrs` holds plain Python numbers, strings and lists, decoded tensors, `OnnxGraph`s or `AttrRef`s."""

    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    name: str = ""
    overload: str = ""
    index: int = 0

    @property
    def title(self) -> str:
        """The node's name, or its first output's when it has none."""
        return self.name or next((o for o in self.outputs if o), f"#{self.index}")


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """A graph; names of nested graphs may refer to values of the graphs around them."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: tuple[OnnxNode, ...]
    initializers: Mapping[str, Value] = field(default_factory=dict[str, Value], compare=False)
    types: Mapping[str, PortType] = field(default_factory=dict[str, PortType], compare=False)
    """Declared types of inner values, where the file gives them."""


@dataclass(frozen=True, slots=True)
class OnnxFunction:
    """A model-local function, or the body of an operator that ONNX defines by other operators."""

    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    opsets: Mapping[str, int]
    attrs: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    overload: str = ""


FunctionKey = tuple[str, str, str]
"""Domain, name, overload."""


@dataclass(frozen=True, slots=True)
class ModelMeta:
    """What `InferenceSession.get_modelmeta` shows."""

    producer_name: str = ""
    producer_version: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int | None = None
    custom: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A whole model."""

    graph: OnnxGraph
    opsets: Mapping[str, int]
    functions: Mapping[FunctionKey, OnnxFunction] = field(default_factory=dict[FunctionKey, OnnxFunction])
    meta: ModelMeta = ModelMeta()
    ir_version: int = 0
    source: str = "model"
    """What the user called it: the path, or `model` when it came as bytes."""

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The inputs a call must give: those without an initializer."""
        return tuple(p for p in self.graph.inputs if p.name not in self.graph.initializers)

    @property
    def outputs(self) -> tuple[Port, ...]:
        """The outputs, in order."""
        return self.graph.outputs

    @property
    def overridable(self) -> tuple[Port, ...]:
        """Inputs that have an initializer as default."""
        return tuple(p for p in self.graph.inputs if p.name in self.graph.initializers)


def domain_of(text: str) -> str:
    """The default domain has two spellings; we use the empty one."""
    return "" if text == "ai.onnx" else text
