"""What the loss of a step was divided by, as far as it is known."""

from __future__ import annotations

import torch
from torch import Tensor

from kronfac.capture.capture import Capture
from kronfac.distributed.coordinator import Coordinator
from kronfac.options.config import Options
from kronfac.statistics.normalizer import Normalizer


def normalizer_of(
    options: Options, capture: Capture, coordinator: Coordinator, sums: bool
) -> Normalizer:
    """N of the step that is being taken.

    If gradients are added up over ranks and not averaged (``sums``), the loss of each was divided by
    the N of all of them, which they then tell each other.
    """
    own = Normalizer(capture.passes, options.loss_average, options.sampled)
    if not sums or options.sampled:
        return own
    here = torch.as_tensor(own.seen, dtype=torch.float64).reshape(1)
    everywhere = coordinator.total(here)[0] / coordinator.observers
    return Normalizer(capture.passes, options.loss_average, options.sampled, everywhere)


def early_normalizer(options: Options, capture: Capture, sums: bool) -> Normalizer | None:
    """N before the step; ``None`` as long as it is not known."""
    unknown = any(seen.terms is None for seen in capture.passes)
    if sums or (options.loss_average == "token" and unknown):
        return None
    return Normalizer(capture.passes, options.loss_average, options.sampled)


def early_divisor(options: Options, capture: Capture, sums: bool) -> float | Tensor | None:
    """What stands for N as long as it is not known; ``None`` if nothing can.

    What leaves before the step is multiplied by it, and at the step by what is missing. It is the same
    for all that leaves: N of the first pass. Where ranks have one N for all of them, that is missing.
    """
    if options.sampled or sums or options.loss_average is None or not capture.passes:
        return 1.0
    if options.loss_average == "token":
        return next(iter(capture.passes)).terms
    if options.loss_average == "batch":
        return float(next(iter(capture.passes)).samples)
    return float(options.loss_average)
