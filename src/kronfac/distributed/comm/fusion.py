"""Which statistics leave together while a pass still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

#: Ends that differ by less than this share of a start-up count as equal.
_TIE = 1e-6


@dataclass(frozen=True)
class Arrival:
    """A statistic on its way into a message.

    Args:
        key: the statistic's key.
        ready: seconds from the start of the pass until it is there.
        bytes: what it takes on the wire.
    """

    key: str
    ready: float
    bytes: int


def fuse(
    arrivals: Sequence[Arrival], link_time: Callable[[int], float], latency: float = 0.0
) -> list[list[str]]:
    """Groups of neighbours that leave as one message each, such that the last one is through first.

    A message leaves when its last statistic is ready and the one before it is through. SPD-KFAC
    joins a statistic to the next when waiting for that costs less than a start-up; it looks only one
    ahead, and the network may idle while small savings add up to a long wait. Here the end is the
    earliest that any division into neighbours has: the first ``j`` statistics are through at

        ``end[j] = min over i < j of max(end[i], ready[j-1]) + link_time(bytes of i..j-1)``

    and so is every start of the sequence that a group closes, which keeps a wrong guess of a time
    cheap. Of groupings that end together the one with fewer groups is taken.

    Args:
        arrivals: in the order in which they are ready.
        link_time: seconds that a message of so many bytes takes, its start-up included.
        latency: the start-up; ends count as equal if they differ by much less than that.
    """
    if any(later.ready < earlier.ready for earlier, later in pairwise(arrivals)):
        raise ValueError("Arrivals must be in the order in which they are ready.")
    total = [0, *accumulate(arrival.bytes for arrival in arrivals)]
    end, groups, first = [0.0], [0], [0]
    for last, arrival in enumerate(arrivals, start=1):
        ends = [
            max(end[start], arrival.ready) + link_time(total[last] - total[start])
            for start in range(last)
        ]
        earliest = min(ends) + _TIE * latency
        start = min(
            (start for start in range(last) if ends[start] <= earliest),
            key=lambda start: (groups[start], ends[start], start),
        )
        end.append(ends[start])
        groups.append(groups[start] + 1)
        first.append(start)
    cuts = [len(arrivals)]
    while cuts[-1]:
        cuts.append(first[cuts[-1]])
    cuts.reverse()
    keys = [arrival.key for arrival in arrivals]
    return [keys[start:stop] for start, stop in pairwise(cuts)]


def finish_time(
    groups: Sequence[Sequence[str]],
    arrivals: Sequence[Arrival],
    link_time: Callable[[int], float],
) -> float:
    """When the last message is through, if these groups leave in this order one after another."""
    by_key = {arrival.key: arrival for arrival in arrivals}
    end = 0.0
    for group in groups:
        members = [by_key[key] for key in group]
        ready = max(member.ready for member in members)
        end = max(end, ready) + link_time(sum(member.bytes for member in members))
    return end
