"""Random erasing (Zhong et al.) as Osawa et al. use it: a rectangle of half of the images becomes 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from kronfac.runs.errors import UserError


@dataclass(frozen=True)
class RandomErasing:
    """Put 0, the mean colour of normalised images, into a random rectangle of some images.

    The rectangle's share of the area ``s`` and its aspect ratio ``r`` are uniform, its sides ``√(s·r)``
    and ``√(s/r)`` of those of a square image, lying or standing with equal probability, anywhere inside.

    Args:
        probability: share of the images in which something is erased.
        area: least and largest share of the area.
        aspect: least and largest ratio of the short side to the long one.
    """

    probability: float = 0.5
    area: tuple[float, float] = (0.02, 0.25)
    aspect: tuple[float, float] = (0.3, 1.0)

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise UserError(f"erasing probability={self.probability!r} must be in [0, 1].")
        for name in ("area", "aspect"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise UserError(
                    f"erasing {name}={(low, high)!r} must be two shares, 0 < a <= b <= 1."
                )

    def draw(self, num: int, shape: Sequence[int], generator: Generator) -> dict[str, Tensor]:
        """Rectangles ``[num]`` of images ``[C, H, W]``; those of which nothing is erased are empty."""
        height, width = shape[-2:]
        uniform = torch.rand(6, num, generator=generator, dtype=torch.float64)
        chosen, standing = uniform[0] < self.probability, uniform[1] < 0.5
        area = _between(self.area, uniform[2]) * height * width
        aspect = _between(self.aspect, uniform[3])
        short, long = (area * aspect).sqrt(), (area / aspect).sqrt()
        high = torch.where(standing, long, short).round().clamp(max=height) * chosen
        wide = torch.where(standing, short, long).round().clamp(max=width) * chosen
        return {
            "height": high.long(),
            "width": wide.long(),
            "top": ((height - high + 1) * uniform[4]).long(),
            "left": ((width - wide + 1) * uniform[5]).long(),
        }

    def apply(self, inputs: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
        """Erase from images ``[N, C, H, W]``."""
        on = {name: value.to(inputs.device)[:, None] for name, value in drawn.items()}
        rows = _inside(on["top"], on["height"], inputs.shape[-2])
        columns = _inside(on["left"], on["width"], inputs.shape[-1])
        return inputs.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


def _between(bounds: tuple[float, float], uniform: Tensor) -> Tensor:
    low, high = bounds
    return low + (high - low) * uniform


def _inside(start: Tensor, length: Tensor, size: int) -> Tensor:
    """``[N, size]``: which positions lie in the interval of each sample."""
    positions = torch.arange(size, device=start.device)
    return (positions >= start) & (positions < start + length)
