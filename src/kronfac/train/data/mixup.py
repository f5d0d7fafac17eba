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
        batch: samples of a step, on all ranks together.
        seed: of the random numbers.
        rank: which slice of the batch is mixed here.
        world: number of slices.
    """

    def __init__(
        self,
        alpha: float,
        num_classes: int,
        *,
        batch: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not 0 < alpha < math.inf:
            raise UserError(f"mixup={alpha!r} must be a positive number, 0.4 for example.")
        self.alpha, self.num_classes = alpha, num_classes
        self.batch, self.seed, self.rank, self.world = batch, seed, rank, world
        self._inputs: Tensor | None = None
        self._targets: Tensor | None = None

    def shares(self, step: int) -> Tensor:
        """``λ`` in [½, 1] of every sample of the whole batch, ``[batch]``, in double precision."""
        import numpy

        generator = numpy.random.default_rng((_STREAM, self.seed, step))
        drawn = torch.from_numpy(generator.beta(self.alpha, self.alpha, self.batch))
        return torch.maximum(drawn, 1.0 - drawn)

    def mix(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix this rank's share of the batch of a step: ``[n, ...]`` images, ``[n]`` labels.

        A share of another size than the previous one, as at the end of an incomplete epoch, is not
        mixed, as if it were the first.
        """
        if not inputs.is_floating_point() or targets.dim() != 1:
            raise UserError(
                "mixup mixes images with one label each, and this data is none; set train.mixup = 0."
            )
        soft = F.one_hot(targets, self.num_classes).to(inputs.dtype)
        before = self._inputs
        if before is not None and self._targets is not None and before.shape == inputs.shape:
            share = self._own(self.shares(step), len(inputs)).to(inputs.device, inputs.dtype)
            soft = torch.lerp(self._targets, soft, share[:, None])
            share = share.reshape(-1, *[1] * (inputs.dim() - 1))
            inputs = torch.lerp(before, inputs, share)
        self._inputs, self._targets = inputs, soft
        return inputs, soft

    def _own(self, whole: Tensor, size: int) -> Tensor:
        start = self.rank * self.batch // self.world
        return whole[start : start + size]

    def state_dict(self) -> dict[str, Any]:
        """The previous mixed share of this rank, empty before the first step."""
        if self._inputs is None:
            return {}
        return {"inputs": self._inputs, "targets": self._targets}

    def load_state_dict(self, state: Mapping[str, Any], device: str | torch.device = "cpu") -> None:
        """Continue from a saved share; of a whole batch, in the order of ranks, take our slice."""
        self._inputs = self._targets = None
        if not state:
            return
        inputs, targets = state["inputs"], state["targets"]
        if self.world > 1 and len(inputs) == self.batch:
            size = (self.rank + 1) * self.batch // self.world - self.rank * self.batch // self.world
            inputs, targets = self._own(inputs, size), self._own(targets, size)
        self._inputs = inputs.detach().to(device, copy=True)
        self._targets = targets.detach().to(device, copy=True)
