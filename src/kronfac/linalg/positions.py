"""Some positions of each sample: their numbers, and what a feature map has there."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def spread_positions(
    samples: int, positions: int, start: int, stride: int, device: torch.device
) -> Tensor:
    """Numbers of every so many positions of each sample, ``[N, S // stride]``.

    Those of sample ``n`` begin at ``start + n`` and go on from the first one at the end. Layers of one
    size have the same in a step.
    """
    count = positions // stride
    numbers = torch.arange(start, start + samples + stride * count, device=device)
    return (numbers % max(1, positions)).as_strided((samples, count), (1, stride))


def maps_at(x: Tensor, positions: Tensor) -> Tensor:
    """A map ``[N, C, *spatial]`` at some positions ``[N, P]`` of each sample, ``[N, C, P]``.

    Channels come first in memory, so that rows of all samples can be multiplied as they are.
    """
    maps = x.flatten(2).transpose(0, 1)
    return maps.gather(2, positions.expand(len(maps), -1, -1)).transpose(0, 1)
