"""Files are traced without Dynamo, which is loaded when something needs it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import inspect, sys
import torch
from hotfuse.frontends.dynamo_stand_in import DYNAMO, UnloadedModule, install_stand_in, remove_stand_in, stand_in_installed

assert DYNAMO not in sys.modules
install_stand_in()
import hotfuse.compile.requests as requests
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
files_of_torch = symbolic_shapes.uninteresting_files
from hotfuse.frontends.captured import TensorSpec
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.tracing.traced_model import trace
from onnx import TensorProto, helper

requests.import_common()
given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
made = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
nodes = [helper.make_node("Softmax", ["x"], ["s"]), helper.make_node("Mul", ["s", "x"], ["y"])]
module = OnnxModule(load(helper.make_model(helper.make_graph(nodes, "g", [given], [made])).SerializeToString()))
x = torch.randn(3, 4)
want = torch.softmax(x, -1) * x
assert torch.allclose(trace(module, [TensorSpec((3, 4), (4, 1), torch.float32, "cpu")])(x)[0], want)
assert stand_in_installed() and isinstance(sys.modules[DYNAMO], UnloadedModule), "a file with fixed sizes needs no Dynamo"
inspect.getmodule(inspect.currentframe())  # looks at every module
assert stand_in_installed()
assert torch.allclose(trace(module, [TensorSpec((3, 4), (4, 1), torch.float32, "cpu", frozenset({0}))])(x)[0], want)
assert stand_in_installed() and isinstance(sys.modules[DYNAMO], UnloadedModule), "sizes that are open need no Dynamo"
assert "torch.export._trace" not in sys.modules, "nor what torch asks to tell its own files"
assert symbolic_shapes.uninteresting_files is files_of_torch, "what torch asks is put back"
kept = FakeTensorMode.cache_info()
assert kept.hits == kept.misses == 0, "nor are results of operators kept, which do not come again"
assert not any(name.startswith("torch.distributed.tensor") for name in sys.modules), "nor tensors of several processes"
remove_stand_in()
assert not stand_in_installed()
assert torch.allclose(trace(module, [TensorSpec((3, 4), (4, 1), torch.float32, "cpu", frozenset({0}))])(x)[0], want)
assert torch._dynamo is sys.modules[DYNAMO] and torch._dynamo.config is sys.modules[DYNAMO + ".config"]
from torch.distributed.tensor import DTensor
assert issubclass(DTensor, torch.Tensor), "who asks for it gets the real one"
print("done")
"""

OF_A_GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from hotfuse.frontends.dynamo_stand_in import install_stand_in, stand_in_installed
install_stand_in()
assert stand_in_installed()
from hotfuse.frontends.captured import TensorSpec
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.tracing.traced_model import trace
from onnx import TensorProto, helper

given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
made = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
ends = [helper.make_tensor(n, TensorProto.INT64, [1], [v]) for n, v in (("from", 1), ("to", 3), ("axis", 1))]
graph = helper.make_graph([helper.make_node("Slice", ["x", "from", "to", "axis"], ["y"])], "g", [given], [made], ends)
module = OnnxModule(load(helper.make_model(graph).SerializeToString()))
trace(module, [TensorSpec((3, 4), (4, 1), torch.float32, "cpu", frozenset({0}))])
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
spread = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
assert (spread + 1).full_tensor().sum() == 32
print("done")
"""


def test_dynamo_is_loaded_for_no_file() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "done", done.stderr[-2000:]


def test_a_worker_of_a_process_in_a_group_knows_tensors_that_are_spread_over_it() -> None:
    run = [sys.executable, "-W", "ignore", "-c", OF_A_GROUP]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "done", done.stderr[-2000:]
