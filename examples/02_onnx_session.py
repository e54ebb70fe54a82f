"""Tutorial 2: an ONNX model behind ONNX Runtime's interface.

An application that says `onnxruntime.InferenceSession` changes one name. Inputs and outputs are arrays, as before; `explain()`,
`stats()` and `wait()` come on top. examples/ocr_client.py does this to a real application.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import hotfuse


def small_model() -> bytes:
    """relu(x @ w + b) over any batch."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((16, 4)).astype(np.float32), "b": rng.standard_normal(4).astype(np.float32)}
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(v, n) for n, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()


def main() -> None:
    session = hotfuse.InferenceSession(small_model())
    print("inputs: ", [(i.name, i.shape, i.type) for i in session.get_inputs()])
    print("outputs:", [(o.name, o.shape, o.type) for o in session.get_outputs()])
    for batch in (1, 3, 7):
        x = np.random.default_rng(batch).standard_normal((batch, 16)).astype(np.float32)
        (y,) = session.run(["y"], {"x": x})
        assert y.shape == (batch, 4) and (y >= 0).all()
    session.wait(60)
    print(str(session.explain()).splitlines()[0])
    session.close()


if __name__ == "__main__":
    main()
