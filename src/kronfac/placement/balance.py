"""Load balancing: jobs are assigned to bins to keep the largest load small."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

#: Number of bounds on the load that are tried when jobs can be divided.
_BOUNDS = 12


def longest_first(weights: Sequence[float], bins: int) -> list[int]:
    """A bin for every job: the heaviest first, each into the bin with the least load.

    The largest load is at most ``4/3 - 1/(3·bins)`` times the optimum. Ties are broken by order.
    """
    return [place[0] for place in _longest_first(weights, [1] * len(weights), bins).places]


class Divisible(Protocol):
    """A job that several bins may share."""

    def seconds(self, pieces: int) -> float:
        """The load of each bin when that many share the job."""

    def extra(self, pieces: int) -> float:
        """The additional cost of sharing it."""

    @property
    def divisible(self) -> bool:
        """Whether more than one bin may share it."""


def divide(jobs: Sequence[Divisible], bins: int) -> list[list[int]]:
    """Bins for every job, where a job larger than the mean load may be shared by several.

    A bound on the load of a bin decides how jobs are divided: each into the fewest pieces that fit
    under it. Several bounds between the ideal load and that of undivided jobs are tried, and jobs are
    divided only if everything then finishes earlier.
    """
    whole = [job.seconds(1) for job in jobs]
    best = _longest_first(whole, [1] * len(jobs), bins)
    mean = sum(whole) / bins
    large = [
        index
        for index, job in enumerate(jobs)
        if bins > 1 and job.divisible and whole[index] > mean
    ]
    if not large:
        return best.places
    at_best = list(whole)
    for index in large:
        at_best[index] = jobs[index].seconds(bins)
    lowest = max(mean, *at_best)
    highest = best.makespan
    tried = set()
    for step in range(_BOUNDS - 1, -1, -1):
        bound = lowest + (highest - lowest) * (step / _BOUNDS) ** 2  # denser towards the ideal
        pieces = [1] * len(jobs)
        for index in large:
            pieces[index] = _fewest_pieces(jobs[index], bins, bound)
        if tuple(pieces) in tried:
            continue
        tried.add(tuple(pieces))
        seconds = [job.seconds(count) for job, count in zip(jobs, pieces, strict=True)]
        packed = _longest_first(seconds, pieces, bins)
        packed.extra = sum(
            job.extra(count) for job, count in zip(jobs, pieces, strict=True) if count > 1
        )
        if packed.makespan + packed.extra < best.makespan + best.extra:
            best = packed
    return best.places


@dataclass
class _Packed:
    places: list[list[int]] = field(default_factory=list)
    makespan: float = 0.0
    extra: float = 0.0


def _fewest_pieces(job: Divisible, bins: int, bound: float) -> int:
    counts = range(1, bins + 1)
    position = bisect_left(counts, True, key=lambda count: job.seconds(count) <= bound)
    return counts[min(position, bins - 1)]


def _longest_first(weights: Sequence[float], pieces: Sequence[int], bins: int) -> _Packed:
    """Heaviest first; the pieces of a job go into different bins."""
    packed = _Packed([[] for _ in weights])
    heap = [(0.0, index) for index in range(bins)]
    for job in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        chosen = [heapq.heappop(heap) for _ in range(pieces[job])]
        for load, index in chosen:
            packed.places[job].append(index)
            packed.makespan = max(packed.makespan, load + weights[job])
            heapq.heappush(heap, (load + weights[job], index))
    return packed
