"""Ops whose every output element depends on the inputs' elements at the same (broadcast) position.

The position itself may matter too (`tril`, `arange`), and an op may have no tensor input at all (`full`): what counts
is that no other element is read, so that all of them can run inside one loop.
"""

from __future__ import annotations

from hotfuse.ops.costs import CHEAP, DIVIDE, FUNCTION, SPECIAL, per_output
from hotfuse.ops.table import Access, defops

_P = Access.POINTWISE

defops(
    """abs absolute neg negative sign sgn signbit ceil floor round trunc fix frac square relu relu6 hardtanh
    hardshrink softshrink threshold leaky_relu prelu _prelu_kernel clamp clamp_min clamp_max clip nan_to_num deg2rad
    rad2deg angle special_round
    isnan isinf isfinite isposinf isneginf isreal
    logical_not logical_and logical_or logical_xor
    bitwise_not bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
    __and__ __or__ __xor__ __lshift__ __rshift__
    add sub subtract rsub mul multiply maximum minimum fmax fmin copysign nextafter ldexp heaviside
    eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose
    where masked_fill lerp addcmul tril triu _add_relu complex""",
    _P,
    per_output(CHEAP),
)
defops(
    """reciprocal sqrt rsqrt div divide true_divide floor_divide fmod remainder addcdiv hypot hardsigmoid hardswish
    gcd lcm frexp
    fake_quantize_per_tensor_affine fake_quantize_per_channel_affine quantize_per_tensor quantize_per_channel
    dequantize""",
    _P,
    per_output(DIVIDE),
)
defops(
    """exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan arcsin arccos arctan sinh cosh tanh asinh acosh
    atanh arcsinh arccosh arctanh sinc atan2 arctan2 pow float_power sigmoid special_expit log_sigmoid logit
    special_logit softplus silu mish gelu elu celu selu erf erfc special_erf special_erfc logaddexp logaddexp2 xlogy
    special_xlogy special_xlog1py special_log1p special_exp2 special_expm1 special_sinc special_entr special_ndtr
    special_log_ndtr polar rrelu""",
    _P,
    per_output(FUNCTION),
)
defops(
    """erfinv special_erfinv lgamma digamma polygamma mvlgamma igamma igammac i0 special_i0 special_i0e special_i1
    special_i1e special_digamma special_psi special_gammaln special_gammainc special_gammaincc special_multigammaln
    special_polygamma special_erfcx special_ndtri special_zeta special_bessel_j0 special_bessel_j1 special_bessel_y0
    special_bessel_y1 special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_spherical_bessel_j0 special_airy_ai special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w""",
    _P,
    per_output(SPECIAL),
)
# Casts and copies. Those with `view` give their input back when there is nothing to change.
defops("clone _to_copy copy lift_fresh_copy detach_copy alias_copy fill zero", _P)
defops(
    """to type_as contiguous positive alias detach lift lift_fresh data conj _conj conj_physical resolve_conj
    resolve_neg _neg_view real imag""",
    _P,
    view=True,
)
# Dropout is the identity at inference; when it is not, `draws_random` says so.
defops("dropout feature_dropout alpha_dropout feature_alpha_dropout", _P, per_output(CHEAP), view=True)
defops("native_dropout", _P, per_output(CHEAP))
# Made from numbers and positions alone.
defops(
    """full full_like zeros zeros_like ones ones_like new_full new_zeros new_ones empty empty_like empty_strided
    empty_permuted new_empty new_empty_strided scalar_tensor arange range linspace logspace eye tril_indices
    triu_indices bartlett_window blackman_window hamming_window hann_window kaiser_window""",
    _P,
)
