"""A linear layer whose weight is a sum of Kronecker products, which is never formed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kronfac.nn.nearest import (
    Shapes,
    check_shapes,
    check_terms,
    default_shapes,
    nearest_kronecker_sum,
)


class KroneckerLinear(nn.Module):
    """``y = (Σ B_t ⊗ C_t) x + bias``: the sum of ``B_t X C_tᵀ`` with ``X`` the input as ``n1 × n2``.

    Both kinds of factors are a :class:`torch.nn.Linear` module each, used at many positions: methods of
    this library precondition them as such. With several terms they lie side by side in the module that
    comes second, which so adds them up, and one under the other in the first. The bias belongs to neither
    and has no curvature.

    Args:
        in_features: size of the input.
        out_features: size of the output.
        bias: whether there is one.
        shapes: ``((m1, n1), (m2, n2))`` of B and C, with ``m1·m2 = out_features`` and
            ``n1·n2 = in_features``; by default the fewest entries whose product may have full
            rank.
        terms: so many products are added.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        shapes: Shapes | None = None,
        terms: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shapes = default_shapes(out_features, in_features) if shapes is None else shapes
        check_shapes(shapes, out_features, in_features)
        check_terms(terms, shapes)
        self.in_features, self.out_features = in_features, out_features
        self.shapes, self.terms = shapes, terms
        (m1, n1), (m2, n2) = shapes
        self.right_first = n1 * m2 * (n2 + m1) <= n2 * m1 * (n1 + m2)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        wide, tall = (terms, 1) if self.right_first else (1, terms)  # the left factors
        self.left = nn.Linear(wide * n1, tall * m1, bias=False, **options)
        self.right = nn.Linear(tall * n2, wide * m2, bias=False, **options)
        self.bias = nn.Parameter(torch.empty(out_features, **options)) if bias else None
        self.reset_parameters()

    @classmethod
    def nearest(
        cls, layer: nn.Linear, shapes: Shapes | None = None, terms: int = 1
    ) -> KroneckerLinear:
        """The layer whose weight is nearest to that of another one; the bias is the same."""
        weight = layer.weight
        found = cls(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            shapes=shapes,
            terms=terms,
            device=weight.device,
            dtype=weight.dtype,
        )
        found.set_nearest(weight, layer.bias)
        return found

    @torch.no_grad()
    def set_nearest(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take the nearest sum of products to a weight, and a bias."""
        left, right = nearest_kronecker_sum(weight, self.shapes, self.terms)
        lefts, rights = self.factors()
        lefts.copy_(left)
        rights.copy_(right)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def reset_parameters(self) -> None:
        """Draw factors whose sum varies as much as the weight of :class:`torch.nn.Linear`."""
        (_, n1), (_, n2) = self.shapes
        for factor, columns in ((self.left, n1), (self.right, n2)):
            bound = (3 / self.terms) ** 0.25 / columns**0.5
            nn.init.uniform_(factor.weight, -bound, bound)
        if self.bias is not None:
            bound = self.in_features**-0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        (_, n1), (_, n2) = self.shapes
        x = x.unflatten(-1, (n1, n2))
        y: Tensor
        if self.right_first:
            y = self.left(self._swapped(self.right(x))).mT
        else:
            y = self.right(self._swapped(self.left(x.mT)))
        y = y.flatten(-2)
        return y if self.bias is None else y + self.bias

    def _swapped(self, x: Tensor) -> Tensor:
        """Map ``[..., a, terms·b]`` to ``[..., b, terms·a]``."""
        if self.terms == 1:
            return x.mT
        parts: Tensor = x.unflatten(-1, (self.terms, -1))
        return parts.transpose(-3, -1).flatten(-2)

    def factors(self) -> tuple[Tensor, Tensor]:
        """All B as ``[terms, m1, n1]`` and all C as ``[terms, m2, n2]``, views of the parameters."""
        left, right, split = self.left.weight, self.right.weight, (self.terms, -1)
        if self.right_first:
            return left.unflatten(1, split).transpose(0, 1), right.unflatten(0, split)
        return left.unflatten(0, split), right.unflatten(1, split).transpose(0, 1)

    def dense(self) -> Tensor:
        """The weight as a matrix ``[out_features, in_features]``."""
        entries = torch.einsum("tij,tkl->ikjl", *self.factors())
        return entries.reshape(self.out_features, self.in_features)

    def extra_repr(self) -> str:
        """See :meth:`torch.nn.Module.extra_repr`."""
        (m1, n1), (m2, n2) = self.shapes
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        sums = "" if self.terms == 1 else f", terms={self.terms}"
        return f"{sizes}, {m1}×{n1} ⊗ {m2}×{n2}{sums}, bias={self.bias is not None}"
