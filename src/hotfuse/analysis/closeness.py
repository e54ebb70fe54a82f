"""How far results lie apart, in units of what they are.

A sum near zero is as far off as the numbers it was made of, so errors are held against the largest magnitude of the whole result.
Numbers that stand for something else (a masked score of -1e9, the least float) would hide any error beside them: what is that far
above the rest does not count as its largest.
"""

from __future__ import annotations

import torch

OUTLIER = 1e6
"""Times the median magnitude (zeros apart) from which on a number is no measure for the others."""


def same_specials(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether NaN and the infinities, each with its sign, stand in the same places; which way a complex one points is not asked."""
    finite = torch.isfinite(want)
    if not torch.equal(torch.isfinite(got), finite):
        return False
    return bool(finite.all()) or torch.equal(_as_numbers(got[~finite]), _as_numbers(want[~finite]))


def _as_numbers(special: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(special.abs() if special.is_complex() else special, nan=0.0, posinf=1.0, neginf=-1.0)


def units(want: torch.Tensor) -> torch.Tensor:
    """What an error of each element is divided by, one number where that is the same for all; `want` is finite."""
    magnitude = want.abs()
    if not magnitude.numel() or not float(largest_one := magnitude.max()):
        return magnitude
    count, near = int(torch.count_nonzero(magnitude)), int(torch.count_nonzero(magnitude >= largest_one / OUTLIER))
    if near >= count - (count - 1) // 2:  # so is the median: counting takes a tenth of what finding it does
        return largest_one
    most = OUTLIER * magnitude[magnitude > 0].median()
    ordinary = magnitude <= most
    return torch.where(ordinary, magnitude[ordinary].max(), magnitude.max())


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error in such units; both are finite, of one floating or complex type."""
    return largest((got - want).abs(), units(want))


def largest(errors: torch.Tensor, in_units: torch.Tensor) -> float:
    """The largest error in its unit; infinite where a value that should be exactly zero is not."""
    if not errors.numel():
        return 0.0
    return float(torch.where(errors > 0, errors / in_units, 0.0).max())
