"""How the inverse ``J`` of a factor takes in one mean vector ``v``.

A dense side has ``J: [*b, d, d]``. A diagonal one has ``J: [*b, d]`` and ``x``, the diagonal of ``vvᵀ``,
in place of ``v``: each formula is then that of ``1 × 1`` matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Update = Literal["exact", "paper", "code"]

#: What the public code bounds the entries of a vector by.
CLAMP = 100.0


def exact(inverse: Tensor, along: Tensor, inside: Tensor, memory: float) -> Tensor:
    """The inverse of ``μS + (1-μ)vvᵀ`` for ``S = J⁻¹``, by Sherman and Morrison."""
    fresh = 1 - memory
    return (inverse - along * (fresh / (memory + fresh * inside))) / memory


def paper(inverse: Tensor, along: Tensor, inside: Tensor, memory: float) -> Tensor:
    """``μJ + (1-μ)/(μ²(1 + μ(1-μ)vᵀJv))·Jv(Jv)ᵀ``."""
    fresh = 1 - memory
    weight = fresh / (memory**2 * (1 + memory * fresh * inside))
    return memory * inverse + along * weight


def code(inverse: Tensor, along: Tensor, inside: Tensor, memory: float) -> Tensor:
    """``(J⁻¹ + vvᵀ)⁻¹``; the memory has been applied to ``J`` itself."""
    return inverse - along / (1 + inside)


_UPDATES: dict[Update, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "exact": exact,
    "paper": paper,
    "code": code,
}


def take_in(
    inverse: Tensor, vector: Tensor, start: float, *, update: Update, memory: float, dense: bool
) -> Tensor:
    """The inverse after one more vector; what would not be finite leaves it as it is.

    ``start`` is the multiple of the identity that inverses start from.
    """
    before = inverse
    if update == "code":
        inverse = memory * inverse + (1 - memory) * scaled_identity(inverse, start, dense)
        vector = vector.clamp(-CLAMP, CLAMP)
    if dense:
        column = inverse @ vector[..., None]
        along, inside = column * column.mT, vector[..., None, :] @ column
    else:
        along, inside = inverse.square() * vector, inverse * vector
    after = _UPDATES[update](inverse, along, inside.clamp(min=0), memory)
    usable = torch.isfinite(after)
    return torch.where(usable.all((-2, -1), keepdim=True) if dense else usable, after, before)


def stabilized(
    inverse: Tensor, start: float, *, threshold: float, keep: float, dense: bool
) -> Tensor:
    """``ζJ + (1-ζ)I`` where the largest entry of ``J`` exceeds ε, both in multiples of the start."""
    sizes = inverse.abs().amax((-2, -1) if dense else -1, keepdim=True)
    mixed = keep * inverse + (1 - keep) * scaled_identity(inverse, start, dense)
    return torch.where(sizes > threshold * start, mixed, inverse)


def scaled_identity(like: Tensor, scale: float, dense: bool) -> Tensor:
    """``cI`` of the width of a tensor, as ``[d, d]`` or ``[d]``."""
    ones = like.new_full(like.shape[-1:], scale)
    return ones.diag() if dense else ones
