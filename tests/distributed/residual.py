"""A residual network of ResNet-50's shape, at any width."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample: nn.Module = nn.Identity()
        if channels != 4 * width or stride != 1:
            conv = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def residual_network(width: int = 64, classes: int = 1000) -> nn.Module:
    """53 convolutions, 53 norms and a classifier; ResNet-50 itself is 64 wide."""
    blocks: list[nn.Module] = []
    channels = width
    for stage, number in enumerate([3, 4, 6, 3]):
        for block in range(number):
            stride = 2 if stage and not block else 1
            blocks.append(Bottleneck(channels, width << stage, stride))
            channels = 4 * (width << stage)
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head)
