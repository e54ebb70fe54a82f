"""Dynamo's graph becomes the hypergraph: traced once more, on fake tensors, into undecomposed ATen ops.

Dynamo hands over Python-level calls (`torch.nn.functional.linear`, methods, operators) with its own guards around them, so no
guards are added here. Parameters and sizes come in as ordinary inputs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import fx
from torch._guards import tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from hotfuse.base.errors import CaptureError
from hotfuse.frontends.fx import Converted, Role, to_graph


def capture_dynamo(gm: fx.GraphModule, name: str) -> Converted:
    """Convert Dynamo's graph; raises CaptureError with the user's line."""
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta.get("example_value") for n in places]
    mode = next((f.fake_mode for f in fakes if isinstance(f, torch.Tensor)), None)  # type: ignore[attr-defined]
    if mode is None or any(f is None for f in fakes):
        raise CaptureError("Dynamo's graph has no fake inputs")

    def interpret(*args: Any) -> Any:
        return fx.Interpreter(gm).run(*args)

    try:
        with warnings.catch_warnings(), tracing(None), mode, preserve_node_meta():
            warnings.simplefilter("ignore")
            traced = make_fx(interpret, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    except CaptureError:
        raise
    except Exception as e:
        first = next((line for line in str(e).splitlines() if line.strip()), "")
        raise CaptureError("the graph cannot be traced", because=f"{type(e).__name__}: {first[:300]}") from e
    return to_graph(traced, [Role("input")] * len(places), name=name)
