"""SINGD from its equations, in whole matrices of float64 and of one layer."""

from __future__ import annotations

import torch
from torch import Tensor


def project(structure: str, matrix: Tensor, block_dim: int) -> Tensor:
    """Π of a symmetric matrix: entries whose mirror image is fixed at zero count for both."""
    d = len(matrix)
    row, column = torch.arange(d)[:, None], torch.arange(d)[None]
    if structure == "dense":
        return matrix
    if structure == "diagonal":
        return matrix * (row == column)
    if structure == "block-diagonal":
        return matrix * (row // block_dim == column // block_dim)
    if structure == "lower-triangular":
        return matrix * ((row == column) + 2 * (row > column))
    if structure == "toeplitz":
        means = [2 * matrix.diagonal(-j).mean() for j in range(d)]
        means[0] = means[0] / 2
        return torch.stack(means)[(row - column).clamp(min=0)] * (row >= column)
    first = min(block_dim // 2, d)
    last = d - min(block_dim // 2, d - first)
    top, bottom = (row < first) & (column >= first), (row >= last) & (column >= first)
    corners = (row < first) & (column < first) | (row >= last) & (column >= last)
    diagonal = (row == column) & ~corners
    return matrix * (corners | diagonal) + 2 * matrix * (top | (bottom & (column < last)))


class SINGD:
    """The roots K and C of one layer, their momenta, and one update of them."""

    def __init__(self, d_in: int, d_out: int, **options: object) -> None:
        self.K, self.C = (torch.eye(d, dtype=torch.float64) for d in (d_in, d_out))
        self.m_K, self.m_C = torch.zeros_like(self.K), torch.zeros_like(self.C)
        self.options: dict[str, object] = options

    def update(self, A: Tensor, G: Tensor, damping: float) -> None:
        """One step of both roots along the batch's factors."""
        option = {"structure": "dense", "block_dim": 32, "lr_cov": 0.1, "alpha1": 0.5}
        option |= {"kfac_like": False, **self.options}
        own = (option["structure"], option["block_dim"])
        (H_K, K_K), (H_C, C_C) = (
            [project(own[0], M, own[1]) for M in (root.T @ factor @ root, root.T @ root)]
            for root, factor in ((self.K, A), (self.C, G))
        )

        def wanted(H: Tensor, inner: Tensor, H_other: Tensor, inner_other: Tensor) -> Tensor:
            weight, shift = H_other.trace() / len(H_other), inner_other.trace() / len(H_other)
            if option["kfac_like"]:
                weight, shift = 1.0, 1.0
            return (weight * H + damping * shift * inner - torch.eye(len(H))) / 2

        memory = 0.0 if option["kfac_like"] else option["alpha1"]
        self.m_K = memory * self.m_K + wanted(H_K, K_K, H_C, C_C)
        self.m_C = memory * self.m_C + wanted(H_C, C_C, H_K, K_K)
        self.K = self.K - self._rate(self.m_K, option["lr_cov"]) * self.K @ self.m_K
        self.C = self.C - self._rate(self.m_C, option["lr_cov"]) * self.C @ self.m_C

    @staticmethod
    def _rate(m: Tensor, rate: float) -> float:
        """As much as keeps ``‖m‖`` times it below a half."""
        return min(rate, 0.5 / float((m.abs().sum(0).max() * m.abs().sum(1).max()).sqrt()))

    def precondition(self, V: Tensor) -> Tensor:
        """``C Cᵀ V K Kᵀ``."""
        return self.C @ self.C.T @ V @ self.K @ self.K.T
