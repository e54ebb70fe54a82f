"""Operators of other domains: com.microsoft and ai.onnx.ml."""
