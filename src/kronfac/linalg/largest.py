"""The largest entries of many tensors at once, which tell whether all entries are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kronfac.linalg import devices


def largest_entries(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute value in each of some tensors of one device and precision, ``[tensors]``.

    It is not a number where one of the entries is none. No tensor may be empty.
    """
    if devices.wants_few_kernels(tensors[0].device):
        return torch.stack(torch._foreach_norm(list(tensors), torch.inf))
    # Twenty times as fast as a CPU's norm of that order.
    least, most = zip(*(torch.aminmax(tensor) for tensor in tensors), strict=True)
    return torch.maximum(torch.stack(most), torch.stack(least).neg_())
