"""By which rule each layer's step gets its length."""

from __future__ import annotations

from torch import nn

from kronfac.layers import Layer
from kronfac.layers.conv import ConvLayer
from kronfac.layers.linear import LinearLayer
from kronfac.options.config import Rescale, Rule


def rule_of(layer: Layer, rescale: Rescale | None, sequences: bool) -> Rule:
    """The rule of a layer; ``sequences`` tells whether its model reads any (:func:`reads_sequences`)."""
    if rescale == "graft" or rescale == "unit" or rescale == "orthogonal":
        return rescale
    if rescale != "auto":
        return "solved"
    if layer.unit_wise:
        return "graft"
    if layer.picks_columns:
        return "columns"
    # More products at every step: little beside a pass over many positions, much beside one over vectors.
    at_positions = isinstance(layer, ConvLayer) or (sequences and isinstance(layer, LinearLayer))
    return "orthogonal" if at_positions else "unit"


def reads_sequences(model: nn.Module) -> bool:
    """Whether a model attends or looks up embeddings, so that its linear layers see many positions."""
    return any(
        isinstance(module, nn.Embedding)
        or any(word in type(module).__name__.lower() for word in ("attention", "attn"))
        for module in model.modules()
    )


def is_matrix(layer: Layer) -> bool:
    """Whether a layer multiplies by a matrix, so that Muon's norm means something for its step."""
    return not (layer.unit_wise or layer.picks_columns)


def no_matrix(layer: Layer) -> str | None:
    """Refuse layers that do not multiply by a matrix."""
    if not is_matrix(layer):
        return "unit and orthogonal steps are for matrices, and this is none"
    return None
