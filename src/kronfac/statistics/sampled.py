"""Fewer rows: which rows of a layer's calls its statistics are taken from.

Statistics are means over rows, and a few times as many rows as a factor is wide say nearly as much as all
of them. The stride over samples, and over positions where few samples would be left, is fixed at the
first factor step from the rows of all ranks and micro-batches, and saved. Where it starts changes from
step to step, so that over time every row counts alike: the expectation is the full statistic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kronfac.layers.rows import Rows
from kronfac.statistics.forward_pass import Pass

#: Multiples of irrational numbers spread evenly, whichever of them are taken.
_TURN_OF_SAMPLES, _TURN_OF_POSITIONS = (math.sqrt(5) - 1) / 2, math.sqrt(2) - 1


@dataclass(frozen=True)
class Stride:
    """Which rows are chosen: every so many samples, and of those every so many positions.

    Args:
        target: the number of rows that was wanted.
        samples: stride over samples, or over whatever is in the first dimension.
        positions: stride over each sample's positions.
        total: samples of the whole step over all ranks when the stride was fixed.
        first: the number, among these, of this rank's first one.
    """

    target: int
    samples: int = 1
    positions: int = 1
    total: int = 0
    first: int = 0

    @property
    def leaves_out(self) -> bool:
        """Whether any row is left out."""
        return self.samples > 1 or self.positions > 1

    def choose(self, rows: Rows, forward_pass: Pass, positions: bool = True) -> Rows | None:
        """The chosen rows of a call; ``None`` if there are none. Both sides have the same.

        ``positions`` says whether those of a sample may be left out.
        """
        before = self.first + forward_pass.first
        before = before * rows.samples // max(1, forward_pass.samples)
        # The start of the stride, and the first of this call's samples from there on.
        start = int(self.samples * (forward_pass.step * _TURN_OF_SAMPLES % 1))
        skipped = (start - before) % self.samples
        if skipped >= rows.samples:
            return None
        if self.samples > 1:
            rows = rows.every(skipped, self.samples)
        if positions and 1 < self.positions <= rows.positions:
            start = int(rows.positions * (forward_pass.step * _TURN_OF_POSITIONS % 1))
            rows = rows.some_positions(start + (before + skipped) // self.samples, self.positions)
        return rows
