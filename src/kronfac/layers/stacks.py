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

#: Where a matrix goes: a view of a gradient, and the value.
Place = tuple[Tensor, Tensor]


def stack_kind(layer: Layer) -> Hashable:
    """What layers have in common whose gradients can be stacked at this step."""
    weight, bias = layer.weight, layer.bias
    assert weight.grad is not None
    own = bias if layer.bias_trains else None
    dtype = None if own is None or own.grad is None else own.grad.dtype
    return type(layer), weight.shape, layer.factor_dtype, weight.grad.dtype, dtype


def stacked_gradients(layers: Sequence[Layer]) -> Tensor:
    """Gradient matrices ``[k, *b, d_out, d_in]`` in factor precision, in memory of their own."""
    first = layers[0]
    grads = [grad for layer in layers if (grad := layer.weight.grad) is not None]
    if _is_conv(first):  # one permuted copy, not one for each
        matrices = torch.stack(grads).movedim(2, -1).reshape(len(layers), *first._weight_shape())
    else:
        own = [layer._to_matrix(grad) for layer, grad in zip(layers, grads, strict=True)]
        matrices = torch.stack(own)
    matrices = matrices.to(first.factor_dtype)
    if first.bias is None or not first.bias_trains:
        return matrices
    columns = torch.stack([_bias_column(layer) for layer in layers])
    columns = columns.reshape(*matrices.shape[:-1], 1).to(matrices.dtype)
    return torch.cat([matrices, columns], dim=-1)


def places(layers: Sequence[Layer], matrices: Tensor) -> list[Place]:
    """Where the parts of matrices ``[k, *b, d_out, d_in]`` belong."""
    found: list[Place] = []
    first = layers[0]
    if first.bias is not None and first.bias_trains:
        if first.bias.grad is not None:
            for layer, column in zip(layers, matrices[..., -1].unbind(), strict=True):
                assert layer.bias is not None
                assert layer.bias.grad is not None
                target = layer._own_bias(layer.bias.grad)
                found.append((target, column.reshape(target.shape)))
        matrices = matrices[..., :-1]
    grads = [grad for layer in layers if (grad := layer.weight.grad) is not None]
    if _is_conv(first) or _is_norm(first):
        values = _as_weights(first, matrices)
        return [*found, *zip(grads, values.unbind(), strict=True)]
    for layer, grad, matrix in zip(layers, grads, matrices.unbind(), strict=True):
        found.append(layer._weight_place(grad, matrix))
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


def _bias_column(layer: Layer) -> Tensor:
    bias = layer.bias
    assert bias is not None
    return layer._own_bias(bias.grad if bias.grad is not None else torch.zeros_like(bias))


def _is_conv(layer: Layer) -> bool:
    """Whether it is a convolution as far as its matrix is concerned, also of a user's own class."""
    kind = type(layer)
    return _same(kind, ConvLayer, "_to_matrix") and _same(kind, ConvLayer, "_weight_place")


def _is_norm(layer: Layer) -> bool:
    return _same(type(layer), NormLayer, "_weight_place")


def _same(kind: type, known: type, name: str) -> bool:
    return getattr(kind, name) is getattr(known, name)
