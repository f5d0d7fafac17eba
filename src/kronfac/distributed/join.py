"""Uneven inputs: ranks that have run out of batches go on taking part (``Join([model, optimizer])``).

A rank that has joined observes nothing, but its statistics, its share of the solving and its parameters
go on: an active rank sends it the gradients of each step.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook


class ShadowHook(JoinHook):
    """What a joined rank does for each step of the others."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        """Take the step of the others with their gradients."""
        self.optimizer.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have taken the same steps: nothing is left to do."""


def is_joining(optimizer: Any) -> bool:
    """Whether a step is taken inside ``Join``; raises if only the model is in it."""
    inside = bool(optimizer._join_config.enable)
    if inside:
        Join.notify_join_context(optimizer)
        return True
    for module in optimizer.model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and module._join_config.enable:
            raise RuntimeError(
                "the model is inside join() without its optimizer, which then waits for ranks that "
                "have left: use torch.distributed.algorithms.join.Join([model, optimizer])."
            )
    return False
