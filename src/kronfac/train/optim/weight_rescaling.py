"""Weight rescaling (Osawa et al.): after each update ``‖w‖`` is brought back to ``√(2·d_out)``.

The output of a layer in front of a norm layer does not depend on the norm of its weight, but its
gradient does, as ``1/‖w‖``: growing weights would let the effective learning rate vanish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kronfac.layers.selection import matches, plain_name, unwrap
from kronfac.options.config import Pattern, as_patterns
from kronfac.runs.errors import UserError

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EPSILON = 1e-9


class WeightRescaling:
    """Shortens the weights of linear and convolution layers that are longer than ``√(2·d_out)``.

    Weights that are not longer, biases and everything else stay as they are. No host
    synchronisation.

    Args:
        model: whose weights; plain or wrapped.
        include: modules that take part, by name pattern or type; all of them by default (the paper's
            code rescales the last linear layer as well).
        exclude: modules that do not.
    """

    def __init__(
        self,
        model: nn.Module,
        include: Pattern | Sequence[Pattern] = "*",
        exclude: Pattern | Sequence[Pattern] = (),
    ) -> None:
        self.weights: list[Tensor] = []
        self.norms: list[float] = []
        taken, left = as_patterns(include, "include"), as_patterns(exclude, "exclude")
        for name, module in unwrap(model).named_modules():
            plain = plain_name(name)
            chosen = matches(plain, module, taken) and not matches(plain, module, left)
            if not isinstance(module, _KINDS) or not chosen:
                continue
            if not any(module.weight is weight for weight in self.weights):
                self.weights.append(module.weight)
                self.norms.append(math.sqrt(2 * module.weight.shape[0]))
        if not self.weights:
            raise UserError(
                f"weight rescaling found no linear or convolution layer among {taken!r} without "
                f"{left!r}; set train.weight_rescaling = false."
            )

    @torch.no_grad()
    def apply(self) -> None:
        """Shorten what is too long."""
        for norm, weight, longest in zip(
            torch._foreach_norm(self.weights), self.weights, self.norms, strict=True
        ):
            weight.mul_((longest / (norm + _EPSILON)).clamp(max=1.0))

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Apply it after every step of an optimizer: K-FAC itself where K-FAC wraps another one."""

        def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
            self.apply()

        return optimizer.register_step_post_hook(after)
