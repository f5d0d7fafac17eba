"""Running mixup (Osawa et al.): each batch is mixed with the previous *mixed* batch.

    ``x̃_t = λ x_t + (1 - λ) x̃_{t-1}``, and the same for one-hot targets,

with ``λ ~ Beta(α, α)`` for every sample, replaced by ``max(λ, 1 - λ)``. The first batch is not mixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kronfac.runs.errors import UserError

#: Keeps these random numbers apart from others of the same seed and step.
_STREAM = 0x6D69787570


class RunningMixup:
    """Mixes batches of images and turns labels into soft targets ``[N, C]``.

    Random numbers are a function of ``(seed, step)``. They are drawn for the whole batch, and each rank
    takes those of its own slice: it mixes its share with its own previous share, which gives what one
    rank would see.

    Args:
        alpha: both parameters of the Beta distribution; larger mixes more.
        num_classes: length of the soft targets.
        seed: of the random numbers.
        rank: which of the ``world`` equal slices of each batch is mixed here.
        world: number of slices.
    """

    def __init__(
        self,
        alpha: float,
        num_classes: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not 0 < alpha < math.inf:
            raise UserError(f"mixup={alpha!r} must be a positive number, 0.4 for example.")
        self.alpha, self.num_classes = alpha, num_classes
        self.seed, self.rank, self.world = seed, rank, world
        self._inputs: Tensor | None = None
        self._targets: Tensor | None = None

    def shares(self, step: int, batch: int) -> Tensor:
        """``λ`` in [½, 1] of every sample of a whole batch, ``[batch]``, in double precision."""
        import numpy

        generator = numpy.random.default_rng((_STREAM, self.seed, step))
        drawn = torch.from_numpy(generator.beta(self.alpha, self.alpha, batch))
        return torch.maximum(drawn, 1.0 - drawn)

    def mix(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix this rank's share of the batch of a step: ``[n, ...]`` images, ``[n]`` labels.

        A share of another size than the previous one, as where the batch changes, is not mixed, as
        if it were the first.
        """
        if not inputs.is_floating_point() or targets.dim() != 1:
            raise UserError(
                "mixup mixes images with one label each, and this data is none; set train.mixup = 0."
            )
        soft = F.one_hot(targets, self.num_classes).to(inputs.dtype)
        before = self._inputs
        if before is not None and self._targets is not None and before.shape == inputs.shape:
            share = self._own(self.shares(step, len(inputs) * self.world))
            share = share.to(inputs.device, inputs.dtype)
            soft = torch.lerp(self._targets, soft, share[:, None])
            share = share.reshape(-1, *[1] * (inputs.dim() - 1))
            inputs = torch.lerp(before, inputs, share)
        self._inputs, self._targets = inputs, soft
        return inputs, soft

    def _own(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.world)[self.rank]

    def state_dict(self) -> dict[str, Any]:
        """The previous mixed share of this rank, empty before the first step."""
        if self._inputs is None:
            return {}
        return {"inputs": self._inputs, "targets": self._targets}

    def load_state_dict(self, state: Mapping[str, Any], device: str | torch.device = "cpu") -> None:
        """Continue from what all ranks have saved, their shares one after the other."""
        self._inputs = self._targets = None
        if not state:
            return
        self._inputs = self._own(state["inputs"]).detach().to(device, copy=True)
        self._targets = self._own(state["targets"]).detach().to(device, copy=True)
