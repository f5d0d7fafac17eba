"""One side of a layer call as canonical rows, computed only in the form that a method asks for.

A call is ``a: [*b, N, S, d_in]`` on its input side and ``g: [*b, N, S, d_out]`` on its output side:
``N`` samples, ``S`` shared positions, and ``*b`` the groups of a grouped convolution (empty
otherwise). A layer with a trainable bias has a column of ones at the end of ``a``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kronfac.linalg.covariance import bordered, channel_gram, channel_rows, gram, with_ones
from kronfac.linalg.patches import (
    Window,
    patch_squares,
    patch_sums,
    patch_total,
    patches,
)
from kronfac.linalg.sliding import patch_covariance


class Rows(ABC):
    """Rows ``[*b, N, S, d]`` that may never exist in memory."""

    samples: int
    positions: int
    ones = False

    @property
    def count(self) -> int:
        """Number of rows, ``N·S``."""
        return self.samples * self.positions

    @abstractmethod
    def covariance(self) -> Tensor:
        """Return ``Σ r rᵀ``, ``[*b, d, d]``."""

    @abstractmethod
    def squares(self) -> Tensor:
        """Return ``Σ r²``, the diagonal of the covariance, ``[*b, d]``."""

    @abstractmethod
    def total(self) -> Tensor:
        """Return ``Σ r``, ``[*b, d]``."""

    @abstractmethod
    def summed(self) -> Tensor:
        """Return each sample's rows summed over positions, ``[*b, N, d]``."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return all rows, ``[*b, N, S, d]``."""

    def _extend(self, values: Tensor, last: float) -> Tensor:
        """Append what a column of ones gives."""
        if not self.ones:
            return values
        return torch.cat([values, values.new_full((*values.shape[:-1], 1), last)], dim=-1)


class DenseRows(Rows):
    """Rows that exist as a tensor ``[*b, N, S, d]``, with an optional implied column of ones."""

    def __init__(self, rows: Tensor, ones: bool = False) -> None:
        self.rows = rows
        self.ones = ones
        self.samples, self.positions = rows.shape[-3], rows.shape[-2]

    def covariance(self) -> Tensor:
        """See :meth:`Rows.covariance`."""
        flat = self.rows.flatten(-3, -2)
        product = gram(flat)
        return bordered(product, flat.sum(-2), self.count) if self.ones else product

    def squares(self) -> Tensor:
        """See :meth:`Rows.squares`."""
        return self._extend(self.rows.square().sum((-3, -2)), self.count)

    def total(self) -> Tensor:
        """See :meth:`Rows.total`."""
        return self._extend(self.rows.sum((-3, -2)), self.count)

    def summed(self) -> Tensor:
        """See :meth:`Rows.summed`."""
        return self._extend(self.rows.sum(-2), self.positions)

    def dense(self) -> Tensor:
        """See :meth:`Rows.dense`."""
        return with_ones(self.rows) if self.ones else self.rows


class PatchRows(Rows):
    """The patches that a convolution sees, from its input ``[N, g·C, *spatial]``."""

    def __init__(self, x: Tensor, window: Window, ones: bool) -> None:
        self.x = x
        self.window = window
        self.ones = ones
        self.samples = x.shape[0]
        self.positions = 1
        for size in window.output_size(x.shape[2:]):
            self.positions *= size

    def covariance(self) -> Tensor:
        """See :meth:`Rows.covariance`."""
        product = patch_covariance(self.x, self.window)
        if not self.ones:
            return product
        return bordered(product, patch_total(self.x, self.window), self.count)

    def squares(self) -> Tensor:
        """See :meth:`Rows.squares`."""
        return self._extend(patch_squares(self.x, self.window), self.count)

    def total(self) -> Tensor:
        """See :meth:`Rows.total`."""
        return self._extend(patch_total(self.x, self.window), self.count)

    def summed(self) -> Tensor:
        """See :meth:`Rows.summed`."""
        return self._extend(patch_sums(self.x, self.window), self.positions)

    def dense(self) -> Tensor:
        """See :meth:`Rows.dense`."""
        rows = patches(self.x, self.window)
        return with_ones(rows) if self.ones else rows


class MapRows(Rows):
    """The positions of a feature map ``[N, g·C, *spatial]``, one row of channels each."""

    def __init__(self, x: Tensor, groups: int) -> None:
        self.x = x
        self.groups = groups
        self.samples = x.shape[0]
        self.positions = x.numel() // max(1, x.shape[0] * x.shape[1])

    def covariance(self) -> Tensor:
        """See :meth:`Rows.covariance`."""
        return channel_gram(self.x, self.groups)

    def squares(self) -> Tensor:
        """See :meth:`Rows.squares`."""
        return MapRows(self.x.square(), self.groups).total()

    def total(self) -> Tensor:
        """See :meth:`Rows.total`."""
        return self.summed().sum(-2)

    def summed(self) -> Tensor:
        """See :meth:`Rows.summed`."""
        sums = self.x.flatten(2).sum(2)
        return sums if self.groups == 1 else sums.unflatten(1, (self.groups, -1)).transpose(0, 1)

    def dense(self) -> Tensor:
        """See :meth:`Rows.dense`."""
        rows: Tensor = channel_rows(self.x, self.groups)
        return rows.reshape(*rows.shape[:-2], self.samples, self.positions, rows.shape[-1])
