"""Sets of square matrices, closed under sums and products, of which only what is not fixed is kept.

A matrix of width ``d`` is a tensor ``[*b, *shape]`` of its free entries. ``Π`` turns a symmetric matrix
``M`` into a member of the set: the natural gradient step of a root ``K`` of a covariance ``K Kᵀ`` along
the set, whose metric at the identity is ``½ tr (B + Bᵀ)²``. An entry whose mirror image is in the set too
stays; one whose mirror image is fixed at zero counts for both and is doubled; entries that are tied are
averaged. So ``Π(M) + Π(M)ᵀ = 2M`` wherever the set does not force an entry to zero or ties it to others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.layers.rows import Rows
from kronfac.linalg.covariance import gram


class Structure(ABC):
    """One such set. Products work on rows ``x: [*b, n, d]``."""

    name: ClassVar[str]
    #: Whether rows are observed through the root in use, since ``Π(KᵀAK)`` has fewer numbers than what
    #: it could be computed from later.
    through_root: ClassVar[bool] = False
    #: Whether what is observed is a symmetric matrix.
    symmetric: ClassVar[bool] = False
    #: Shape of a matrix, and of what is observed of rows.
    shape: tuple[int, ...]
    observed_shape: tuple[int, ...]

    def __init__(self, width: int, shape: tuple[int, ...]) -> None:
        self.width = width
        self.shape = self.observed_shape = shape

    @abstractmethod
    def identity(self, like: Tensor) -> Tensor:
        """The identity, in the precision of a tensor and where that is."""

    @abstractmethod
    def times(self, left: Tensor, right: Tensor) -> Tensor:
        """The product of two members, a member."""

    @abstractmethod
    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """``x M``."""

    @abstractmethod
    def product_transposed(self, x: Tensor, matrix: Tensor) -> Tensor:
        """``x Mᵀ``."""

    @abstractmethod
    def inner(self, root: Tensor) -> Tensor:
        """``Π(KᵀK)``."""

    @abstractmethod
    def observe(self, rows: Rows, root: Tensor | None) -> Tensor:
        """What is kept of rows ``a`` and adds up: enough for :meth:`curvature`."""

    @abstractmethod
    def curvature(self, mean: Tensor, root: Tensor) -> Tensor:
        """``Π(KᵀAK)`` from the mean of what was observed."""

    @abstractmethod
    def mean_diagonal(self, matrix: Tensor) -> Tensor:
        """``tr M/d``, ``[*b]``."""

    @abstractmethod
    def flops(self, rows: int) -> int:
        """Operations of :meth:`product` for so many rows."""

    def observed_mean_diagonal(self, mean: Tensor) -> Tensor:
        """``tr A/d`` from the mean of what was observed, unless that is through the root."""
        return self.mean_diagonal(mean)

    def apply(self, x: Tensor, root: Tensor) -> Tensor:
        """``x K Kᵀ``."""
        return self.product_transposed(self.product(x, root), root)

    def bound(self, matrix: Tensor) -> Tensor:
        """A number that the spectral norm does not exceed, ``[*b]``: ``√(‖M‖₁ ‖M‖∞)``."""
        ones = matrix.new_ones(*matrix.shape[: matrix.dim() - len(self.shape)], 1, self.width)
        size = matrix.abs()
        columns = self.product(ones, size).amax((-2, -1))
        rows = self.product_transposed(ones, size).amax((-2, -1))
        return columns.clamp_min(0).sqrt() * rows.clamp_min(0).sqrt()

    def spread(self, numbers: Tensor) -> Tensor:
        """Numbers ``[*b]`` in a shape that multiplies matrices."""
        return numbers.reshape(*numbers.shape, *([1] * len(self.shape)))


class Dense(Structure):
    """All matrices. With it SINGD is INGD."""

    name = "dense"
    symmetric = True

    def __init__(self, width: int) -> None:
        super().__init__(width, (width, width))

    def identity(self, like: Tensor) -> Tensor:
        """See :meth:`Structure.identity`."""
        return torch.eye(self.width, dtype=like.dtype, device=like.device)

    def times(self, left: Tensor, right: Tensor) -> Tensor:
        """See :meth:`Structure.times`."""
        return left @ right

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product`."""
        return x @ matrix

    def product_transposed(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product_transposed`."""
        return x @ matrix.mT

    def inner(self, root: Tensor) -> Tensor:
        """See :meth:`Structure.inner`."""
        return root.mT @ root

    def observe(self, rows: Rows, root: Tensor | None) -> Tensor:
        """See :meth:`Structure.observe`: ``Σ a aᵀ``, which layers may know a cheaper way to."""
        return rows.covariance()

    def curvature(self, mean: Tensor, root: Tensor) -> Tensor:
        """See :meth:`Structure.curvature`."""
        return root.mT @ mean @ root

    def mean_diagonal(self, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.mean_diagonal`."""
        return matrix.diagonal(dim1=-2, dim2=-1).mean(-1)

    def flops(self, rows: int) -> int:
        """See :meth:`Structure.flops`."""
        return 2 * rows * self.width**2


class LowerTriangular(Structure):
    """Lower triangles, of ``d(d+1)/2`` numbers; products go through whole matrices."""

    name = "lower-triangular"
    symmetric = True

    def __init__(self, width: int) -> None:
        super().__init__(width, (width * (width + 1) // 2,))
        self.observed_shape = (width, width)

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        rows, columns = torch.tril_indices(self.width, self.width, device=device)
        return rows, columns

    def _whole(self, matrix: Tensor) -> Tensor:
        rows, columns = self._places(matrix.device)
        whole = matrix.new_zeros(*matrix.shape[:-1], self.width, self.width)
        whole[..., rows, columns] = matrix
        return whole

    def _lower(self, whole: Tensor) -> Tensor:
        rows, columns = self._places(whole.device)
        return whole[..., rows, columns]

    def _project(self, symmetric: Tensor) -> Tensor:
        return self._lower(symmetric + symmetric.tril(-1))

    def identity(self, like: Tensor) -> Tensor:
        """See :meth:`Structure.identity`."""
        return self._lower(torch.eye(self.width, dtype=like.dtype, device=like.device))

    def times(self, left: Tensor, right: Tensor) -> Tensor:
        """See :meth:`Structure.times`."""
        return self._lower(self._whole(left) @ self._whole(right))

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product`."""
        return x @ self._whole(matrix)

    def product_transposed(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product_transposed`."""
        return x @ self._whole(matrix).mT

    def apply(self, x: Tensor, root: Tensor) -> Tensor:
        """See :meth:`Structure.apply`."""
        whole = self._whole(root)
        return x @ whole @ whole.mT

    def inner(self, root: Tensor) -> Tensor:
        """See :meth:`Structure.inner`."""
        whole = self._whole(root)
        return self._project(whole.mT @ whole)

    def observe(self, rows: Rows, root: Tensor | None) -> Tensor:
        """See :meth:`Structure.observe`: ``Σ a aᵀ``, of which a triangle says all."""
        return rows.covariance()

    def curvature(self, mean: Tensor, root: Tensor) -> Tensor:
        """See :meth:`Structure.curvature`."""
        whole = self._whole(root)
        return self._project(whole.mT @ mean @ whole)

    def mean_diagonal(self, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.mean_diagonal`."""
        ends = torch.arange(1, self.width + 1, device=matrix.device).cumsum(0) - 1
        return matrix[..., ends].mean(-1)

    def observed_mean_diagonal(self, mean: Tensor) -> Tensor:
        """See :meth:`Structure.observed_mean_diagonal`."""
        return mean.diagonal(dim1=-2, dim2=-1).mean(-1)

    def flops(self, rows: int) -> int:
        """See :meth:`Structure.flops`."""
        return 2 * rows * self.width**2


class Diagonal(Structure):
    """Diagonals, of ``d`` numbers."""

    name = "diagonal"

    def __init__(self, width: int) -> None:
        super().__init__(width, (width,))

    def identity(self, like: Tensor) -> Tensor:
        """See :meth:`Structure.identity`."""
        return torch.ones(self.width, dtype=like.dtype, device=like.device)

    def times(self, left: Tensor, right: Tensor) -> Tensor:
        """See :meth:`Structure.times`."""
        return left * right

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product`."""
        return x * matrix[..., None, :]

    def product_transposed(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product_transposed`."""
        return x * matrix[..., None, :]

    def apply(self, x: Tensor, root: Tensor) -> Tensor:
        """See :meth:`Structure.apply`."""
        return x * root.square()[..., None, :]

    def inner(self, root: Tensor) -> Tensor:
        """See :meth:`Structure.inner`."""
        return root.square()

    def observe(self, rows: Rows, root: Tensor | None) -> Tensor:
        """See :meth:`Structure.observe`."""
        return rows.squares()

    def curvature(self, mean: Tensor, root: Tensor) -> Tensor:
        """See :meth:`Structure.curvature`."""
        return mean * root.square()

    def mean_diagonal(self, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.mean_diagonal`."""
        return matrix.mean(-1)

    def bound(self, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.bound`: here it is the spectral norm."""
        return matrix.abs().amax(-1)

    def flops(self, rows: int) -> int:
        """See :meth:`Structure.flops`."""
        return rows * self.width


class BlockDiagonal(Structure):
    """Blocks of one width along the diagonal, and a narrower one for what is left."""

    name = "block-diagonal"

    def __init__(self, width: int, block: int) -> None:
        self.block = min(block, width)
        self.count, self.rest = divmod(width, self.block)
        super().__init__(width, (self.count * self.block**2 + self.rest**2,))

    def _blocks(self, matrix: Tensor) -> list[Tensor]:
        """The blocks ``[*b, count, k, k]`` of each width, as views."""
        widths = (
            [(self.count, self.block), (1, self.rest)] if self.rest else [(self.count, self.block)]
        )
        pieces = matrix.split([count * width**2 for count, width in widths], dim=-1)
        return [
            piece.unflatten(-1, (count, width, width))
            for piece, (count, width) in zip(pieces, widths, strict=True)
        ]

    def _columns(self, x: Tensor) -> list[Tensor]:
        """The columns ``[*b, count, n, k]`` that belong to them, as views."""
        main = self.count * self.block
        found: list[Tensor] = [
            x[..., :main].unflatten(-1, (self.count, self.block)).transpose(-3, -2)
        ]
        return [*found, x[..., main:].unsqueeze(-3)] if self.rest else found

    @staticmethod
    def _joined(columns: list[Tensor]) -> Tensor:
        return torch.cat([one.transpose(-3, -2).flatten(-2) for one in columns], dim=-1)

    @staticmethod
    def _flat(blocks: list[Tensor]) -> Tensor:
        return torch.cat([one.flatten(-3) for one in blocks], dim=-1)

    def identity(self, like: Tensor) -> Tensor:
        """See :meth:`Structure.identity`."""
        sizes = [self.block] * self.count + [self.rest] * bool(self.rest)
        each = [torch.eye(n, dtype=like.dtype, device=like.device).flatten() for n in sizes]
        return torch.cat(each)

    def times(self, left: Tensor, right: Tensor) -> Tensor:
        """See :meth:`Structure.times`."""
        pairs = zip(self._blocks(left), self._blocks(right), strict=True)
        return self._flat([one @ other for one, other in pairs])

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product`."""
        pairs = zip(self._columns(x), self._blocks(matrix), strict=True)
        return self._joined([columns @ block for columns, block in pairs])

    def product_transposed(self, x: Tensor, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.product_transposed`."""
        pairs = zip(self._columns(x), self._blocks(matrix), strict=True)
        return self._joined([columns @ block.mT for columns, block in pairs])

    def inner(self, root: Tensor) -> Tensor:
        """See :meth:`Structure.inner`."""
        return self._flat([block.mT @ block for block in self._blocks(root)])

    def observe(self, rows: Rows, root: Tensor | None) -> Tensor:
        """See :meth:`Structure.observe`: the blocks of ``Σ a aᵀ``."""
        return self._flat([gram(one) for one in self._columns(rows.dense().flatten(-3, -2))])

    def curvature(self, mean: Tensor, root: Tensor) -> Tensor:
        """See :meth:`Structure.curvature`."""
        pairs = zip(self._blocks(mean), self._blocks(root), strict=True)
        return self._flat([block.mT @ own @ block for own, block in pairs])

    def mean_diagonal(self, matrix: Tensor) -> Tensor:
        """See :meth:`Structure.mean_diagonal`."""
        diagonals = [block.diagonal(dim1=-2, dim2=-1) for block in self._blocks(matrix)]
        return torch.stack([one.sum((-2, -1)) for one in diagonals]).sum(0) / self.width

    def flops(self, rows: int) -> int:
        """See :meth:`Structure.flops`."""
        return 2 * rows * math.prod(self.shape)
