"""Products in bfloat16 where the hardware is faster at them.

Operands are rounded to 8 significant bits, sums are kept in float32 and rounded once. Which products are
worth it follows from a fixed table of hardware and sizes, never from a measurement during a run. float64
stays float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

#: The least side, and the least number of multiplications of one matrix, at which a bfloat16 product is
#: faster, casts included. CPUs with AVX512-BF16, one thread: as fast at 128 x 128 x 128, 1.8 times as
#: fast at 128 x 512 x 512, and more than twice from 512 on each side.
_LEAST_SIDE, _LEAST_PRODUCTS = 64, 2**21


@lru_cache(maxsize=64)
def supported(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 numbers faster than float32 ones."""
    if device.type == "cuda":  # tensor cores with bfloat16
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def in_words(allowed: bool, tensors: Iterable[Tensor]) -> str:
    """Whether these are multiplied so here, for ranks to compare: unlike ones compute unlike steps."""
    used = allowed and any(supported(device) for device in {tensor.device for tensor in tensors})
    return "used" if used else "not used; products='float32' does without it on all ranks"


def is_faster(tensor: Tensor, *sizes: int) -> bool:
    """Whether bfloat16 pays for products of ``tensor``, ``[m, k] @ [k, n]`` with these three sizes.

    However many matrices a batch has: ranks may divide it, and have to compute the same.
    """
    if tensor.dtype != torch.float32 or min(sizes) < _LEAST_SIDE:
        return False
    return math.prod(sizes) >= _LEAST_PRODUCTS and supported(tensor.device)


def matmul(left: Tensor, right: Tensor, narrow: bool) -> Tensor:
    """``left @ right``; in bfloat16 if that is allowed and pays, in the precision of ``left``.

    Both operands and the result are rounded to a relative 2⁻⁹, so that the error is at most
    ``2⁻⁷·‖left‖_F·‖right‖_F`` and, of random signs, about ``0.3 %`` of the result.
    """
    sizes = (*left.shape[-2:], right.shape[-1])
    if not narrow or not is_faster(left, *sizes):
        return left @ right
    return (left.bfloat16() @ right.bfloat16()).to(left.dtype)
