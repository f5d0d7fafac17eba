"""The ranks that share the work of one optimizer, and process groups of their own."""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kronfac.distributed.comm.collectives import Collectives, host_backend
from kronfac.distributed.comm.traffic import Traffic


class ProcessGroup:
    """A process group, seen from one of its ranks; ranks are counted within it.

    Its collectives go through groups made here, so that they never mix with those of
    ``DistributedDataParallel`` on the same ranks.
    """

    def __init__(self, parent: Any = None) -> None:
        self.parent = parent if parent is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.parent)
        if self.rank < 0:
            raise ValueError(
                "this rank is not a member of process_group; build the optimizer only on its members."
            )
        self.global_ranks = dist.get_process_group_ranks(self.parent)
        self.size = len(self.global_ranks)
        self.traffic = Traffic()
        #: How long messages may take.
        self.timeout = _timeout(self.parent)
        self._collectives: dict[tuple[str, tuple[int, ...]], Collectives] = {}
        self.all = self.collectives(tuple(range(self.size)))
        self.device = _control_device(self.all.group)
        _OPEN.add(self)

    def close(self) -> None:
        """Let go of all groups; those that nobody else holds end, and their threads with them."""
        self.parent = None
        for one in self._collectives.values():
            one.group = None

    def collectives(self, members: Sequence[int], purpose: str = "") -> Collectives:
        """The way to some of the ranks, of which this one is a member; made when first asked for.

        Messages of one channel have one order, which all members follow. What may come sooner or later
        than other messages on some of them, relative to those, needs a channel for this purpose.
        """
        members = tuple(members)
        key = (purpose, members)
        if key not in self._collectives:
            group = None
            if len(members) > 1:
                group = dist.new_group(
                    [self.global_ranks[member] for member in members],
                    timeout=self.timeout,
                    backend=dist.get_backend_config(self.parent),
                    use_local_synchronization=True,
                )
            self._collectives[key] = Collectives(group, members, self.rank, self.traffic)
        return self._collectives[key]

    def total(self, values: Sequence[float] | Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Combine a few numbers over all ranks, in double precision; waits."""
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        if not isinstance(values, Tensor):
            values = torch.tensor(values, dtype=dtype, device="cpu")
        flat = values.to(self.device, dtype, copy=True)
        self.all.all_reduce("control", flat, op).wait()
        return flat

    def largest(self, values: Sequence[float]) -> Tensor:
        """The largest of each number over all ranks; waits."""
        return self.total(values, dist.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object, in the order of ranks."""
        found: list[Any] = [None] * self.size
        if self.size == 1:
            return [value]
        dist.all_gather_object(found, value, group=self.all.group)
        return found

    def first(self, value: Any) -> Any:
        """What the first rank has in mind, whatever others have."""
        if self.size == 1 or host_backend(self.all.group) == "fake":
            return value  # a simulated world has no other rank
        boxed = [value]
        dist.broadcast_object_list(boxed, group=self.all.group, group_src=0)
        return boxed[0]

    def check_equal(self, here: Mapping[str, Any]) -> None:
        """Raise the same error on all ranks unless they all bring equal descriptions.

        Those of thousands of ranks would be a lot to send, so that digests are compared first.
        """
        digest = torch.tensor(_digest(here), device="cpu")
        most, least = self.total(torch.cat([digest, -digest]), dist.ReduceOp.MAX).chunk(2)
        if torch.equal(most, -least):
            return
        everywhere = self.gather(dict(here))
        problems = []
        for name in here:
            values = [one.get(name) for one in everywhere]
            for rank, value in enumerate(values):
                if value != values[0]:
                    problems.append(_difference(name, values[0], value, rank))
                    break
        if problems:
            raise ValueError(
                "the ranks do not agree: " + "; ".join(problems[:3]) + ". Build the same model and "
                "optimizer, with the same options and versions, on every rank."
            )


#: What holds groups in this process.
_OPEN: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the groups' threads before the interpreter: one that drops a tensor later aborts.

    ``destroy_process_group`` alone does not: optimizer and model still hold their groups.
    """
    if not _OPEN:
        return
    for one in list(_OPEN):
        one.close()
    gc.collect()


def _digest(described: Mapping[str, Any]) -> list[float]:
    """Small numbers, which any backend can compare, that differ if the descriptions do."""
    text = json.dumps(described, sort_keys=True, default=repr)
    return [float(byte) for byte in hashlib.sha256(text.encode()).digest()]


def _difference(name: str, first: Any, other: Any, rank: int) -> str:
    if isinstance(first, dict) and isinstance(other, dict):
        for key in [*first, *other]:
            if first.get(key) != other.get(key):
                return (
                    f"{name} {key!r} is {first.get(key, 'missing')} on rank 0 and "
                    f"{other.get(key, 'missing')} on rank {rank}"
                )
    return f"{name} is {first!r} on rank 0 and {other!r} on rank {rank}"


def _timeout(group: Any) -> timedelta | None:
    """The time limit of a group's collectives, which groups made from it would not inherit."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


def _control_device(group: Any) -> torch.device:
    """Where numbers have to be for the group to send them: the host's memory if possible."""
    types = [] if group is None else [torch.device(one).type for one in group._device_types]
    if not types or "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())
