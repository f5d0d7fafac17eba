"""Layers in every variant that the library claims, each with an input."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

N = 3
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


@dataclass
class Case:
    """A module and an input of it; both are made anew for each test."""

    module: nn.Module
    x: Tensor


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, **DOUBLE)


def frozen_bias(module: Any) -> nn.Module:
    module.bias.requires_grad_(False)
    return module


def linear(*shape: int, **options: Any) -> Case:
    return Case(nn.Linear(4, 3, **options, **DOUBLE), normal(*shape))


def conv(dims: int, shape: tuple[int, ...], *args: Any, **options: Any) -> Case:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return Case(kind(*args, **options, **DOUBLE), normal(*shape))


def transposed_input() -> Case:
    return Case(nn.Linear(4, 3, **DOUBLE), normal(N, 4, 5).mT)


def sliced_input() -> Case:
    return Case(nn.Linear(4, 3, **DOUBLE), normal(2 * N, 5, 8)[::2, :, ::2])


def channels_last(dims: int, groups: int = 1, weight: bool = False) -> Case:
    case = conv(dims, (N, 4, *[4] * dims), 4, 6, 3, padding=1, groups=groups)
    memory_format = torch.channels_last if dims == 2 else torch.channels_last_3d
    case.x = case.x.contiguous(memory_format=memory_format)
    if weight:
        case.module = case.module.to(memory_format=memory_format)
    return case


CASES: dict[str, Any] = {
    "linear-vector": lambda: linear(4),
    "linear": lambda: linear(N, 4),
    "linear-no-bias": lambda: linear(N, 4, bias=False),
    "linear-frozen-bias": lambda: Case(frozen_bias(nn.Linear(4, 3, **DOUBLE)), normal(N, 4)),
    "linear-sequence": lambda: linear(N, 5, 4),
    "linear-grid": lambda: linear(N, 2, 3, 4, bias=False),
    "linear-transposed-input": transposed_input,
    "linear-sliced-input": sliced_input,
    "linear-expanded-input": lambda: Case(
        nn.Linear(4, 3, **DOUBLE), normal(N, 1, 4).expand(N, 5, 4)
    ),
    "conv1d": lambda: conv(1, (N, 2, 7), 2, 3, 3, stride=2, padding=1),
    "conv1d-unbatched": lambda: conv(1, (2, 7), 2, 3, 3, padding=1),
    "conv1d-dilated": lambda: conv(1, (N, 2, 8), 2, 3, 3, dilation=2, bias=False),
    "conv1d-depthwise": lambda: conv(1, (N, 3, 6), 3, 6, 3, groups=3),
    "conv2d": lambda: conv(2, (N, 2, 5, 4), 2, 3, 3),
    "conv2d-padded": lambda: conv(2, (N, 2, 5, 4), 2, 3, 3, padding=1),
    "conv2d-frozen-bias": lambda: Case(
        frozen_bias(nn.Conv2d(2, 3, 3, padding=1, **DOUBLE)), normal(N, 2, 4, 4)
    ),
    "conv2d-pointwise": lambda: conv(2, (N, 2, 3, 4), 2, 3, 1),
    "conv2d-unbatched": lambda: conv(2, (2, 4, 5), 2, 3, 3),
    "conv2d-valid": lambda: conv(2, (N, 2, 4, 3), 2, 3, 2, padding="valid"),
    "conv2d-uneven": lambda: conv(
        2, (N, 2, 5, 6), 2, 3, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 2)
    ),
    "conv2d-groups": lambda: conv(2, (N, 4, 5, 5), 4, 6, 3, groups=2, stride=2, padding=1),
    "conv2d-depthwise": lambda: conv(2, (N, 3, 4, 4), 3, 3, 3, groups=3, bias=False),
    "conv2d-channels_last": lambda: channels_last(2),
    "conv2d-channels_last-weight": lambda: channels_last(2, weight=True),
    "conv2d-channels_last-groups": lambda: channels_last(2, groups=2, weight=True),
    "conv3d": lambda: conv(3, (N, 2, 3, 4, 3), 2, 3, 2, stride=(1, 2, 1)),
    "conv3d-dilated": lambda: conv(3, (N, 2, 3, 4, 5), 2, 3, 2, dilation=(1, 2, 3), bias=False),
    "conv3d-groups": lambda: conv(3, (N, 2, 2, 3, 4), 2, 4, (1, 2, 3), padding=1, groups=2),
    "conv3d-channels_last": lambda: channels_last(3, weight=True),
    **{
        f"conv{dims}d-{mode}-{padding}": lambda dims=dims, mode=mode, padding=padding: conv(
            dims,
            (N, 2, *[4] * dims),
            2,
            3,
            3 if padding == 1 else 2,
            padding=padding,
            padding_mode=mode,
        )
        for dims in (1, 2, 3)
        for mode in ("zeros", "reflect", "replicate", "circular")
        for padding in (1, "same")
    },
}
