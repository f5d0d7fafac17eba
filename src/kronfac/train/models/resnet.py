"""ResNets (He et al., 2016): section 4.2 for small images, table 1 for ImageNet.

Those for ImageNet have the stride in the 3x3 convolution (v1.5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn
from torch.nn import functional as F

from kronfac.runs.errors import UserError

LAYERS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


class Block(nn.Module, ABC):
    """A residual block: convolutions, each with its norm, beside a shortcut."""

    shortcut: nn.Module

    @abstractmethod
    def convolutions(self) -> list[tuple[nn.Module, nn.Module]]:
        """Each convolution with its norm, in order."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C_in, H, W] to [N, C_out, H / stride, W / stride]."""
        out = x
        for number, (conv, norm) in enumerate(self.convolutions()):
            out = F.relu(out, inplace=True) if number else out
            out = norm(conv(out))
        return F.relu(out + self.shortcut(x), inplace=True)


class Pad(nn.Module):
    """A shortcut without parameters: every ``stride``-th pixel, and channels of zeros (option A)."""

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, C + new_channels, H / stride, W / stride]."""
        half = self.new_channels // 2
        sampled = x[:, :, :: self.stride, :: self.stride]
        return F.pad(sampled, (0, 0, 0, 0, half, self.new_channels - half))


class CifarBlock(Block):
    """Two 3x3 convolutions beside a shortcut without parameters."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels_in, channels_out, 3, stride)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = _conv(channels_out, channels_out, 3, 1)
        self.norm2 = nn.BatchNorm2d(channels_out)
        new_channels = channels_out - channels_in
        self.shortcut = Pad(stride, new_channels) if new_channels else nn.Identity()

    def convolutions(self) -> list[tuple[nn.Module, nn.Module]]:
        """Each convolution with its norm, in order."""
        return [(self.conv1, self.norm1), (self.conv2, self.norm2)]


class ImageNetBlock(Block):
    """A basic block or a bottleneck, beside a projection where the shape changes.

    Basic blocks have two 3x3 convolutions. Bottlenecks have 1x1, 3x3 and 1x1, the last of which
    has 4 times as many channels.
    """

    def __init__(self, channels_in: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        channels_out = 4 * width if bottleneck else width
        if bottleneck:
            sizes = [(channels_in, width, 1, 1), (width, width, 3, stride)]
            sizes.append((width, channels_out, 1, 1))
        else:
            sizes = [(channels_in, width, 3, stride), (width, width, 3, 1)]
        self.convs = nn.ModuleList(_conv(*size) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size[1]) for size in sizes)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            projection = _conv(channels_in, channels_out, 1, stride)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels_out))

    def convolutions(self) -> list[tuple[nn.Module, nn.Module]]:
        """Each convolution with its norm, in order."""
        return list(zip(self.convs, self.norms, strict=True))


class CifarResNet(nn.Module):
    """``depth`` = 6n + 2 layers: three stages of n blocks with ``width``, 2 and 4 times as many channels.

    Args:
        depth: 8, 14, 20, 32, 44, 56, 110, ...
        num_classes: number of outputs.
        channels: of the images.
        width: channels of the first stage.
        zero_init: start every block as the identity: the scale of its last norm is zero.
    """

    def __init__(
        self,
        depth: int,
        num_classes: int = 10,
        channels: int = 3,
        width: int = 16,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise UserError(f"a CIFAR ResNet has 6n + 2 layers (8, 14, 20, ...), not {depth}")
        self.conv = _conv(channels, width, 3, 1)
        self.norm = nn.BatchNorm2d(width)
        stages, previous = [], width
        for number in range(3):
            blocks = []
            for stride in _strides(number, (depth - 2) // 6):
                blocks.append(CifarBlock(previous, width * 2**number, stride))
                previous = width * 2**number
            stages.append(nn.Sequential(*blocks))
        self.stage1, self.stage2, self.stage3 = stages
        self.head = nn.Linear(previous, num_classes)
        _initialise(self, zero_init)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, C, H, W] to logits [N, classes]."""
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class ResNet(nn.Module):
    """A ResNet with 18, 34, 50, 101 or 152 layers.

    Args:
        depth: number of layers.
        num_classes: number of outputs.
        channels: of the images.
        width: channels of the first stage.
        zero_init: start every block as the identity: the scale of its last norm is zero.
    """

    def __init__(
        self,
        depth: int,
        num_classes: int = 1000,
        channels: int = 3,
        width: int = 64,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        bottleneck = depth >= 50
        self.conv = _conv(channels, width, 7, 2)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        stages, previous = [], width
        for number, num_blocks in enumerate(LAYERS[depth]):
            blocks = []
            for stride in _strides(number, num_blocks):
                blocks.append(ImageNetBlock(previous, width * 2**number, stride, bottleneck))
                previous = width * 2**number * (4 if bottleneck else 1)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(previous, num_classes)
        _initialise(self, zero_init)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, C, H, W] to logits [N, classes]."""
        x = self.pool(F.relu(self.norm(self.conv(x)), inplace=True))
        logits: Tensor = self.head(self.stages(x).mean((2, 3)))
        return logits


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)


def _strides(stage: int, num_blocks: int) -> list[int]:
    """The first block of every stage but the first halves the resolution."""
    return [2 if stage and place == 0 else 1 for place in range(num_blocks)]


def _initialise(model: nn.Module, zero_init: bool) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, Block) and zero_init:
            _, last = module.convolutions()[-1]
            assert isinstance(last, nn.BatchNorm2d)
            nn.init.zeros_(last.weight)
