"""Ops that fit no loop: sizes for the host, assertions, transforms and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from hotfuse.base.errors import InternalError
from hotfuse.ops import costs
from hotfuse.ops.table import Access, defop, defops, register_namespace

defops("sym_size sym_numel sym_stride sym_storage_offset sym_is_contiguous size stride numel dim", Access.HOST)
defops("item _local_scalar_dense is_nonzero _shape_as_tensor", Access.HOST)
defops(
    """_assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async _functional_assert_scalar
    sym_constrain_range sym_constrain_range_for_size _functional_sym_constrain_range
    _functional_sym_constrain_range_for_size is_same_size is_floating_point is_complex""",
    Access.HOST,
)
defops(
    """fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2
    fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn _fft_c2c _fft_r2c _fft_c2r stft istft""",
    Access.OPAQUE,
    costs.fourier,
)
defops("fft_fftfreq fft_rfftfreq", Access.POINTWISE, costs.per_output(1))
defops(
    """rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal poisson binomial
    uniform exponential geometric cauchy log_normal random normal_functional _standard_gamma _sample_dirichlet""",
    Access.OPAQUE,
    costs.per_output(costs.FUNCTION),
)

# Quantization as torch.export writes it down: plain tensors with scales beside them.
_DECOMPOSED = (
    "quantize_per_tensor", "dequantize_per_tensor", "quantize_per_channel", "dequantize_per_channel",
    "quantize_per_token", "dequantize_per_token", "quantize_per_channel_group", "dequantize_per_channel_group",
    "fake_quant_per_channel", "convert_element_type",
)  # fmt: skip
_CHOOSE = (
    "choose_qparams", "choose_qparams_symmetric", "choose_qparams_per_token", "choose_qparams_per_token_asymmetric",
)  # fmt: skip


def _decomposed(op: str) -> Callable[..., Any]:
    """torch registers this namespace only when its module is imported."""
    import_module("torch.ao.quantization.fx._decomposed")
    _, name, *overload = op.split(".")
    try:
        found = getattr(torch.ops.quantized_decomposed, name)
        return getattr(found, overload[0]) if overload else found
    except (AttributeError, RuntimeError) as e:
        raise InternalError(f"no operator {op}", because=str(e)) from e


register_namespace("quantized_decomposed", _decomposed)
for _name in _DECOMPOSED:
    defop(f"quantized_decomposed.{_name}", Access.POINTWISE, costs.per_output(costs.DIVIDE))
for _name in _CHOOSE:
    defop(f"quantized_decomposed.{_name}", Access.REDUCTION, costs.per_input(2))
