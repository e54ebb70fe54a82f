"""Ops that read whole rows (or all) of their input: reductions, and what keeps the reduced dimension.

Softmax and running sums belong here too: each output element depends on its row. Losses reduce by default.
"""

from __future__ import annotations

from hotfuse.ops.costs import CHEAP, DIVIDE, FUNCTION, SOFTMAX, distances, per_input, per_operand, per_output, sorting
from hotfuse.ops.table import Access, defops

_R = Access.REDUCTION

defops(
    """sum nansum prod amax amin aminmax max min argmax argmin all any count_nonzero trace sum_to_size
    cumsum cumprod cummax cummin diff trapezoid trapz cumulative_trapezoid equal allclose
    _is_all_true _is_any_true bincount histc histogram histogramdd hash_tensor""",
    _R,
    per_input(CHEAP),
)
defops("mean nanmean segment_reduce gradient", _R, per_input(2 * CHEAP))
defops("var std var_mean std_mean cov corrcoef", _R, per_input(4 * CHEAP))
defops(
    """norm frobenius_norm linalg_vector_norm linalg_norm linalg_matrix_norm dist renorm pairwise_distance
    cosine_similarity norm_except_dim _weight_norm _weight_norm_interface""",
    _R,
    per_input(3 * CHEAP),
)
defops("logsumexp special_logsumexp logcumsumexp", _R, per_input(FUNCTION))
defops(
    """softmax log_softmax _softmax _log_softmax special_softmax special_log_softmax _safe_softmax _masked_softmax""",
    _R,
    per_input(SOFTMAX),
)
# Each output element takes two of its row: the value and its gate.
defops("glu", _R, per_output(FUNCTION))
defops("median nanmedian mode quantile nanquantile kthvalue", _R, sorting)
defops("cdist _cdist_forward _euclidean_dist pdist", _R, distances)
defops(
    """mse_loss l1_loss smooth_l1_loss huber_loss margin_ranking_loss hinge_embedding_loss
    cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss""",
    _R,
    per_input(DIVIDE),
)
defops(
    """binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss soft_margin_loss ctc_loss
    cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward""",
    _R,
    per_input(FUNCTION),
)
defops("isin searchsorted bucketize", _R, per_operand)
