"""One side of a layer call as canonical rows, computed only in the form that a method needs.

A call is ``a: [*b, N, S, d_in]`` on its input side and ``g: [*b, N, S, d_out]`` on its output side:
``N`` samples, ``S`` shared positions, and ``*b`` the groups of a grouped convolution (empty
otherwise). A layer with a trainable bias has a column of ones at the end of ``a``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kronfac.linalg import devices
from kronfac.linalg.covariance import (
    bordered,
    bordered_gram,
    channel_gram,
    channel_rows,
    gram,
    has_maps,
    with_ones,
)
from kronfac.linalg.patches import (
    Window,
    patch_squares,
    patch_sums,
    patch_total,
    patches,
    patches_at,
)
from kronfac.linalg.positions import maps_at, spread_positions
from kronfac.linalg.sliding import patch_covariance


def _at(rows: Tensor, positions: Tensor) -> Tensor:
    """Rows at some positions of each sample: ``[*b, N, S, d]`` and ``[N, P]`` give ``[*b, N, P, d]``."""
    samples = torch.arange(rows.shape[-3], device=rows.device)[:, None]
    found: Tensor = rows[..., samples, positions, :]
    return found


class Rows(ABC):
    """Rows ``[*b, N, S, d]``, which need not be materialised."""

    samples: int
    positions: int
    ones = False

    @property
    def count(self) -> int | Tensor:
        """Number of rows: ``N·S``, or fewer where some of them are masked."""
        return self._size

    @property
    def _size(self) -> int:
        return self.samples * self.positions

    @abstractmethod
    def covariance(self, narrow: bool = False) -> Tensor:
        """Return ``Σ r rᵀ``, ``[*b, d, d]``; ``narrow`` allows bfloat16 products, if they are faster."""

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

    def part(self, start: int, stop: int) -> Rows:
        """The rows of samples from ``start`` to ``stop``."""
        return DenseRows(self.dense()[..., start:stop, :, :])

    def every(self, start: int, stride: int) -> Rows:
        """The rows of every so many samples, from one on."""
        return DenseRows(self.dense()[..., start::stride, :, :])

    def some_positions(self, start: int, stride: int) -> Rows:
        """``S // stride`` positions of each sample at this distance from each other.

        Those of sample ``n`` begin at position ``start + n`` and go on from the first one at the end.
        """
        rows = self.dense()
        return DenseRows(_at(rows, self._positions(start, stride, rows.device)))

    def _positions(self, start: int, stride: int, device: torch.device) -> Tensor:
        """Numbers of these positions, ``[N, S // stride]``."""
        return spread_positions(self.samples, self.positions, start, stride, device)

    def beside(self, later: Rows) -> Rows:
        """These rows and, as further positions of the same samples, those of a later use."""
        return DenseRows(torch.cat([self.dense(), later.dense()], dim=-2))

    def kept(self) -> Rows:
        """The same rows in memory of their own: what they were made from may be overwritten."""
        return DenseRows(self.dense().clone())

    def _extend(self, values: Tensor, last: float) -> Tensor:
        """Append what a column of ones contributes."""
        if not self.ones:
            return values
        return torch.cat([values, values.new_full((*values.shape[:-1], 1), last)], dim=-1)


class DenseRows(Rows):
    """Rows that exist as a tensor ``[*b, N, S, d]``, with an optional implied column of ones."""

    def __init__(self, rows: Tensor, ones: bool = False) -> None:
        self.rows = rows
        self.ones = ones
        self.samples, self.positions = rows.shape[-3], rows.shape[-2]

    def covariance(self, narrow: bool = False) -> Tensor:
        """See :meth:`Rows.covariance`."""
        flat = self.rows.flatten(-3, -2)
        return bordered_gram(flat, narrow) if self.ones else gram(flat, narrow)

    def squares(self) -> Tensor:
        """See :meth:`Rows.squares`."""
        return self._extend(self.rows.square().sum((-3, -2)), self._size)

    def total(self) -> Tensor:
        """See :meth:`Rows.total`."""
        return self._extend(self.rows.sum((-3, -2)), self._size)

    def summed(self) -> Tensor:
        """See :meth:`Rows.summed`."""
        return self._extend(self.rows.sum(-2), self.positions)

    def dense(self) -> Tensor:
        """See :meth:`Rows.dense`."""
        return with_ones(self.rows) if self.ones else self.rows

    def part(self, start: int, stop: int) -> Rows:
        """See :meth:`Rows.part`."""
        return DenseRows(self.rows[..., start:stop, :, :], self.ones)

    def every(self, start: int, stride: int) -> Rows:
        """See :meth:`Rows.every`."""
        return DenseRows(self.rows[..., start::stride, :, :], self.ones)

    def some_positions(self, start: int, stride: int) -> Rows:
        """See :meth:`Rows.some_positions`."""
        return DenseRows(
            _at(self.rows, self._positions(start, stride, self.rows.device)), self.ones
        )

    def kept(self) -> Rows:
        """See :meth:`Rows.kept`."""
        return DenseRows(self.rows.clone(), self.ones)


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

    def covariance(self, narrow: bool = False) -> Tensor:
        """See :meth:`Rows.covariance`."""
        product = patch_covariance(self.x, self.window)
        if not self.ones:
            return product
        return bordered(product, patch_total(self.x, self.window), self._size)

    def squares(self) -> Tensor:
        """See :meth:`Rows.squares`."""
        return self._extend(patch_squares(self.x, self.window), self._size)

    def total(self) -> Tensor:
        """See :meth:`Rows.total`."""
        return self._extend(patch_total(self.x, self.window), self._size)

    def summed(self) -> Tensor:
        """See :meth:`Rows.summed`."""
        return self._extend(patch_sums(self.x, self.window), self.positions)

    def dense(self) -> Tensor:
        """See :meth:`Rows.dense`."""
        rows = patches(self.x, self.window)
        return with_ones(rows) if self.ones else rows

    def part(self, start: int, stop: int) -> Rows:
        """See :meth:`Rows.part`."""
        return PatchRows(self.x[start:stop], self.window, self.ones)

    def every(self, start: int, stride: int) -> Rows:
        """See :meth:`Rows.every`."""
        return PatchRows(self.x[start::stride], self.window, self.ones)

    def some_positions(self, start: int, stride: int) -> Rows:
        """See :meth:`Rows.some_positions`; other patches are not collected."""
        where = self._positions(start, stride, self.x.device)
        if devices.wants_few_kernels(self.x.device) and self.window.pointwise:
            maps = maps_at(self.x, where).unflatten(1, (self.window.groups, -1))
            rows = maps.permute(1, 0, 3, 2)  # [g, N, P, C]
            return DenseRows(rows if self.window.groups > 1 else rows[0], self.ones)
        return DenseRows(patches_at(self.x, self.window, where), self.ones)

    def kept(self) -> Rows:
        """See :meth:`Rows.kept`; the input takes less memory than its patches."""
        return PatchRows(self.x.clone(), self.window, self.ones)


class MapRows(Rows):
    """The positions of a feature map ``[N, g·C, *spatial]``, one row of channels each."""

    def __init__(self, x: Tensor, groups: int) -> None:
        self.x = x
        self.groups = groups
        self.samples = x.shape[0]
        self.positions = x.numel() // max(1, x.shape[0] * x.shape[1])

    def covariance(self, narrow: bool = False) -> Tensor:
        """See :meth:`Rows.covariance`."""
        return channel_gram(self.x, self.groups, narrow)

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

    def part(self, start: int, stop: int) -> Rows:
        """See :meth:`Rows.part`."""
        return MapRows(self.x[start:stop], self.groups)

    def every(self, start: int, stride: int) -> Rows:
        """See :meth:`Rows.every`; a copy has the layout that products are fast in."""
        chosen = self.x[start::stride]
        if not devices.wants_few_kernels(chosen.device):
            return MapRows(chosen if has_maps(chosen) else chosen.clone(), self.groups)
        return MapRows(chosen.transpose(0, 1).contiguous().transpose(0, 1), self.groups)

    def some_positions(self, start: int, stride: int) -> Rows:
        """See :meth:`Rows.some_positions`."""
        maps = self.x.flatten(2)
        where = self._positions(start, stride, maps.device)
        if devices.wants_few_kernels(maps.device):
            return MapRows(maps_at(maps, where), self.groups)
        where = where[:, None, :].expand(-1, maps.shape[1], -1)
        return MapRows(maps.gather(2, where), self.groups)

    def kept(self) -> Rows:
        """See :meth:`Rows.kept`."""
        return MapRows(self.x.clone(), self.groups)


class TokenRows(Rows):
    """One-hot rows of token numbers ``[N, *shared]``: the input side of an embedding.

    Their covariance is diagonal. Positions of ``padding`` do not count as rows.
    """

    def __init__(self, tokens: Tensor, width: int, padding: int | None, dtype: torch.dtype) -> None:
        samples = tokens.shape[0] if tokens.dim() > 1 else 1
        positions = math.prod(tokens.shape[1:]) if tokens.dim() > 1 else tokens.numel()
        self.tokens = tokens.reshape(samples, positions)
        self.width = width
        self.padding = padding
        self.dtype = dtype
        self.samples, self.positions = self.tokens.shape

    @property
    def count(self) -> int | Tensor:
        """See :attr:`Rows.count`."""
        return self._size if self.padding is None else (self.tokens != self.padding).sum()

    def covariance(self, narrow: bool = False) -> Tensor:
        """See :meth:`Rows.covariance`."""
        return self.total().diag_embed()

    def squares(self) -> Tensor:
        """See :meth:`Rows.squares`."""
        return self.total()

    def total(self) -> Tensor:
        """See :meth:`Rows.total`."""
        return self._counts(self.tokens.reshape(1, -1))[0]

    def summed(self) -> Tensor:
        """See :meth:`Rows.summed`."""
        return self._counts(self.tokens)

    def dense(self) -> Tensor:
        """See :meth:`Rows.dense`."""
        each = self.tokens.reshape(-1, 1)
        return self._counts(each).reshape(self.samples, self.positions, self.width)

    def part(self, start: int, stop: int) -> Rows:
        """See :meth:`Rows.part`."""
        return self._of(self.tokens[start:stop])

    def beside(self, later: Rows) -> Rows:
        """See :meth:`Rows.beside`."""
        if not isinstance(later, TokenRows):
            return super().beside(later)
        return self._of(torch.cat([self.tokens, later.tokens], dim=1))

    def kept(self) -> Rows:
        """See :meth:`Rows.kept`."""
        return self._of(self.tokens.clone())

    def _of(self, tokens: Tensor) -> TokenRows:
        """Rows of other tokens ``[N, S]``."""
        return TokenRows(tokens, self.width, self.padding, self.dtype)

    def _counts(self, tokens: Tensor) -> Tensor:
        """Occurrences of each token in each row of ``tokens``: ``[L, S] -> [L, width]``."""
        weights = torch.ones(tokens.shape, dtype=self.dtype, device=tokens.device)
        if self.padding is not None:
            weights = weights.masked_fill(tokens == self.padding, 0)
        counts = weights.new_zeros(tokens.shape[0], self.width)
        return counts.scatter_add_(1, tokens, weights)
