"""Rules that change a gradient between clipping and the length of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.protocol.block import Block, Tensors


@dataclass(frozen=True)
class LayerStep:
    """One layer at one step, as a rule sees it.

    Args:
        step: number of completed steps.
        buffers: the layer's own tensors by name, to be changed in place; empty before the first call.
        block: the layer's curvature, which knows what to do with its solution.
        solution: the solution in use, ``None`` before the first.
        damping: the damping γ of this layer.
        rate: learning rate of the weight's group.
        seed: of the layer's random numbers at this step, if the rule draws; alike on all ranks.
        square: squared norm of the whole gradient, where a rule :attr:`~Transform.takes_slices` and is
            given some rows or columns of it.
    """

    step: int
    buffers: dict[str, Tensor] = field(default_factory=dict)
    block: Block | None = None
    solution: Tensors | None = None
    damping: float | Tensor = 0.0
    rate: float | Tensor = 0.0
    seed: int = 0
    square: Tensor | None = None

    def generator(self) -> torch.Generator:
        """Random numbers, drawn on the CPU: whoever works on the layer has the same."""
        return torch.Generator(device="cpu").manual_seed(self.seed)


class Transform(ABC):
    """One such rule. It keeps named tensors for each layer, which are saved and moved with the layer."""

    #: Whether it draws random numbers, from ``at.generator()``.
    draws: bool = False
    #: Whether rows or columns of a gradient can be changed without the others, but for the norm of the
    #: whole, ``at.square``; buffers that are shaped as the gradient then are such slices too.
    takes_slices: bool = False
    #: Whether it also changes gradients of parameters that have no curvature.
    everywhere: bool = False

    def applies_to(self, at: LayerStep) -> bool:
        """Whether it changes the gradient of this layer."""
        return self.everywhere or at.block is None or bool(at.block.parts)

    def buffer_shapes(self, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of what is kept for a layer; names differ from those of other rules."""
        return {}

    @abstractmethod
    def __call__(self, gradient: Tensor, at: LayerStep) -> Tensor:
        """Return what takes the place of a gradient matrix ``[*b, d_out, d_in]``."""

    def apply_all(self, gradients: Sequence[Tensor], at: Sequence[LayerStep]) -> Sequence[Tensor]:
        """The same for many layers; a rule may do it in fewer operations, and overwrite gradients."""
        return [self(gradient, one) for gradient, one in zip(gradients, at, strict=True)]

    def after(self, update: Tensor, gradient: Tensor, at: LayerStep) -> Tensor:
        """Return what takes the place of a gradient that has been preconditioned, given both."""
        return update
