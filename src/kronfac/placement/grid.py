"""KAISA's grid of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Ranks in ``workers`` rows and ``columns`` columns, numbered along the rows.

    A layer is assigned to a column: the ranks of that column hold its solution and precondition its
    gradient. Each of them sends the result along its own row.
    """

    size: int
    workers: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.workers < 1 or self.size % self.workers:
            raise ValueError(f"{self.workers} rows cannot hold {self.size} ranks evenly.")

    @property
    def columns(self) -> int:
        """How many groups of workers there are."""
        return self.size // self.workers

    def column(self, index: int) -> tuple[int, ...]:
        """The ranks of a column, from top to bottom."""
        self._check(index, self.columns, "column")
        return tuple(range(index, self.size, self.columns))

    def row(self, index: int) -> tuple[int, ...]:
        """The ranks of a row, from left to right."""
        self._check(index, self.workers, "row")
        return tuple(range(index * self.columns, (index + 1) * self.columns))

    def column_of(self, rank: int) -> int:
        """The column that a rank is in."""
        return rank % self.columns

    def row_of(self, rank: int) -> int:
        """The row that a rank is in."""
        return rank // self.columns

    def root(self, rank: int, column: int) -> int:
        """The rank of a column that is in the row of ``rank`` and therefore sends to it."""
        return self.row_of(rank) * self.columns + column

    @staticmethod
    def _check(index: int, count: int, name: str) -> None:
        if not 0 <= index < count:
            raise IndexError(f"There is no {name} {index} among {count}.")


def divisors(size: int) -> list[int]:
    """All divisors, in increasing order."""
    small = [number for number in range(1, math.isqrt(size) + 1) if size % number == 0]
    return sorted({*small, *(size // number for number in small)})


def nearest_divisor(size: int, fraction: float) -> int:
    """The divisor of ``size`` nearest to ``fraction`` of it; on a tie, the larger."""
    return min(divisors(size), key=lambda number: (abs(number - fraction * size), -number))
