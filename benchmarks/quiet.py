"""OpenVINO as a contender: without its telemetry.

For every message `openvino_telemetry` forks the process it is in, dozens where a model cannot be converted: these ran into
everybody's turns for seconds (a call of 40 us took from 40 to 900 us in the mean over a turn).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_TELEMETRY = "openvino_telemetry"


def openvino() -> Any:
    """The package; from now on its telemetry cannot be imported here, for which it has a stand-in."""
    modules: dict[str, Any] = sys.modules
    modules[_TELEMETRY] = None
    return importlib.import_module("openvino")
