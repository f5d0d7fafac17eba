"""A few rows that stand for many: interpolation from the best ones, or a random sample."""

from __future__ import annotations

import torch
from torch import Tensor


def interpolation(kernel: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Interpolative decomposition of rows U, given their kernel ``K = U Uᵀ: [*b, n, n]``.

    Returns the chosen rows ``[*b, r]``, the weights ``T: [*b, n, r]`` of the least squares fit
    ``U ≈ T Uₛ``, and its residual ``E = K - T Kₛ Tᵀ``, which is positive semidefinite. Rows are chosen
    one by one, each the one with the largest residual: a Cholesky decomposition with pivoting.
    """
    size = kernel.shape[-1]
    residual = kernel
    factor = kernel.new_zeros(*kernel.shape[:-1], rank)
    taken = torch.zeros(kernel.shape[:-1], dtype=torch.bool, device=kernel.device)
    largest = kernel.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    noise = largest * (size * torch.finfo(kernel.dtype).eps)
    chosen = []
    for number in range(rank):
        left = residual.diagonal(dim1=-2, dim2=-1).masked_fill(taken, -torch.inf)
        best, pivot = left.max(-1, keepdim=True)
        column = residual.gather(-1, pivot[..., None].expand(*kernel.shape[:-1], 1))
        usable = best > noise
        root = torch.where(usable, best, 1).sqrt()
        # A row that the others span already adds nothing but itself.
        own = torch.zeros_like(column[..., 0]).scatter(-1, pivot, 1.0)
        scaled = torch.where(usable, column[..., 0] / root, 0)
        residual = residual - scaled[..., None] * scaled[..., None, :]
        factor[..., number] = torch.where(usable, scaled, own)
        taken = taken.scatter(-1, pivot, True)
        chosen.append(pivot)
    pivots = torch.cat(chosen, -1)
    corner = factor.gather(-2, pivots[..., None].expand(*pivots.shape, rank))
    weights = torch.linalg.solve_triangular(corner.tril(), factor, upper=False, left=False)
    return pivots, weights, residual


def systematic_sample(sizes: Tensor, count: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """Draw ``count`` of ``n`` things without replacement, with chances that grow with their sizes.

    ``sizes: [*b, n]``, none negative; ``start: [*b]`` are the random numbers, in [0, 1), in double
    precision. Returns the chosen ones ``[*b, count]`` and the chance that each had,
    ``πᵢ = min(1, τ sizeᵢ)`` with τ such that all chances add up to ``count``. The mean of ``Σ xᵢ/πᵢ``
    over the chosen ones is then ``Σ xᵢ`` over all.
    """
    wide = sizes.to(start.dtype)
    # A size of zero has a chance as well, so that there are enough to choose from.
    floor = wide.amax(-1, keepdim=True) * torch.finfo(sizes.dtype).eps
    wide = wide + torch.where(floor > 0, floor, 1)
    ordered = wide.sort(-1, descending=True).values
    rest = ordered.flip(-1).cumsum(-1).flip(-1)[..., :count]
    number = torch.arange(count, dtype=wide.dtype, device=wide.device)
    shares = (count - number) / rest  # τ if so many have a chance of 1
    fits = shares * ordered[..., :count] <= 1 + 1e-12
    first = fits.to(torch.int8).argmax(-1, keepdim=True)
    chances = (wide * shares.gather(-1, first)).clamp(max=1)
    ends = chances.cumsum(-1)
    ends = ends * (count / ends[..., -1:])
    marks = start[..., None] + number
    chosen = torch.searchsorted(ends, marks.contiguous(), right=True).clamp(max=sizes.shape[-1] - 1)
    return chosen, chances.gather(-1, chosen).to(sizes.dtype)
