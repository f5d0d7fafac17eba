"""What a norm layer shows of each sample: sums over its positions, channel by channel.

They are kept until the step, when those of all norms are put side by side and become rows in a few
kernels, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kronfac.layers.rows import DenseRows, Rows
from kronfac.linalg.covariance import gram


class ChannelSums(Rows):
    """Rows ``u = (Σ g·x̂, Σ g)``, ``[C, N, 1, 2]``, or ``[C, N, 1, 1]`` without a bias.

    Args:
        products: ``Σ g·x̂`` of each sample and channel, ``[N, C]``; ``Σ g·x`` if there is a ``centre``.
        gradients: ``Σ g``, ``[N, C]``; ``None`` if nobody needs it.
        centre: mean ``[C]`` and scale ``[C]`` of the channels, ``x̂ = (x - mean)·scale``.
        bias: whether ``Σ g`` is a column.
    """

    def __init__(
        self,
        products: Tensor,
        gradients: Tensor | None,
        centre: tuple[Tensor, Tensor] | None = None,
        bias: bool = True,
    ) -> None:
        self.products = products
        self.gradients = gradients
        self.centre = centre
        self.bias = bias
        self.samples, self.positions = products.shape[0], 1

    def dense(self) -> Tensor:
        """See :meth:`Rows.dense`."""
        return _rows([self]).unsqueeze(-2)

    def summed(self) -> Tensor:
        """See :meth:`Rows.summed`."""
        return _rows([self])

    def covariance(self, narrow: bool = False) -> Tensor:
        """See :meth:`Rows.covariance`."""
        return gram(_rows([self]), narrow)

    def squares(self) -> Tensor:
        """See :meth:`Rows.squares`."""
        return _rows([self]).square().sum(-2)

    def total(self) -> Tensor:
        """See :meth:`Rows.total`."""
        return _rows([self]).sum(-2)

    @property
    def form(self) -> Hashable:
        """What norms have in common that can be put side by side."""
        tensor = self.products
        kind = self.samples, self.bias, self.gradients is None, self.centre is None
        return *kind, tensor.dtype, tensor.device


class _Known(DenseRows):
    """Rows whose covariance is known."""

    def __init__(self, rows: Tensor, covariance: Tensor) -> None:
        super().__init__(rows.unsqueeze(-2))
        self._covariance = covariance

    def covariance(self, narrow: bool = False) -> Tensor:
        return self._covariance


def side_by_side(sums: Sequence[ChannelSums]) -> list[Rows]:
    """Rows of several norms of one :attr:`ChannelSums.form`, with their covariances."""
    rows, widths = _rows(sums), [one.products.shape[1] for one in sums]
    parts = zip(rows.split(widths), gram(rows).split(widths), strict=True)
    return [_Known(part, covariance) for part, covariance in parts]


def _rows(sums: Sequence[ChannelSums]) -> Tensor:
    """Rows of all channels, ``[C, N, k]``."""
    products = _beside([one.products for one in sums])
    found = [one.gradients for one in sums if one.gradients is not None]
    gradients = _beside(found) if found else None
    centres = [one.centre for one in sums if one.centre is not None]
    if centres:
        assert gradients is not None
        mean, scale = (_beside(list(each)) for each in zip(*centres, strict=True))
        products = torch.addcmul(products, mean, gradients, value=-1).mul_(scale)
    columns = [products]
    if sums[0].bias:
        assert gradients is not None
        columns.append(gradients)
    return torch.stack(columns, dim=-1).transpose(0, 1)


def _beside(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
