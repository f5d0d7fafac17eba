"""The whole state of an optimizer whose parts are on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.layers.shards import whole


def gather_state(world: ProcessGroup, own: dict[str, Any], to: int) -> dict[str, Any] | None:
    """Put the ranks' state dicts together on one of them, on the CPU; the others get ``None``.

    What several ranks hold is taken from the first of them and sent by no other; shards are put together.
    """
    entries: dict[Any, dict[str, Any]] = {}
    for index, entry in own["state"].items():
        entries[index] = {}
        for key, value in entry.items():
            all_of_it = whole(value)  # which all ranks have to ask for, if it is sharded
            if all_of_it is value or world.rank == to:
                entries[index][key] = _on_cpu(all_of_it)
    keys = [{index: set(entry) for index, entry in entries.items()}]
    seen: dict[Any, set[str]] = {}
    for rank, theirs in enumerate(world.gather(keys[0])):
        for index, names in theirs.items():
            known = seen.setdefault(index, set())
            if rank == world.rank:
                entries[index] = {k: v for k, v in entries[index].items() if k not in known}
            known |= names
    if world.size == 1:
        return {**own, "state": entries}
    found: list[Any] | None = [None] * world.size if world.rank == to else None
    dist.gather_object(entries, found, group=world.all.group, group_dst=to)
    if found is None:
        return None
    state: dict[Any, dict[str, Any]] = {}
    for theirs in found:
        for index, entry in theirs.items():
            state.setdefault(index, {}).update(entry)
    return {**own, "state": dict(sorted(state.items(), key=lambda one: str(one[0])))}


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
