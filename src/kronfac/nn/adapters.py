"""Kronecker adapters (KronA, Edalati et al. 2022): fine-tune ``W + s·(A ⊗ B)`` with W frozen.

Unlike the two thin matrices of LoRA, whose product has their small rank, a Kronecker product has the
product of its factors' ranks: it may have full rank with as few parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from kronfac.nn.linear import KroneckerLinear
from kronfac.nn.nearest import Shapes, all_shapes, default_shapes, full_rank, num_parameters


class KronAAdapter(nn.Module):
    """A frozen linear layer and a trainable Kronecker product beside it.

    At first it computes what the layer does: one factor begins at zero.

    Args:
        layer: the layer, whose parameters are frozen.
        shapes: ``((m1, n1), (m2, n2))`` of the factors; by default the fewest entries whose product
            may have full rank.
        scale: s.
    """

    def __init__(self, layer: nn.Linear, shapes: Shapes | None = None, scale: float = 1.0) -> None:
        super().__init__()
        weight = layer.weight
        if shapes is None:
            shapes = default_shapes(layer.out_features, layer.in_features)
        self.layer = layer.requires_grad_(False)
        self.delta = KroneckerLinear(
            layer.in_features,
            layer.out_features,
            bias=False,
            shapes=shapes,
            device=weight.device,
            dtype=weight.dtype,
        )
        nn.init.zeros_(self.delta.left.weight)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        out: Tensor = self.layer(x) + self.scale * self.delta(x)
        return out

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The layer with the product in its weight, trainable again."""
        self.layer.weight.add_(self.delta.dense(), alpha=self.scale)
        return self.layer.requires_grad_(True)


def attach_adapters(
    model: nn.Module,
    *,
    parameters: int | None = None,
    include: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
    scale: float = 1.0,
) -> list[str]:
    """Freeze a model, and put an adapter beside each of its linear layers; returns their names.

    Args:
        model: it is changed in place. Frozen layers that shall train too, such as a new head, are named
            in ``exclude`` and given ``requires_grad_(True)`` again.
        parameters: at most so many in each adapter, of the highest rank that they allow; by default the
            fewest for full rank.
        include: name patterns of layers, such as ``"blocks.*.mlp.*"``.
        exclude: patterns of those to leave alone.
        scale: s in ``W + s·(A ⊗ B)``.
    """
    patterns = [[one] if isinstance(one, str) else list(one) for one in (include, exclude)]
    taken, left = patterns
    inside = {
        id(part)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)  # it computes with its weights itself
        for part in module.modules()
    }
    model.requires_grad_(False)
    names = []
    for name, layer in list(model.named_modules()):
        wanted = any(fnmatchcase(name, one) for one in taken)
        wanted = wanted and not any(fnmatchcase(name, one) for one in left)
        if wanted and name and isinstance(layer, nn.Linear) and id(layer) not in inside:
            shapes = _fitting(layer, parameters)
            model.set_submodule(name, KronAAdapter(layer, shapes, scale))
            names.append(name)
    if not names:
        raise ValueError(
            f"no linear layer matches include={include!r} without exclude={exclude!r}; names are those "
            "of model.named_modules()."
        )
    return names


def merge_adapters(model: nn.Module) -> list[str]:
    """Put the products of all adapters into the weights of their layers; returns the layers' names."""
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, KronAAdapter)]
    for name, adapter in found:
        model.set_submodule(name, adapter.merged())
    return [name for name, _ in found]


def _fitting(layer: nn.Linear, parameters: int | None) -> Shapes:
    """The shapes of the highest rank, then of the most entries, within a number of parameters."""
    rows, columns = layer.out_features, layer.in_features
    if parameters is None:
        return default_shapes(rows, columns)
    least = min(map(num_parameters, all_shapes(rows, columns)))
    if least > parameters:
        raise ValueError(
            f"parameters={parameters!r} is too few for a layer of {rows} × {columns}; its smallest "
            f"adapter has {least}."
        )
    fitting = (one for one in all_shapes(rows, columns) if num_parameters(one) <= parameters)
    return max(fitting, key=lambda one: (full_rank(one), num_parameters(one)))
