"""The gradient matrices of several layers of one kind as a single tensor, and back.

One copy for all layers instead of a few operations for each: what :class:`ParameterView` does for one
layer, for layers whose parameters have the same shapes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kronfac.layers.conv import ConvLayer
from kronfac.layers.layer import Layer
from kronfac.layers.norm import NormLayer
from kronfac.layers.parameter_view import ParameterView

#: Where a matrix goes: a view of a gradient, and the value.
Place = tuple[Tensor, Tensor]


def stack_kind(view: ParameterView) -> Hashable:
    """What layers have in common whose gradients can be stacked at this step."""
    layer, bias = view.layer, view.bias_grad
    dtype = None if bias is None else bias.dtype
    kind = type(layer), layer.weight.shape, layer.factor_dtype
    return *kind, view.weight_grad.dtype, dtype


def stacked_gradients(views: Sequence[ParameterView]) -> Tensor:
    """Gradient matrices ``[k, *b, d_out, d_in]`` in factor precision, in memory of their own."""
    first = views[0].layer
    grads = [view.weight_grad for view in views]
    if _is_conv(first):  # one permuted copy, not one for each
        matrices = torch.stack(grads).movedim(2, -1).reshape(len(views), *first._weight_shape())
    else:
        own = [view.layer._to_matrix(grad) for view, grad in zip(views, grads, strict=True)]
        matrices = torch.stack(own)
    matrices = matrices.to(first.factor_dtype)
    if first.bias is None or not first.bias_trains:
        return matrices
    columns = torch.stack([view.bias_column() for view in views])
    columns = columns.reshape(*matrices.shape[:-1], 1).to(matrices.dtype)
    return torch.cat([matrices, columns], dim=-1)


def places(views: Sequence[ParameterView], matrices: Tensor) -> list[Place]:
    """Where the parts of matrices ``[k, *b, d_out, d_in]`` belong."""
    found: list[Place] = []
    first = views[0].layer
    if first.bias is not None and first.bias_trains:
        for view, column in zip(views, matrices[..., -1].unbind(), strict=True):
            if (grad := view.bias_grad) is not None:
                target = view.layer._own_bias(grad)
                found.append((target, column.reshape(target.shape)))
        matrices = matrices[..., :-1]
    grads = [view.weight_grad for view in views]
    if _is_conv(first) or _is_norm(first):
        values = _as_weights(first, matrices)
        return [*found, *zip(grads, values.unbind(), strict=True)]
    for view, grad, matrix in zip(views, grads, matrices.unbind(), strict=True):
        found.append(view.layer._weight_place(grad, matrix))
    return found


def write(places: Sequence[Place]) -> None:
    """Put all values in their places, at once."""
    if places:
        targets, values = zip(*places, strict=True)
        torch._foreach_copy_(list(targets), list(values))


def _as_weights(layer: Layer, matrices: Tensor) -> Tensor:
    """Matrices in the shape of the weights, ``[k, *weight]``."""
    count, shape = len(matrices), layer.weight.shape
    if not _is_conv(layer):
        return matrices.reshape(count, *shape)
    d_out, d_in, *kernel = shape
    # In the order of the gradients, for which all of them can be copied at once.
    return matrices.reshape(count, d_out, *kernel, d_in).movedim(-1, 2).contiguous()


def _is_conv(layer: Layer) -> bool:
    """Whether it is a convolution as far as its matrix is concerned, also of a user's own class."""
    kind = type(layer)
    return _same(kind, ConvLayer, "_to_matrix") and _same(kind, ConvLayer, "_weight_place")


def _is_norm(layer: Layer) -> bool:
    return _same(type(layer), NormLayer, "_weight_place")


def _same(kind: type, known: type, name: str) -> bool:
    return getattr(kind, name) is getattr(known, name)
