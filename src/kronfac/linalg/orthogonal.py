"""The nearest orthogonal matrix, by products only."""

from __future__ import annotations

import torch
from torch import Tensor

#: Keller Jordan's quintic: small singular values grow by 3.4 a step, and all end between 0.68 and 1.13.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def nearest_orthogonal(matrices: Tensor) -> Tensor:
    """``U Vᵀ`` of ``U S Vᵀ``, roughly: singular values come near 1, singular vectors stay.

    Args:
        matrices: ``[*b, m, n]`` of any scale; zeros stay zeros. Singular values below a thousandth of the
            Frobenius norm do not get all the way.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    # In two divisions, since squares of the largest and smallest floats are none.
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(_tiny(x))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(_tiny(x))
    first, third, fifth = _COEFFICIENTS
    for _ in range(_STEPS):
        square = x @ x.mT
        x = first * x + (third * square + fifth * (square @ square)) @ x
    return x.mT if tall else x


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny
