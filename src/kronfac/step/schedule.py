"""When statistics are taken and solutions renewed."""

from __future__ import annotations

from collections.abc import Sequence

from kronfac.options.config import Schedules

#: From this interval on, the first one also refreshes at t = 1, 2, 4, 8, ...
EARLY_FROM = 10


class Clock:
    """Counts completed steps from 0 and knows what is due at the current one."""

    def __init__(self, schedules: Schedules, early_refresh: bool) -> None:
        self.schedules = schedules
        self.early_refresh = early_refresh
        self.step = 0
        self.last_factor: int | None = None

    def factor_due(self) -> bool:
        """Whether statistics are taken at the current step."""
        if self.early() or self._on_grid("factor_every", self.last_factor):
            return True
        interval = self.schedules.adaptive("refresh_every")
        return interval is not None and interval.due(self.step)

    def mark_factor(self) -> None:
        """Record that statistics were taken; early ones between do not move the grid."""
        if self._on_grid("factor_every", self.last_factor):
            self.last_factor = self.step

    def refresh_due(self, last: int | None) -> bool:
        """Whether a layer last refreshed at ``last`` on the grid is due."""
        return self.early() or self.refresh_on_grid(last)

    def refresh_on_grid(self, last: int | None) -> bool:
        """Whether it is due on the grid, and not only early.

        An interval that adapts is one for all layers, whenever each of them began.
        """
        interval = self.schedules.adaptive("refresh_every")
        if interval is not None:
            return last is None or interval.due(self.step)
        return self._on_grid("refresh_every", last)

    def _on_grid(self, interval: str, last: int | None) -> bool:
        return last is None or self.step - last >= int(self.schedules.at(interval, self.step))

    def early(self) -> bool:
        """Whether this is t = 1, 2, 4, ... of a long first interval.

        One batch must not rule a hundred steps; such a step takes statistics as well.
        """
        if not self.early_refresh or self.step < 1 or self.step & (self.step - 1):
            return False
        interval = int(self.schedules.at("refresh_every", self.step))
        return interval >= EARLY_FROM and self.step < interval


def spread_offsets(costs: Sequence[int], interval: int) -> list[int]:
    """Offsets in [0, interval) that spread refreshes evenly by cost, the most expensive first.

    A layer's offset is where its share of the total cost begins on the interval.
    """
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    total = max(1, sum(costs))
    offsets, spent = [0] * len(costs), 0
    for index in order:
        offsets[index] = spent * interval // total
        spent += costs[index]
    return offsets
