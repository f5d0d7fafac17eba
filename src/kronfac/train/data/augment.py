"""Augmentation of whole batches, in two steps: draw random numbers, then apply them.

The numbers are drawn for the batch of all ranks; each rank applies its own slice. N ranks
see what one would see.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kronfac.runs.errors import UserError
from kronfac.train.data.source import Drawn


class Augmentation(Protocol):
    """A random change of a batch of inputs [N, ...]."""

    def draw(self, num: int, shape: Sequence[int], generator: torch.Generator) -> Drawn:
        """Random numbers for ``num`` samples of this shape; the first dimension is the sample."""

    def apply(self, inputs: Tensor, drawn: Drawn) -> Tensor:
        """The changed inputs."""


@dataclass(frozen=True)
class Flip:
    """Mirror each image left to right with probability one half."""

    def draw(self, num: int, shape: Sequence[int], generator: torch.Generator) -> Drawn:
        """``flip``: bool [N]."""
        return {"flip": torch.rand(num, generator=generator) < 0.5}

    def apply(self, inputs: Tensor, drawn: Drawn) -> Tensor:
        """Images [N, C, H, W], some of them mirrored."""
        return torch.where(drawn["flip"].view(-1, 1, 1, 1), inputs.flip(-1), inputs)


@dataclass(frozen=True)
class Crop:
    """Shift each image by up to ``pad`` pixels in both directions and fill with zeros."""

    pad: int = 4

    def __post_init__(self) -> None:
        if self.pad < 1:
            raise UserError(f"the padding of crop must be at least 1, but is {self.pad}")

    def check(self, shape: Sequence[int]) -> None:
        """Raise if images [C, H, W] could be shifted out of the picture."""
        height, width = shape[-2:]
        if self.pad >= min(height, width):
            raise UserError(
                f"data.augment: 'crop:{self.pad}' can shift images of {height} x {width} pixels out of "
                f"the picture; give at most crop:{max(1, min(height, width) // 2)}"
            )

    def draw(self, num: int, shape: Sequence[int], generator: torch.Generator) -> Drawn:
        """``top`` and ``left``: int64 [N], the corner of the crop in the padded image."""
        places = 2 * self.pad + 1
        return {
            "top": torch.randint(places, (num,), generator=generator),
            "left": torch.randint(places, (num,), generator=generator),
        }

    def apply(self, inputs: Tensor, drawn: Drawn) -> Tensor:
        """Images [N, C, H, W], shifted."""
        num, _, height, width = inputs.shape
        padded = F.pad(inputs, (self.pad,) * 4)
        # A view with all crops of all images, [N, C, top, left, H, W]: one gather copies those wanted.
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)
        samples = torch.arange(num, device=inputs.device)
        return crops[samples, :, drawn["top"], drawn["left"]]


def _erase() -> Augmentation:
    erasing = importlib.import_module("kronfac.train.data.erasing")
    made: Augmentation = erasing.RandomErasing()
    return made


_MAKERS: dict[str, Callable[..., Augmentation]] = {"flip": Flip, "crop": Crop, "erase": _erase}


def augmentation(spec: str) -> Augmentation:
    """What a recipe calls ``"flip"``, ``"crop"`` (by up to 4 pixels), ``"crop:2"`` or ``"erase"``."""
    name, colon, number = spec.partition(":")
    if name not in _MAKERS or (colon and (name != "crop" or not number.isdecimal())):
        raise UserError(
            f"unknown augmentation {spec!r}; there are 'flip', 'crop', 'crop:PIXELS' and 'erase'"
        )
    return _MAKERS[name](int(number)) if colon else _MAKERS[name]()
