"""A graph as one flat Python function: every node a call, every value dropped right after its last use.

    def run(i0):
        v0 = f0(i0, w0, w1)      # aten.linear.default
        i0 = None
        v1 = f1(v0)              # aten.relu.default
        v0 = None
        return (v1,)

The text holds only names made here and plain integers; callables, weights and all other constants are bound by name, so
nothing from a model is ever read as code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hotfuse.analysis.liveness import last_uses
from hotfuse.backends.protocol import Run
from hotfuse.base.errors import InternalError
from hotfuse.ir.graph import Arg, Graph, Node, Value, values_in
from hotfuse.ops.torch_args import to_torch

Meaning = Callable[[Node], tuple[Callable[..., Any], bool]]
"""A node's callable, and whether it returns a sequence even for one result."""


def flat_function(graph: Graph, meaning: Meaning, weights: Mapping[str, Any]) -> tuple[Run, str]:
    """The function and its text."""
    writer = _SourceWriter(graph, weights)
    source = writer.write(meaning)
    space: dict[str, Any] = {}
    exec(compile(source, f"<hotfuse {graph.name}>", "exec"), space)
    return space["make"](writer.bound), source


class _SourceWriter:
    def __init__(self, graph: Graph, weights: Mapping[str, Any]) -> None:
        self.graph = graph
        self.bound: dict[str, Any] = {}
        self.names: dict[str, str] = {v.name: f"i{i}" for i, v in enumerate(graph.inputs)}
        for i, p in enumerate(graph.params):
            if p.key not in weights:
                raise InternalError(f"no weight {p.key!r}", where=f"graph {graph.name!r}")
            self.names[p.value.name] = self._bind(f"w{i}", weights[p.key])

    def write(self, meaning: Meaning) -> str:
        lines: list[str] = []
        params = {p.value.name for p in self.graph.params}
        made = 0
        for i, (node, dead) in enumerate(zip(self.graph.nodes, last_uses(self.graph), strict=True)):
            fn, sequence = meaning(node)
            args = [self._arg(a) for a in node.args] + [f"{_keyword(k)}={self._arg(a)}" for k, a in node.attrs]
            call = f"{self._bind(f'f{i}', fn)}({', '.join(args)})"
            outs = [f"v{made + k}" for k in range(len(node.outs))]
            made += len(outs)
            self.names |= {v.name: name for v, name in zip(node.outs, outs, strict=True)}
            target = ""
            if outs:
                target = ", ".join(outs) + (", = " if sequence or len(outs) > 1 else " = ")
            lines.append(f"{target}{call}  # {_comment(node.op)}")
            gone = [self.names[v.name] for v in dead if v.name not in params]
            if gone:
                lines.append(" = ".join(gone) + " = None")
        lines.append("return (" + "".join(f"{self._arg(o)}, " for o in self.graph.outputs) + ")")
        head = ", ".join(f"i{i}" for i in range(len(self.graph.inputs)))
        unpack = "".join(f"    {name} = bound[{name!r}]\n" for name in self.bound)
        body = "\n".join("        " + line for line in lines)
        return f"def make(bound):\n{unpack}    def run({head}):\n{body}\n    return run\n"

    def _arg(self, arg: Arg) -> str:
        if isinstance(arg, Value):
            return self.names[arg.name]
        if isinstance(arg, tuple) and any(True for _ in values_in(arg)):
            return "[" + ", ".join(self._arg(a) for a in arg) + "]"
        if arg is None or type(arg) in (bool, int):
            return repr(arg)
        return self._bind(f"k{len(self.bound)}", to_torch(arg))

    def _bind(self, name: str, value: Any) -> str:
        self.bound[name] = value
        return name


def _keyword(name: str) -> str:
    if not name.isidentifier():
        raise InternalError(f"attribute name {name!r} is not an identifier")
    return name


def _comment(op: str) -> str:
    return "".join(c for c in op if c.isalnum() or c in "._")
