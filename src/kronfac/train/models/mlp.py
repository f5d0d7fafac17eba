"""A perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn


class MLP(nn.Sequential):
    """Linear layers with ReLU between them, on flattened inputs.

    Args:
        num_classes: number of outputs.
        sample_shape: of the inputs.
        hidden: widths of the hidden layers.
    """

    def __init__(
        self, num_classes: int, sample_shape: Sequence[int], hidden: Sequence[int] = (128, 128)
    ) -> None:
        widths = [math.prod(sample_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-1], num_classes))
