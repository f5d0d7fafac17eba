"""Contributions to statistics that are not settled yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.protocol.block import Context, Tensors
from kronfac.statistics.forward_pass import Pass


@dataclass
class Summed:
    """Output gradients of inputs that stand for all samples, added up over the calls of a step."""

    rows: Tensor
    share: float
    passes: dict[Pass, None]


@dataclass
class Unscreened:
    """The first contributions of a side, of which nobody knows yet whether they are finite."""

    values: Mapping[str, Tensor]
    #: How many rows they have (inputs), or the pass that they belong to (outputs).
    rows: int | Tensor = 0
    forward_pass: Pass | None = None


def largest_sum(dtype: torch.dtype) -> float:
    """A contribution that is larger than this could overflow when others are added."""
    return torch.finfo(dtype).max * 2.0**-16


def context_of(forward_pass: Pass, solution: Tensors | None) -> Context:
    """What a block may know while it observes rows of a pass."""
    return Context(solution, forward_pass.outputs, forward_pass.output_gradient)
