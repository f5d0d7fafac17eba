"""ResNets for ImageNet (He et al., 2016, table 1), with the stride in the 3x3 convolution (v1.5)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

LAYERS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


class Block(nn.Module):
    """A residual block: convolutions, each with its norm, beside a shortcut.

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
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            projection = _conv(channels_in, channels_out, 1, stride)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C_in, H, W] to [N, C_out, H / stride, W / stride]."""
        out = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            out = F.relu(out, inplace=True) if number else out
            out = norm(conv(out))
        return F.relu(out + self.shortcut(x), inplace=True)


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
        self.conv = nn.Conv2d(channels, width, 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        stages, previous = [], width
        for number, num_blocks in enumerate(LAYERS[depth]):
            blocks = []
            for place in range(num_blocks):
                stride = 2 if number and place == 0 else 1
                blocks.append(Block(previous, width * 2**number, stride, bottleneck))
                previous = width * 2**number * (4 if bottleneck else 1)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(previous, num_classes)
        self._initialise(zero_init)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, C, H, W] to logits [N, classes]."""
        x = self.pool(F.relu(self.norm(self.conv(x)), inplace=True))
        logits: Tensor = self.head(self.stages(x).mean((2, 3)))
        return logits

    def _initialise(self, zero_init: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Block) and zero_init:
                last = module.norms[-1]
                assert isinstance(last, nn.BatchNorm2d)
                nn.init.zeros_(last.weight)


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
