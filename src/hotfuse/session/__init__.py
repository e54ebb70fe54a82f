"""ONNX Runtime's interface: an application changes one import."""

from hotfuse.session.args import ModelMetadata, NodeArg
from hotfuse.session.inference import InferenceSession
from hotfuse.session.options import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
    set_default_logger_severity,
)
from hotfuse.session.ort_errors import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    InvalidProtobuf,
    NoSuchFile,
    NotImplemented,
    UnsupportedFeed,
    WrongCall,
)
from hotfuse.session.ortvalue import IOBinding, OrtValue
from hotfuse.session.providers import get_all_providers, get_available_providers, get_device

__all__ = [
    "ExecutionMode",
    "ExecutionOrder",
    "Fail",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "InvalidArgument",
    "InvalidGraph",
    "InvalidProtobuf",
    "ModelMetadata",
    "NoSuchFile",
    "NodeArg",
    "NotImplemented",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "UnsupportedFeed",
    "WrongCall",
    "get_all_providers",
    "get_available_providers",
    "get_device",
    "set_default_logger_severity",
]
