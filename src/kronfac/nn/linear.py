"""A linear layer whose weight is a Kronecker product, which is never formed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kronfac.nn.nearest import Shapes, check_shapes, default_shapes, nearest_kronecker


class KroneckerLinear(nn.Module):
    """``y = (B ⊗ C) x + bias``, computed as ``B X Cᵀ`` with ``X`` the input as an ``n1 × n2`` matrix.

    Both factors are :class:`torch.nn.Linear` modules, used at many positions: methods of this library
    precondition them as such. The bias belongs to neither and is left to the base optimizer.

    Args:
        in_features: size of the input.
        out_features: size of the output.
        bias: whether there is one.
        shapes: ``((m1, n1), (m2, n2))`` of B and C, with ``m1·m2 = out_features`` and
            ``n1·n2 = in_features``; by default the fewest entries whose product may have full
            rank.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        shapes: Shapes | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shapes = default_shapes(out_features, in_features) if shapes is None else shapes
        check_shapes(shapes, out_features, in_features)
        self.in_features, self.out_features, self.shapes = in_features, out_features, shapes
        (m1, n1), (m2, n2) = shapes
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.left = nn.Linear(n1, m1, bias=False, **options)
        self.right = nn.Linear(n2, m2, bias=False, **options)
        self.bias = nn.Parameter(torch.empty(out_features, **options)) if bias else None
        self.right_first = n1 * m2 * (n2 + m1) <= n2 * m1 * (n1 + m2)
        self.reset_parameters()

    @classmethod
    def nearest(cls, layer: nn.Linear, shapes: Shapes | None = None) -> KroneckerLinear:
        """The layer whose weight is nearest to that of another one; the bias is the same."""
        weight = layer.weight
        found = cls(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            shapes=shapes,
            device=weight.device,
            dtype=weight.dtype,
        )
        found.set_nearest(weight, layer.bias)
        return found

    @torch.no_grad()
    def set_nearest(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take the nearest product to a weight, and a bias."""
        left, right = nearest_kronecker(weight, self.shapes)
        self.left.weight.copy_(left)
        self.right.weight.copy_(right)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def reset_parameters(self) -> None:
        """Draw factors whose product varies as much as the weight of :class:`torch.nn.Linear`."""
        for factor in (self.left, self.right):
            bound = 3**0.25 / factor.in_features**0.5
            nn.init.uniform_(factor.weight, -bound, bound)
        if self.bias is not None:
            bound = self.in_features**-0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        (_, n1), (_, n2) = self.shapes
        x = x.unflatten(-1, (n1, n2))
        first = self.left(self.right(x).mT).mT if self.right_first else None
        y: Tensor = self.right(self.left(x.mT).mT) if first is None else first
        y = y.flatten(-2)
        return y if self.bias is None else y + self.bias

    def dense(self) -> Tensor:
        """The weight as a matrix ``[out_features, in_features]``."""
        return torch.kron(self.left.weight, self.right.weight)

    def extra_repr(self) -> str:
        """See :meth:`torch.nn.Module.extra_repr`."""
        (m1, n1), (m2, n2) = self.shapes
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {m1}×{n1} ⊗ {m2}×{n2}, bias={self.bias is not None}"
