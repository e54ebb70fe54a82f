"""Traced graphs that call torch's `varlen_attn` on the CPU get packed attention in its place.

torch traces the call on fake tensors but cannot run it there, so Dynamo's own graph needs this as much as ours does.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hotfuse.ops.table import packet
from hotfuse.ops.varlen import OP, as_packed

_META = ("val", "example_value")


def packed_for_varlen(gm: fx.GraphModule) -> None:
    """Replace every call whose arguments and readers allow it."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            found = [n for n in module.graph.nodes if n.op == "call_function" and packet(str(n.target)) == packet(OP)]
            if sum(_replaced(module, n) for n in found):
                module.recompile()


def _replaced(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a call was replaced: only its first result is read, and it is a tensor of the CPU."""
    args = as_packed(node.args, node.kwargs)
    key = next((k for k in _META if k in node.meta), "")
    if args is None or not key or node.meta[key][0].device.type != "cpu":
        return False
    if any(u.target is not operator.getitem or (u.args[1] != 0 and u.users) for u in node.users):
        return False
    op: Any = torch.ops.hotfuse.packed_attention.default
    with node.meta[key][0].fake_mode:
        made = op(*(a.meta[key] if isinstance(a, fx.Node) else a for a in args))
    with gm.graph.inserting_before(node):
        packed = gm.graph.call_function(op, args)
    packed.meta = {k: v for k, v in node.meta.items() if k not in _META} | {key: made}
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(packed)
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    return True
