"""Second moments of per-sample gradients in a Kronecker-factored basis.

A sample's gradient is ``U = Σ_s g_s a_sᵀ`` over its positions. A basis is a matrix of orthonormal
columns, or ``None`` for the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample_moments(
    a: Tensor, g: Tensor, basis_in: Tensor | None, basis_out: Tensor | None
) -> Tensor:
    """``Σ_n (Q_Gᵀ U_n Q_A)²``: rows ``[*b, N, S, d]`` of both sides ``-> [*b, d_out, d_in]``.

    Each side is rotated where that is cheaper: its rows, or the gradients that they make. With one
    position a sample has ``(g̃ ãᵀ)² = g̃² (ã²)ᵀ``, and no gradient is formed.
    """
    positions, late_in, late_out = a.shape[-2], None, None
    if positions <= g.shape[-1]:
        a = rotated(a, basis_in)
    else:
        late_in = basis_in
    if positions <= a.shape[-1]:
        g = rotated(g, basis_out)
    else:
        late_out = basis_out
    if positions == 1:
        return g.squeeze(-2).square().mT @ a.squeeze(-2).square()
    gradients = rotated(g.mT @ a, late_in)
    if late_out is not None:
        gradients = late_out.mT.unsqueeze(-3) @ gradients
    return gradients.square_().sum(-3)


def add_token_moments(total: Tensor, tokens: Tensor, g: Tensor, basis_out: Tensor | None) -> Tensor:
    """Add the same for one-hot rows of tokens ``[N, S]`` and ``g: [N, S, d_out]`` to ``[d_out, d_in]``.

    Column v of a sample's gradient is the sum of its ``g`` at the positions of token v. All of these
    positions find that sum, and each adds its share of the square: no gradient is formed.
    """
    same = (tokens.unsqueeze(-1) == tokens.unsqueeze(-2)).to(g.dtype)
    sums = same @ rotated(g, basis_out)
    squares = (sums.square_() / same.sum(-1, keepdim=True)).flatten(0, 1)
    return total.index_add_(1, tokens.flatten(), squares.mT)


def rotated(rows: Tensor, basis: Tensor | None) -> Tensor:
    """Rows ``[*b, N, S, d]`` in a basis ``[*b, d, d]``."""
    return rows if basis is None else rows @ basis.unsqueeze(-3)


def rebased(moments: Tensor, turn_in: Tensor | None, turn_out: Tensor | None) -> Tensor:
    """Moments in another basis, given the products ``Q_newᵀ Q_old`` of its sides.

    They are the diagonal, in the new basis, of the curvature that was diagonal in the old one; their sum
    does not change.
    """
    if turn_out is not None:
        moments = turn_out.square() @ moments
    return moments if turn_in is None else moments @ turn_in.square().mT


def levelled(moments: Tensor, values: Tensor) -> Tensor:
    """Moments ``[*b, d_out, d]`` with their mean where eigenvalues ``[*b, d]`` are zero up to rounding.

    The sum over such columns does not depend on the basis of their span, and of all numbers the mean is
    nearest to them.
    """
    rounding = values.shape[-1] * torch.finfo(values.dtype).eps
    unknown = (values <= rounding * values.amax(-1, keepdim=True)).unsqueeze(-2)
    count = unknown.sum(-1, keepdim=True).clamp(min=1)
    mean = (moments * unknown).sum(-1, keepdim=True) / count
    return torch.where(unknown, mean, moments)
