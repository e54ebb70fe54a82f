"""Model to graph: torch modules, Dynamo, ONNX."""
