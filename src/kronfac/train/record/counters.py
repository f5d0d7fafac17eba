"""K-FAC's counters over the whole run, also when it was interrupted."""

from __future__ import annotations

from typing import Any

from kronfac.optimizer.base import Preconditioned

Stats = dict[str, Any]
#: Numbers of ``stats()`` that are values of now and no counts.
_NOW = ("damping", "refresh_every", "learning_rate", "momentum")


class Counters:
    """The ``stats()`` of K-FAC with counts since step 0, though the optimizer counts since its start."""

    def __init__(self, kfac: Preconditioned | None) -> None:
        self.kfac = kfac
        self._before: Stats = {}
        self._begun: Stats = {}
        self._last: Stats = {}

    def total(self) -> Stats:
        """Counts since step 0; nothing without K-FAC."""
        if self.kfac is None:
            return {}
        now = self.kfac.stats()
        return _added(self._before, _since(self._begun, now))

    def go_on(self, before: Stats) -> None:
        """Continue from the counts of a checkpoint, which the optimizer has loaded."""
        if self.kfac is not None:
            self._before, self._begun = before, self.kfac.stats()
            self._last = self._begun

    def since_last(self) -> Stats:
        """Counts since the last call, or since this part of the run began; nothing without K-FAC."""
        if self.kfac is None:
            return {}
        before, self._last = self._last, self.kfac.stats()
        return _since(before, self._last)


def _since(before: Stats, now: Stats) -> Stats:
    return _combined(before, now, -1)


def _added(before: Stats, later: Stats) -> Stats:
    return _combined(before, later, 1)


def _combined(before: Stats, now: Stats, sign: int) -> Stats:
    """Add to all counts of ``now``, or take from them, those of before; the rest is that of now."""
    return {
        key: now[key] if key in _NOW else _count(before.get(key), now[key], sign) for key in now
    }


def _count(before: Any, now: Any, sign: int) -> Any:
    if isinstance(now, dict):
        keys = {**(before or {}), **now}
        return {key: _count((before or {}).get(key), now.get(key, 0), sign) for key in keys}
    return now if isinstance(now, list) else now + sign * (before or 0)
