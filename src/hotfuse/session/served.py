"""An ONNX model as an engine serves it: its interpreter is the model's own code, captured like any other model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotfuse.base.settings import Settings
from hotfuse.base.structure import Spec
from hotfuse.compile import wire
from hotfuse.compile.service import ask
from hotfuse.frontends.captured import CallSpec
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.ship import restore, ship
from hotfuse.runtime.engine import Capture
from hotfuse.runtime.watch import Watch


class OnnxServed:
    """The model behind an engine; weights are the session's own and never change."""

    def __init__(self, module: OnnxModule, settings: Settings) -> None:
        self.module = module
        self.settings = settings
        self.name = module.model.source
        self.call = module.forward

    def capture(self, spec: Spec, call: CallSpec, watching: Callable[[Watch], None]) -> Capture:
        """Ship the model without its weights to the worker and bind what comes back to them."""
        del spec, watching  # an ONNX call is a flat row of tensors, and its weights are nobody else's
        header = {"kind": "onnx", "call": wire.call_to_json(call)}
        captured = ask(header, [ship(self.module.model).blob], self.settings)
        weights: dict[str, Any] = {k: restore(c) for k, c in captured.constants.items()}
        for p in captured.graph.params:
            if p.key not in weights:
                weights[p.key] = self.module.weights[p.key]
        return Capture(captured, weights, Watch((), [w for w in weights.values() if isinstance(w, torch.Tensor)]))
