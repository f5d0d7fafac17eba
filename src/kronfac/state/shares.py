"""Damping as a share of a layer's mean curvature."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

#: How much larger the share is for weights whose scale the loss does not depend on. Norms tie the samples
#: of a batch together, which the curvature of single samples does not see.
SCALE_FREE = 3.0


def share_of(mean: Tensor, value: float, rule: str, buffers: Mapping[str, Tensor]) -> Tensor:
    """``value`` times the mean curvature; 1 without any, which leaves the gradient as it is.

    The share is larger for weights whose scale is known to have no effect
    (:mod:`kronfac.step.scale_free`).
    """
    share = mean * value
    if rule == "orthogonal" and "pace" in buffers:
        share = torch.where(buffers["pace"][1] > 0, SCALE_FREE * share, share)
    return torch.where(mean > 0, share, 1.0)
