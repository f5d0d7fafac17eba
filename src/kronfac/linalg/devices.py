"""Where kernels are dear."""

from __future__ import annotations

import torch


def wants_few_kernels(device: torch.device) -> bool:
    """Whether starting a kernel costs more than copies that save one: everywhere but on processors.

    A processor starts work at once, and is fastest on what is still in its caches.
    """
    return device.type != "cpu"
