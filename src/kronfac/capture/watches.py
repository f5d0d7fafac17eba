"""What is remembered of a watched module, and of a product whose gradient is asked for later."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from kronfac.capture import compiled
from kronfac.capture.hooks import OutputView, source_of
from kronfac.layers.attention import OUTPUT
from kronfac.state.layer_state import LayerState
from kronfac.statistics.forward_pass import Pass


class Watch:
    """One module, and the layers whose products its calls contain, by part."""

    def __init__(self, split: Any, traced: compiled.TracedCall) -> None:
        self.split = split
        self.traced = traced
        self.random: Tensor | None = None
        self.states: dict[str, LayerState] = {}

    def add(self, part: str, state: LayerState, number: int) -> None:
        """Watch on behalf of one more layer."""
        self.states[part] = state
        self.traced.add(part, number, state.layer)


class Edge:
    """A product of the last forward, for gradients that ``observe()`` asks for."""

    def __init__(
        self, state: LayerState, forward_pass: Pass, kept: list[Any], product: Tensor
    ) -> None:
        source = source_of(product)
        self.state = state
        self.forward_pass = forward_pass
        self.kept = kept
        self.view = OutputView(product, source)
        self.gradient = get_gradient_edge(source)


def is_seen(state: LayerState, part: str, module: nn.Module, product: Tensor) -> bool:
    """Whether a product is one of its layer's, as it is now, and will have a gradient."""
    if not isinstance(product, Tensor):
        raise TypeError(
            f"layer {state.name!r} returned a {type(product).__name__}, not a tensor; say which "
            "tensor is the product by overriding split() in its kronfac.layers.Layer."
        )
    if not product.requires_grad or not state.layer.weight.requires_grad:
        return False
    return state.layer.uses(module.get_submodule("out_proj") if part == OUTPUT else module)
