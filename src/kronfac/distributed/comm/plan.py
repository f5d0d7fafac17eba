"""In which order and in which company statistics leave."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kronfac.distributed.comm.fusion import Arrival, fuse
from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.placement.costs import Link


class Plan:
    """In which order and in which company statistics leave, and when that was found out.

    The first round goes as one message and is watched: when each statistic was complete. From that and
    the measured network, all ranks derive the same groups, by which later rounds go.
    """

    def __init__(self) -> None:
        self.groups: list[list[str]] | None = None
        #: How often a statistic is observed in one step, of late.
        self.calls: dict[str, int] = {}
        self._ready: dict[str, float] = {}
        self._began = 0.0

    def grouped(self, keys: Sequence[str]) -> list[list[str]]:
        """The groups in which these statistics leave."""
        wanted = dict.fromkeys(keys)
        groups = [[key for key in group if key in wanted] for group in self.groups or []]
        known = {key for group in groups for key in group}
        return [group for group in [*groups, [k for k in keys if k not in known]] if group]

    def watch(self, key: str) -> None:
        """Note that a statistic has been observed now."""
        now = time.perf_counter()
        if not self._ready:
            self._began = now
        self._ready[key] = now - self._began

    def decide(self, world: ProcessGroup, sizes: Mapping[str, int], link: Link) -> None:
        """Choose the groups; all ranks call this together."""
        keys = list(sizes)
        latest = max(self._ready.values(), default=0.0)
        here = [self._ready.get(key, latest) for key in keys]
        ready = [t / world.size for t in world.total(here).tolist()]
        order = sorted(range(len(keys)), key=lambda index: (ready[index], index))
        arrivals = [Arrival(keys[i], ready[i], sizes[keys[i]]) for i in order]
        size = world.size
        groups = fuse(arrivals, lambda m: link.reduce(m, size), link.latency)
        self.groups = world.first(groups)  # whatever rounding does, one plan for all
