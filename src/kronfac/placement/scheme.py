"""What ``distribute=`` accepts: the published schemes by name, checked where they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

#: Names of all schemes except ``Hybrid``.
SCHEMES = (
    "auto",
    "replicated",
    "comm-opt",
    "mem-opt",
    "local",
    "layer-parallel",
    "spd",
)


@dataclass(frozen=True)
class Hybrid:
    """KAISA's scheme between ``"mem-opt"`` and ``"comm-opt"``.

    Each layer's solution is held by ``w`` ranks, which precondition its gradient and send it to the
    others; ``w`` is the divisor of the number of ranks that is nearest to ``fraction`` of it.
    """

    fraction: float

    def __post_init__(self) -> None:
        number = isinstance(self.fraction, int | float) and not isinstance(self.fraction, bool)
        if not number or not 0 < self.fraction <= 1:
            raise ValueError(f"Hybrid({self.fraction!r}): the fraction must be a number in (0, 1].")

    def __str__(self) -> str:
        return f"hybrid({self.fraction:g})"


@dataclass(frozen=True)
class Sharded:
    """What sharded parameters ask for: each layer has one worker among the ranks that hold its shards.

    It is KAISA's grid with one row for each of the ``replicas`` of all shards.
    """

    replicas: int = 1

    def __str__(self) -> str:
        return "sharded"


@dataclass(frozen=True)
class Distribute:
    """A scheme and its details. ``distribute="comm-opt"`` is short for ``Distribute("comm-opt")``.

    Args:
        scheme: one of the names that :class:`kronfac.KFAC` lists, or a :class:`Hybrid`.
        wire_dtype: send statistics, solutions and gradients in this precision, for example
            ``torch.bfloat16``; ``None`` rounds nothing. Weights are never rounded.
        overlap: send statistics during the forward and backward pass of a refresh step.
        triangles: send one triangle of a symmetric statistic instead of all of it.
        deferred: send statistics once per refresh; otherwise at every factor step.
        balanced: place work by cost; otherwise round robin.
        split: let several ranks solve one factor together when it would keep all others waiting.
        slices: of sharded layers whose rows do not mix, let each rank precondition its own slice.
            Gradients then do not travel, and all ranks hold the layer's solution; otherwise one does.
    """

    scheme: str | Hybrid = "auto"
    wire_dtype: torch.dtype | None = None
    overlap: bool = True
    triangles: bool = True
    deferred: bool = True
    balanced: bool = True
    split: bool = True
    slices: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, Hybrid) and self.scheme not in SCHEMES:
            names = ", ".join(map(repr, SCHEMES))
            raise ValueError(
                f"distribute={self.scheme!r} is not supported; choose one of {names}, or "
                "kronfac.Hybrid(0.5)."
            )
        if self.wire_dtype is not None and (
            not isinstance(self.wire_dtype, torch.dtype) or not self.wire_dtype.is_floating_point
        ):
            raise ValueError(
                f"wire_dtype={self.wire_dtype!r} must be a floating-point torch.dtype or None."
            )
        if self.wire_dtype is not None and self.scheme == "auto":
            raise ValueError(
                "distribute='auto' never rounds what it sends; name a scheme to use wire_dtype."
            )
        for name in ("overlap", "triangles", "deferred", "balanced", "split", "slices"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")


def as_distribute(value: Any) -> Distribute:
    """Accept a name, a :class:`Hybrid` or a :class:`Distribute`."""
    return value if isinstance(value, Distribute) else Distribute(value)
