"""How many dimensions a model's outputs have, for the line in the summary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from kronfac.capture.hooks import Hook, first_tensor
from kronfac.options.config import Options


class Outputs:
    """Watches what the outermost forward returns in training; a compiled one shows nothing."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.dims = 0
        hook = Hook(self._note)
        self._handles = [module.register_forward_hook(hook) for module in modules]

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            found = first_tensor(output, least_dim=2, needs_grad=True)
            # Modules within the outermost one come first and are overwritten by it.
            self.dims = 0 if found is None else found.dim()

    def remark(self, options: Options) -> list[str]:
        """Doubt that the loss is a mean over samples, if there is more than one term for each."""
        if self.dims < 3 or options.loss_average != "batch" or options.fisher == "forward":
            return []
        return [
            f"Outputs have {self.dims} dimensions: if the loss is a mean over tokens and not over",
            "samples, give loss_average='token', or the curvature is out of scale.",
        ]

    def remove(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
