"""The one difference between the library's rows and the reference's: the order of conv features.

The reference orders the features of a convolution as `weight.flatten(1)`, channels first and taps
inside; the library as a channels_last weight, taps first and channels inside. The bias is last in
both, and layers without taps have the same order in both.
"""

from typing import Any

import torch
from torch import Tensor, nn


def feature_order(layer: Any) -> Tensor:
    """Indices `i` such that `reference[..., i]` has the library's order."""
    has_bias = layer.bias is not None and layer.bias.requires_grad
    if isinstance(layer, nn.Linear):
        return torch.arange(layer.in_features + has_bias)
    width = layer.weight[0].numel()
    order = torch.arange(width).reshape(layer.in_channels // layer.groups, -1).T.flatten()
    return torch.cat([order, torch.tensor([width])]) if has_bias else order


def in_library_order(layer: Any, rows: Tensor) -> Tensor:
    """Reorder the last dimension of the reference's rows or matrices."""
    return rows[..., feature_order(layer)]


def factor_in_library_order(layer: Any, factor: Tensor) -> Tensor:
    """Reorder both sides of the reference's input factor."""
    order = feature_order(layer)
    return factor[..., order, :][..., order]
