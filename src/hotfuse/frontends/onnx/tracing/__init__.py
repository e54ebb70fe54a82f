"""ONNX models traced into the graph's vocabulary."""
