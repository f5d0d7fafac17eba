"""Tensors as flat slices of a message; of a symmetric matrix, each number once.

A symmetric matrix of width ``d`` is cut in halves of widths ``n₁ = d // 2`` and ``n₂ = d - n₁``. The
rectangle ``M₁₂`` travels as it is. The upper triangles of ``M₂₂`` and ``M₁₁`` share one square of
width ``n₂``: the first stays where it is, the second is turned by 180° and lies below it. If ``d`` is
even, the square has one diagonal and both triangles have one, so that of ``M₁₁`` follows on its own.
That makes ``d(d+1)/2`` numbers without a table of indices, in a few passes over memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Width of the tiles that are transposed at once: two of them fit into a cache.
_TILE = 256


def packed_elements(shape: tuple[int, ...], symmetric: bool) -> int:
    """How many numbers a tensor of this shape takes in a message.

    A symmetric one has shape ``[*b, d, d]`` and takes ``b·d(d+1)/2``.
    """
    if not symmetric:
        return math.prod(shape)
    batch, width = _batch_and_width(shape)
    return batch * (width * (width + 1) // 2)


def pack(tensor: Tensor, symmetric: bool, out: Tensor) -> None:
    """Write ``tensor`` into ``out``, a contiguous flat slice with the number of elements it takes.

    If ``out`` has another dtype, numbers are rounded. Of symmetric matrices only the upper triangle,
    with its diagonal, is read.
    """
    if not symmetric:
        out.view(tensor.shape).copy_(tensor)
        return
    batch, width = _batch_and_width(tensor.shape)
    matrix = tensor.reshape(batch, width, width)
    half = width // 2
    places = _places(out, batch, width)
    places.rectangle.copy_(matrix[:, :half, half:])
    places.square.copy_(matrix[:, half:, half:])
    first = matrix[:, :half, :half]
    turned = first.flip(-2, -1).to(out.dtype)
    _overwrite_below(places.shared, places.below, turned)
    if places.diagonal is not None:
        places.diagonal.copy_(first.diagonal(dim1=-2, dim2=-1))


def unpack(
    flat: Tensor, shape: tuple[int, ...], symmetric: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """A new tensor from what :func:`pack` wrote; of symmetric matrices both triangles.

    Args:
        flat: the slice that was written.
        shape: the tensor's shape.
        symmetric: as given to :func:`pack`.
        dtype: of the result; by default that of ``flat``.
    """
    dtype = dtype or flat.dtype
    if not symmetric:
        return flat.view(shape).to(dtype, copy=True)
    batch, width = _batch_and_width(shape)
    half = width // 2
    places = _places(flat, batch, width)
    matrix = flat.new_empty((batch, width, width), dtype=dtype)
    matrix[:, :half, half:] = places.rectangle
    matrix[:, half:, half:] = places.square
    first = matrix[:, :half, :half]
    first.copy_(places.shared.flip(-2, -1))
    if places.diagonal is not None:
        first.diagonal(dim1=-2, dim2=-1).copy_(places.diagonal)
    _mirror(matrix)
    return matrix.view(shape)


@dataclass
class _Places:
    """Where the pieces of ``[b, d, d]`` lie in a message, as views of it.

    ``shared`` is the part of the square that the turned ``M₁₁`` covers; the triangle that belongs to
    ``M₁₁`` are its entries on and under the diagonal ``below``.
    """

    rectangle: Tensor
    square: Tensor
    shared: Tensor
    below: int
    diagonal: Tensor | None


def _places(flat: Tensor, batch: int, width: int) -> _Places:
    half = width // 2
    rest = width - half
    rows = flat.view(batch, width * (width + 1) // 2)
    middle, end = half * rest, half * rest + rest * rest
    square = rows[:, middle:end].view(batch, rest, rest)
    even = half == rest
    return _Places(
        rectangle=rows[:, :middle].view(batch, half, rest),
        square=square,
        shared=square if even else square[:, 1:, :half],
        below=-1 if even else 0,
        diagonal=rows[:, end:] if even else None,
    )


def _overwrite_below(target: Tensor, below: int, source: Tensor) -> None:
    """Copy the entries on and under a diagonal; those above it stay."""
    above = _triangle(target.shape[-1], below + 1, target.device)
    torch.where(above, target, source, out=target)


def _triangle(width: int, diagonal: int, device: torch.device) -> Tensor:
    """True on and above a diagonal."""
    return torch.ones(width, width, dtype=torch.bool, device=device).triu_(diagonal)


def _mirror(matrix: Tensor) -> None:
    """Copy the upper triangles of ``[b, d, d]`` onto the lower ones, tile by tile."""
    width = matrix.shape[-1]
    for start in range(0, width, _TILE):
        rows = slice(start, start + _TILE)
        for left in range(0, start, _TILE):
            columns = slice(left, left + _TILE)
            matrix[:, rows, columns].copy_(matrix[:, columns, rows].mT)
        tile = matrix[:, rows, rows]
        _overwrite_below(tile, -1, tile.mT.clone())  # a tile of one number is its own transpose


def _batch_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"A tensor of shape {tuple(shape)} cannot be symmetric.")
    return math.prod(shape[:-2]), shape[-1]
