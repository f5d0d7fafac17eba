"""Memory on processors that is kept between uses, one piece a thread, precision and use.

Memory that is fresh from the system costs more than what is written to it: every page of it has to be
fetched and cleared. Devices other than processors keep memory by themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

#: Elements of the largest piece that is kept.
MOST_KEPT = 2**21


class _Kept(threading.local):
    def __init__(self) -> None:
        self.pieces: dict[tuple[torch.dtype, str], Tensor] = {}


_kept = _Kept()


def scratch(shape: Sequence[int], dtype: torch.dtype, use: str = "") -> Tensor:
    """A tensor of a processor, with any content, until the next call for the same precision and use."""
    size = torch.Size(shape).numel()
    if size > MOST_KEPT:
        return torch.empty(shape, dtype=dtype, device="cpu")
    piece = _kept.pieces.get((dtype, use))
    if piece is None or piece.numel() < size:
        with torch.inference_mode(False):  # or nothing could be written to it elsewhere
            piece = torch.empty(size, dtype=dtype, device="cpu")
        _kept.pieces[dtype, use] = piece
    return piece.detach()[:size].view(shape)


def scratch_like(tensor: Tensor, shape: Sequence[int], use: str) -> Tensor:
    """The same in a tensor's precision, if that is plainly on a processor; else memory of its own."""
    if type(tensor) is Tensor and tensor.device.type == "cpu":
        return scratch(shape, tensor.dtype, use)
    return tensor.new_empty(shape)
