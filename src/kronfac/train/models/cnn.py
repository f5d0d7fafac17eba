"""A plain convolutional network for small images."""

from __future__ import annotations

from torch import nn

from kronfac.runs.errors import UserError


class CNN(nn.Sequential):
    """3x3 convolutions with ReLU; half the resolution between stages, then a mean.

    Args:
        num_classes: number of outputs.
        sample_shape: of the images, [C, H, W]; 8 x 8 pixels are enough.
        width: channels of the first stage; each further stage has twice as many.
        stages: number of resolutions.
        convolutions: per stage.
        norm: a BatchNorm after each convolution, which then has no bias.
    """

    def __init__(
        self,
        num_classes: int,
        sample_shape: tuple[int, ...],
        width: int = 16,
        stages: int = 3,
        convolutions: int = 1,
        norm: bool = True,
    ) -> None:
        channels, height, side = sample_shape
        if min(height, side) < 2 ** (stages - 1):
            raise UserError(f"images of {height} x {side} pixels are too small for {stages} stages")
        layers: list[nn.Module] = []
        for stage in range(stages):
            if stage:
                layers.append(nn.MaxPool2d(2))
            for _ in range(convolutions):
                wide = width * 2**stage
                layers.append(nn.Conv2d(channels, wide, 3, padding=1, bias=not norm))
                layers += [nn.BatchNorm2d(wide)] if norm else []
                layers.append(nn.ReLU(inplace=True))
                channels = wide
        pool = nn.AdaptiveAvgPool2d(1)
        super().__init__(*layers, pool, nn.Flatten(), nn.Linear(channels, num_classes))
