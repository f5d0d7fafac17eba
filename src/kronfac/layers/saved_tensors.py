"""What autograd does with the tensors that it keeps for the backward pass."""

from __future__ import annotations

import torch


def saves_elsewhere() -> bool:
    """Whether inputs are not kept for backward as they are: checkpointing and offloading save memory."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
