"""Structures with fewer numbers than the curvature that they see: rows are observed through the root."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import pad

from kronfac.layers.rows import Rows
from kronfac.methods.singd.structures import Structure


class ThroughRoot(Structure):
    """What these have in common: ``Σ Π(Kᵀa aᵀK)`` is observed, of which the mean is ``Π(KᵀAK)``."""

    through_root = True

    @abstractmethod
    def project_rows(self, x: Tensor) -> Tensor:
        """``Π(xᵀx)`` for rows ``x: [*b, n, d]``."""

    def observe(self, rows: Rows, root: Tensor | None) -> Tensor:
        """See :meth:`Structure.observe`; without a root it is the identity."""
        x = rows.dense().flatten(-3, -2)
        return self.project_rows(x if root is None else self.product(x, root.to(x.dtype)))

    def curvature(self, mean: Tensor, root: Tensor) -> Tensor:
        """See :meth:`Structure.curvature`."""
        return mean


class Hierarchical(ThroughRoot):
    """Two dense corners ``A`` and ``E``, and what ties them to a diagonal ``C``.

    The rows of a matrix are ``[A, B₁, B₂]``, ``[0, C, 0]`` and ``[0, D, E]``.
    """

    name = "hierarchical"

    def __init__(self, width: int, corner: int) -> None:
        self.first = min(corner, width)
        self.last = min(corner, width - self.first)
        self.middle = width - self.first - self.last
        size = self.first * width + self.middle + self.last * (self.middle + self.last)
        super().__init__(width, (size,))

    def _pieces(self, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows ``[A, B]: [*b, k, d]``, the diagonal ``C: [*b, m]`` and rows ``[D, E]``, as views."""
        rest = self.middle + self.last
        top, middle, bottom = matrix.split(
            [self.first * self.width, self.middle, self.last * rest], dim=-1
        )
        return (
            top.unflatten(-1, (self.first, self.width)),
            middle,
            bottom.unflatten(-1, (self.last, rest)),
        )

    @staticmethod
    def _flat(top: Tensor, middle: Tensor, bottom: Tensor) -> Tensor:
        return torch.cat([top.flatten(-2), middle, bottom.flatten(-2)], dim=-1)

    def identity(self, like: Tensor) -> Tensor:
        """See :meth:`Structure.identity`."""
        top = torch.eye(self.first, self.width, dtype=like.dtype, device=like.device)
        corner = torch.eye(self.last, dtype=like.dtype, device=like.device)
        return self._flat(top, like.new_ones(self.middle), pad(corner, (self.middle, 0)))

    def times(self, left: Tensor, right: Tensor) -> Tensor:
        """See :meth:`Structure.times`: its dense rows are rows like others."""
        top, middle, bottom = self._pieces(left)
        padded = pad(bottom, (self.first, 0))
        return self._flat(
            self.product(top, right),
            middle * self._pieces(right)[1],
            self.product(padded, right)[..., self.first :],
        )

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product`."""
        top, middle, bottom = self._pieces(matrix)
        first, center, last = x.split([self.first, self.middle, self.last], dim=-1)
        result: Tensor = first @ top
        result[..., self.first :] += last @ bottom
        result[..., self.first : self.first + self.middle] += center * middle[..., None, :]
        return result

    def product_transposed(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product_transposed`."""
        top, middle, bottom = self._pieces(matrix)
        center = x[..., self.first : self.first + self.middle] * middle[..., None, :]
        return torch.cat([x @ top.mT, center, x[..., self.first :] @ bottom.mT], dim=-1)

    def inner(self, root: Tensor) -> Tensor:
        """See :meth:`Structure.inner`: the dense rows of ``K``, and one row for each of the diagonal."""
        top, middle, bottom = self._pieces(root)
        rows = torch.cat([top, pad(bottom, (self.first, 0))], dim=-2)
        above, center, below = self._pieces(self.project_rows(rows))
        return self._flat(above, center + middle.square(), below)

    def project_rows(self, x: Tensor) -> Tensor:
        """See :meth:`ThroughRoot.project_rows`."""
        first, center, last = x.split([self.first, self.middle, self.last], dim=-1)
        top = first.mT @ x
        top[..., self.first :] *= 2
        bottom = last.mT @ x[..., self.first :]
        bottom[..., : self.middle] *= 2
        return self._flat(top, center.square().sum(-2), bottom)

    def mean_diagonal(self, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.mean_diagonal`."""
        top, middle, bottom = self._pieces(matrix)
        ends = bottom[..., self.middle :]
        total = top.diagonal(dim1=-2, dim2=-1).sum(-1) + middle.sum(-1)
        return (total + ends.diagonal(dim1=-2, dim2=-1).sum(-1)) / self.width

    def flops(self, rows: int) -> int:
        """See :meth:`Structure.flops`."""
        return 2 * rows * self.shape[0]


class Toeplitz(ThroughRoot):
    """Lower triangles that are constant along diagonals, of ``d`` numbers; products are convolutions.

    ``M_ij = t_{i-j}`` for ``i >= j``. Everything goes through Fourier transforms of twice the width.
    """

    name = "toeplitz"

    def __init__(self, width: int) -> None:
        super().__init__(width, (width,))
        self._size = 1 << (2 * width - 1).bit_length()

    def _transform(self, x: Tensor) -> Tensor:
        found: Tensor = torch.fft.rfft(x, n=self._size)
        return found

    def _back(self, x: Tensor) -> Tensor:
        found: Tensor = torch.fft.irfft(x, n=self._size)
        return found[..., : self.width]

    def identity(self, like: Tensor) -> Tensor:
        """See :meth:`Structure.identity`."""
        return pad(like.new_ones(1), (0, self.width - 1))

    def times(self, left: Tensor, right: Tensor) -> Tensor:
        """See :meth:`Structure.times`: the beginning of the convolution."""
        return self._back(self._transform(left) * self._transform(right))

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product`: ``y_j = Σ_i x_i t_{i-j}``."""
        return self._back(self._transform(x) * self._transform(matrix).conj()[..., None, :])

    def product_transposed(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product_transposed`: ``y_i = Σ_j x_j t_{i-j}``."""
        return self._back(self._transform(x) * self._transform(matrix)[..., None, :])

    def inner(self, root: Tensor) -> Tensor:
        """See :meth:`Structure.inner`: diagonal ``j`` of ``KᵀK`` sums to ``Σ_m t_m (d-m-j) t_{m+j}``."""
        return self._mean(self.product((root * self._lengths(root))[..., None, :], root)[..., 0, :])

    def project_rows(self, x: Tensor) -> Tensor:
        """See :meth:`ThroughRoot.project_rows`: sums along diagonals are autocorrelations of rows."""
        return self._mean(self._back(self._transform(x).abs().square().sum(-2)))

    def _lengths(self, like: Tensor) -> Tensor:
        """``d, d-1, ..., 1``: how long diagonals are."""
        return torch.arange(self.width, 0, -1, dtype=like.dtype, device=like.device)

    def _mean(self, sums: Tensor) -> Tensor:
        """From sums along the diagonals of a symmetric matrix to ``Π`` of it."""
        mean = sums / self._lengths(sums)
        return torch.cat([mean[..., :1], 2 * mean[..., 1:]], dim=-1)

    def mean_diagonal(self, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.mean_diagonal`."""
        return matrix[..., 0]

    def flops(self, rows: int) -> int:
        """See :meth:`Structure.flops`: a transform takes about ``2.5 n log n``."""
        return 5 * (rows + 1) * self._size * (self._size.bit_length() - 1)
