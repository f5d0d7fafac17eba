"""Module types that can be preconditioned, and the reasons why others cannot."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from kronfac.layers.conv import ConvLayer
from kronfac.layers.layer import Layer
from kronfac.layers.linear import LinearLayer

_LAYERS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvLayer,
    nn.Conv2d: ConvLayer,
    nn.Conv3d: ConvLayer,
}


def find_layer(name: str, module: nn.Module) -> Layer | str:
    """Return the layer of a module, or the reason why it has none, as half a sentence."""
    for kind in type(module).__mro__:
        if kind not in _LAYERS:
            continue
        reason = _obstacle(module, kind)
        return reason if reason is not None else _LAYERS[kind](name, module)
    return f"{type(module).__name__} has no Kronecker-factored form here"


def _obstacle(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Say why a module of a supported type cannot be preconditioned all the same."""
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed (weight norm or similar)"
    if isinstance(weight, UninitializedParameter):
        return "it is lazy and not initialised yet: run one forward pass first"
    if weight.is_complex():
        return "its weight is complex"
    for method in ("forward", "_conv_forward"):
        if getattr(type(module), method, None) is not getattr(kind, method, None):
            return f"it overrides {kind.__name__}.{method}"
    return None


__all__ = ["Layer", "find_layer"]
