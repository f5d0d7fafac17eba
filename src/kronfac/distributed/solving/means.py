"""The means of what this process has observed, from one look at the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kronfac.distributed.solving.together import finite_flags
from kronfac.protocol.context import Given
from kronfac.state.layer_state import LayerState


@dataclass
class Read:
    """What the host has to know of a layer's statistics before it is solved."""

    #: What means are divided by, and whether all sums are finite.
    counts: dict[str, float] = field(default_factory=dict)
    finite: bool = True


def read_statistics(names: Mapping[LayerState, Sequence[str]]) -> dict[LayerState, Read]:
    """What has been counted of some statistics; the host waits once for all of them."""
    found = {state: Read() for state in names}
    running = [(state, name, state.running[name]) for state, own in names.items() for name in own]
    counted = [(state, name, one.count) for state, name, one in running if one.count is not None]
    if not counted:
        return found
    device = counted[0][2].device
    counts = [count if count.device == device else count.to(device) for _, _, count in counted]
    sums = [[] if one.sum is None else [one.sum] for _, _, one in running]
    flags, owners = finite_flags(sums, device)
    values = torch.cat([torch.stack(counts), flags.to(counts[0].dtype)]).tolist()
    for (state, name, _), value in zip(counted, values, strict=False):
        found[state].counts[name] = value
    for owner, value in zip(owners, values[len(counted) :], strict=True):
        found[running[owner][0]].finite &= value > 0
    return found


def own_means(
    state: LayerState, names: Sequence[str], counts: Mapping[str, float], given: Given
) -> dict[str, Tensor] | None:
    """Means of some statistics of a layer; ``None`` if one is missing that has to be there.

    ``given`` is what rows are compressed with.
    """
    running = {name: state.running[name] for name in names}
    needed = [one for one in running.values() if not one.statistic.may_be_missing]
    if any(one.sum is None for one in needed):
        return None
    gathers = any(one.statistic.combine == "gather" for one in running.values())
    rows = state.compressed_rows(given) if gathers else {}
    means = {}
    for name, one in running.items():
        if one.statistic.source == "compressed":
            means[name] = rows[name]
        elif one.sum is not None and counts.get(name, 0.0) > 0:
            mean = one.mean_of(one.sum, counts[name])
            means[name] = rows.get(name, mean)
        elif not one.statistic.may_be_missing:
            return None
    return means
