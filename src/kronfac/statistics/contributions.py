"""Contributions to statistics that are not settled yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

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
