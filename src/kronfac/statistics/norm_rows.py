"""Rows of all norm layers at once, of what was kept until the step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from kronfac.layers.channel_sums import ChannelSums, side_by_side
from kronfac.linalg import devices
from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.pending import Pending

_Place = tuple[Pending, tuple[Pass, int], ChannelSums, float]


def gather_norms(pendings: Iterable[Pending]) -> None:
    """Make rows of the sums that norms have kept, and their covariances, in a few kernels.

    Processors do as well with one norm after another.
    """
    alike: dict[Hashable, list[_Place]] = {}
    for pending in pendings:
        for key, (held, share) in pending.held_outputs.items():
            if isinstance(held, ChannelSums) and devices.wants_few_kernels(held.products.device):
                alike.setdefault(held.form, []).append((pending, key, held, share))
    for places in alike.values():
        rows = side_by_side([held for _, _, held, _ in places])
        for (pending, key, _, share), found in zip(places, rows, strict=True):
            pending.held_outputs[key] = (found, share)
