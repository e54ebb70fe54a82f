"""Operators of ONNX's own domain: one function over torch tensors per row."""
