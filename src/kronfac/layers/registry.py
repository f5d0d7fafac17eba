"""The layer type of each module type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from kronfac.layers import norm
from kronfac.layers.attention import is_plain, projections
from kronfac.layers.conv import ConvLayer
from kronfac.layers.embedding import EmbeddingLayer
from kronfac.layers.layer import Layer
from kronfac.layers.linear import LinearLayer, TransposedLinearLayer
from kronfac.layers.shards import plain_type

LayerType = TypeVar("LayerType", bound=type[Layer])

_LAYERS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvLayer,
    nn.Conv2d: ConvLayer,
    nn.Conv3d: ConvLayer,
    nn.Embedding: EmbeddingLayer,
    nn.BatchNorm1d: norm.BatchNormLayer,
    nn.BatchNorm2d: norm.BatchNormLayer,
    nn.BatchNorm3d: norm.BatchNormLayer,
    nn.InstanceNorm1d: norm.InstanceNormLayer,
    nn.InstanceNorm2d: norm.InstanceNormLayer,
    nn.InstanceNorm3d: norm.InstanceNormLayer,
    nn.GroupNorm: norm.GroupNormLayer,
    nn.LayerNorm: norm.LayerNormLayer,
    nn.RMSNorm: norm.RMSNormLayer,
}
_REGISTERED: dict[type[nn.Module], type[Layer]] = {}

_NO_LAYER: Mapping[type[nn.Module], str] = {
    nn.RNNBase: "{} computes all time steps in one kernel, where nothing can be observed",
    nn.RNNCellBase: "{} has two products in one kernel, where nothing can be observed",
    nn.EmbeddingBag: "{} sums its rows before they can be observed",
    nn.modules.conv._ConvTransposeNd: "{} is not a supported layer type yet",
    nn.SyncBatchNorm: "{} normalises over the samples of all ranks",
}


def register_layer(
    module_type: type[nn.Module], layer_type: type[Layer] | None = None
) -> Callable[[LayerType], LayerType]:
    """Register the subclass of ``Layer`` that preconditions your own module type.

    Use it as a decorator of the layer class, or call it with both classes. It applies to this
    type only, not to its subclasses, which may compute something else, and to optimizers that are built
    afterwards.
    """
    if not isinstance(module_type, type) or not issubclass(module_type, nn.Module):
        raise TypeError(f"module_type={module_type!r} must be a subclass of torch.nn.Module.")

    def register(found: LayerType) -> LayerType:
        if not isinstance(found, type) or not issubclass(found, Layer):
            raise TypeError(f"layer_type={found!r} must be a subclass of kronfac.layers.Layer.")
        _REGISTERED[module_type] = found
        return found

    if layer_type is not None:
        register(layer_type)
    return register


def find_layers(name: str, module: nn.Module) -> list[Layer] | str:
    """Return the layers of a module, or the reason why it has none, as half a sentence."""
    kind = plain_type(module)
    if kind in _REGISTERED:
        return _general_obstacle(module) or [_REGISTERED[kind](name, module)]
    if isinstance(module, nn.MultiheadAttention):
        reason = _general_obstacle(module) or _overridden(module, nn.MultiheadAttention)
        if reason is None and not is_plain(module):
            reason = "its forward was replaced, and K-FAC would have to replace it as well"
        return reason or projections(name, module)
    for known in kind.__mro__:
        if known in _LAYERS:
            reason = _obstacle(module, known)
            return reason if reason is not None else [_LAYERS[known](name, module)]
    if _is_transposed_linear(module):
        return [TransposedLinearLayer(name, module)]
    if norm.is_rms_norm(module):
        return [norm.RMSNormLayer(name, module)]
    for other, reason in _NO_LAYER.items():
        if isinstance(module, other):
            return reason.format(kind.__name__)
    return f"{kind.__name__} is not a known layer type; see kronfac.register_layer"


def _is_transposed_linear(module: nn.Module) -> bool:
    """Whether this is the ``Conv1D`` of GPT-2: a linear layer with its weight transposed."""
    weight, width = getattr(module, "weight", None), getattr(module, "nf", None)
    if plain_type(module).__name__ != "Conv1D" or not isinstance(weight, nn.Parameter):
        return False
    return weight.dim() == 2 and weight.shape[1] == width


def _general_obstacle(module: nn.Module) -> str | None:
    """What keeps a module of any type from being preconditioned."""
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized"
    own = [p for p in module._parameters.values() if p is not None]
    if any(isinstance(parameter, UninitializedParameter) for parameter in own):
        return "it is lazy and not initialised yet: run one forward pass first"
    if any(parameter.is_complex() for parameter in own):
        return "its weight is complex"
    return None


def _obstacle(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Say why a module cannot be preconditioned although its type is supported."""
    reason = _general_obstacle(module) or _overridden(module, kind)
    if reason is not None:
        return reason
    if module._parameters.get("weight") is None:
        return "its weight is computed (weight norm or similar)"
    if isinstance(module, nn.Embedding) and module.sparse:
        return "its gradients are sparse"
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        return "with scale_grad_by_freq its gradient is not a sum over rows"
    return None


def _overridden(module: nn.Module, kind: type[nn.Module]) -> str | None:
    for method in ("forward", "_conv_forward"):
        if getattr(type(module), method, None) is not getattr(kind, method, None):
            return f"it overrides {kind.__name__}.{method}"
    return None
