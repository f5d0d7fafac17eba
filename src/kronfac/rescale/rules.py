"""By which rule each layer's step gets its length."""

from __future__ import annotations

from kronfac.layers import Layer
from kronfac.options.config import Rescale, Rule


def rule_of(layer: Layer, rescale: Rescale | None) -> Rule:
    """The rule of a layer."""
    if rescale == "graft" or rescale == "unit" or rescale == "orthogonal":
        return rescale
    if rescale != "auto":
        return "solved"
    if layer.unit_wise:
        return "channels"
    return "columns" if layer.picks_columns else "orthogonal"


def is_matrix(layer: Layer) -> bool:
    """Whether a layer multiplies by a matrix, so that Muon's norm means something for its step."""
    return not (layer.unit_wise or layer.picks_columns)


def no_matrix(layer: Layer) -> str | None:
    """Refuse layers that do not multiply by a matrix."""
    if not is_matrix(layer):
        return "unit and orthogonal steps are for matrices, and this is none"
    return None
