"""ResNets for small images (He et al., Deep Residual Learning, 2016, section 4.2)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from kronfac.runs.errors import UserError


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut without parameters (option A)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.stride = stride
        self.new_channels = channels_out - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C_in, H, W] to [N, C_out, H / stride, W / stride]."""
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        return F.relu(out + self._shortcut(x), inplace=True)

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.new_channels == 0:
            return x
        half = self.new_channels // 2
        sampled = x[:, :, :: self.stride, :: self.stride]
        return F.pad(sampled, (0, 0, 0, 0, half, self.new_channels - half))


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
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        num_blocks = (depth - 2) // 6
        self.stage1 = _stage(width, width, 1, num_blocks)
        self.stage2 = _stage(width, 2 * width, 2, num_blocks)
        self.stage3 = _stage(2 * width, 4 * width, 2, num_blocks)
        self.head = nn.Linear(4 * width, num_classes)
        self._initialise(zero_init)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, C, H, W] to logits [N, classes]."""
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    def _initialise(self, zero_init: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Block) and zero_init:
                nn.init.zeros_(module.norm2.weight)


def _stage(channels_in: int, channels_out: int, stride: int, num_blocks: int) -> nn.Sequential:
    first = Block(channels_in, channels_out, stride)
    return nn.Sequential(
        first, *(Block(channels_out, channels_out, 1) for _ in range(num_blocks - 1))
    )
