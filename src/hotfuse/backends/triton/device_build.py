"""From the text of a kernel to device code, in a process that needs no device.

Triton is imported when a kernel is built, never before: without a GPU no Triton is needed. Its own cache is given a folder that
lives as long as the build: what is kept is kept signed, by `cache`. The text lies in a file while it is compiled, since Triton
reads a function's source from there.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hotfuse.backends.device_code import BuiltDeviceKernel, GpuTarget, TensorDescriptor
from hotfuse.backends.triton.emit import NAME, TritonSource
from hotfuse.base.errors import InternalError


def triton_missing() -> str:
    """Why no kernels can be generated for GPUs; empty where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install hotfuse[gpu])"
    return ""


def build(source: TritonSource, target: GpuTarget, warps: int, *, dependent: bool = False) -> BuiltDeviceKernel:
    """Compile a kernel; raises InternalError where Triton cannot."""
    if why := triton_missing():
        raise InternalError("a kernel for a GPU cannot be compiled", because=why)
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with tempfile.TemporaryDirectory(prefix="hotfuse-triton-") as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        function: Any = vars(loaded(source, Path(folder)))[NAME]
        signature = dict(zip(function.arg_names, source.signature, strict=True))
        attrs = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(source.signature) if kind.startswith("*")}
        arch: Any = int(target.arch) if target.backend == "cuda" else target.arch
        try:
            made: Any = triton.compile(
                ASTSource(function, signature, {}, attrs), target=GPUTarget(target.backend, arch, target.warp),
                options={"num_warps": warps},
            )
        except Exception as e:  # the compiler raises whatever its passes do
            said = str(e).strip().splitlines()
            raise InternalError(f"Triton cannot compile a kernel for {target.backend} {target.arch}",
                                because=f"{type(e).__name__}: {said[-1][:300] if said else ''}") from e
        texts = {stage: str(made.asm[stage]) for stage in ("ptx", "amdgcn") if stage in made.asm}
        return BuiltDeviceKernel(
            bytes(made.asm[target.code]), str(made.metadata.name), int(made.metadata.shared), warps, target.warp, source.grid,
            dependent, texts, descriptors(source, made.metadata), source.workspace, source.counters,
        )


def descriptors(source: TritonSource, metadata: Any) -> tuple[TensorDescriptor, ...]:
    """What the tensor descriptors of a kernel must say, as Triton laid its shared memory out."""
    told: list[dict[str, Any]] = list(getattr(metadata, "tensordesc_meta", None) or [])
    if len(told) != len(source.blocks):
        because = f"{len(told)}, not {len(source.blocks)}"
        raise InternalError("Triton gave other tensor descriptors than were asked for", because=because)
    return tuple(
        TensorDescriptor(b.argument, b.shape, b.stride, (int(t["block_size"][0]), int(t["block_size"][1])), int(t["swizzle"]),
                         source.signature[b.argument][1:])
        for b, t in zip(source.blocks, told, strict=True)
    )  # fmt: skip


def loaded(source: TritonSource, folder: Path) -> ModuleType:
    """The kernel's text as a module; it holds names that `emit` made and numbers only."""
    path = folder / "generated.py"
    path.write_text(source.text)
    spec = importlib.util.spec_from_file_location("hotfuse_generated", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
