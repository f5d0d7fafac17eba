"""Messages among a few ranks, all of them asynchronous, in an order that all of them follow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kronfac.distributed.comm.traffic import Kind, Phase, Traffic

#: Up to this many ranks, Gloo moves segments directly between their ends. Its own broadcast passes
#: through a tree, in which a few links carry several times their share.
MAX_DIRECT = 32
#: Bytes that a link carries, roughly, in the time that it takes to begin a message.
START_UP_BYTES = 2**12


@dataclass(frozen=True)
class Segment:
    """A slice of a flat tensor and the rank that it goes to or comes from."""

    rank: int
    start: int
    stop: int


def host_backend(group: Any) -> str:
    """What carries messages from the host's memory: ``"gloo"`` in ``"cpu:gloo,cuda:nccl"``."""
    if group is None:
        return ""
    pairs = (one.partition(":") for one in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}.get("cpu", "")


class LostRankError(RuntimeError):
    """A message did not arrive: another rank has ended, or does not take part."""


@dataclass
class Arrival:
    """A message on its way."""

    phase: Phase
    works: Sequence[Any] = ()
    then: Callable[[], None] | None = None
    arrived: bool = False

    @property
    def done(self) -> bool:
        """Whether the result is there; messages that go straight to their ranks do not tell."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Return when the result is there (on an accelerator: when later work may use it)."""
        if self.arrived:
            return
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise LostRankError(
                f"a message of phase {self.phase!r} did not arrive; another rank has probably ended "
                f"or raised an error (see its output). Restart all ranks from the last checkpoint. "
                f"[{str(error).splitlines()[0]}]"
            ) from error
        if self.then is not None:
            self.then()
        self.works = ()
        self.arrived = True


class Collectives:
    """Some ranks, of which this one is a member."""

    def __init__(self, group: Any, members: tuple[int, ...], rank: int, traffic: Traffic) -> None:
        self.group = group
        self.members = members
        self.rank = rank
        self.traffic = traffic
        self.direct = host_backend(group) == "gloo" and len(members) <= MAX_DIRECT
        self._places = {member: place for place, member in enumerate(members)}
        self._tags = itertools.count(1)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.members)

    def all_reduce(self, phase: Phase, flat: Tensor, op: Any = dist.ReduceOp.SUM) -> Arrival:
        """Add up over the members, in place."""
        if self._alone(phase, "all_reduce", flat):
            return Arrival(phase)
        work = self._start(phase, lambda: dist.all_reduce(flat, op, self.group, async_op=True))
        return Arrival(phase, [work])

    def reduce(
        self,
        phase: Phase,
        flat: Tensor,
        segments: Sequence[Segment],
        scratch: dict[int, Tensor] | None = None,
        rings: bool = False,
    ) -> Arrival:
        """Add up each segment at its rank, in place; elsewhere it is undefined afterwards.

        ``scratch`` keeps memory for what is received, from one call to the next. ``rings`` need none,
        and tell whether they are done.
        """
        wanted = [one for one in segments if one.stop > one.start]
        rings = rings or self._rings(wanted, flat.element_size())
        if self._is_direct(flat) and not rings:
            for one in wanted:
                self._record(phase, "reduce", flat[one.start : one.stop])
            return self._collect(phase, flat, wanted, {} if scratch is None else scratch)
        works = []
        for one in wanted:
            part = flat[one.start : one.stop]
            if not self._alone(phase, "reduce", part):
                works.append(self._start(phase, self._reduce_one, part, one.rank))
        return Arrival(phase, works)

    def broadcast(self, phase: Phase, flat: Tensor, root: int) -> Arrival:
        """Send a tensor from one member to all others."""
        if flat.numel() == 0 or self._alone(phase, "broadcast", flat):
            return Arrival(phase)
        if not self._is_direct(flat):
            return Arrival(phase, [self._start(phase, self._broadcast_one, flat, root)])
        tag = next(self._tags)
        if self.rank != root:
            return Arrival(phase, [self._start(phase, self._receive, flat, root, tag)])
        others = [member for member in self.members if member != root]
        return Arrival(phase, [self._start(phase, self._send, flat, one, tag) for one in others])

    def gather(self, phase: Phase, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """All members' rows ``[*b, n, d]`` side by side; ``counts`` says how many each has. Waits."""
        most = max(counts)
        padded = rows.new_zeros(*rows.shape[:-2], most, rows.shape[-1])
        padded[..., : rows.shape[-2], :] = rows
        if self._alone(phase, "gather", padded):
            return rows
        found = [torch.empty_like(padded) for _ in self.members]
        work = self._start(phase, lambda: dist.all_gather(found, padded, self.group, async_op=True))
        Arrival(phase, [work]).wait()
        kept = [part[..., :count, :] for part, count in zip(found, counts, strict=True)]
        return torch.cat(kept, dim=-2)

    def exchange(
        self, phase: Phase, flat: Tensor, splits: list[int], found: Tensor, sizes: list[int]
    ) -> Arrival:
        """Send a piece of ``flat`` to each member, and receive one of each in ``found``."""
        if self.size == 1:
            found.copy_(flat)
            return Arrival(phase)
        stays = splits[self._place(self.rank)]
        self._record(phase, "exchange", flat[: flat.numel() - stays])
        work = self._start(
            phase,
            lambda: dist.all_to_all_single(found, flat, sizes, splits, self.group, async_op=True),
        )
        return Arrival(phase, [work])

    def _is_direct(self, flat: Tensor) -> bool:
        return self.direct and flat.device.type == "cpu"  # Gloo sends from the host's memory only

    # --- the pieces -----------------------------------------------------------------------------

    def _rings(self, segments: Sequence[Segment], itemsize: int) -> bool:
        """Whether rings are quicker than sending segments straight to their ranks.

        The rank of the largest would receive it from all others, at the same time. A ring adds it up on
        the way and hands the sum over, which no link sees more than twice; but it begins 2P messages.
        """
        sizes = [(one.stop - one.start) * itemsize for one in segments]
        straight = (self.size - 1) * max(sizes, default=0)
        return straight > 2 * (sum(sizes) + len(sizes) * self.size * START_UP_BYTES)

    def _collect(
        self, phase: Phase, flat: Tensor, segments: Sequence[Segment], scratch: dict[int, Tensor]
    ) -> Arrival:
        """Every member sends each segment straight to its rank, which adds them in the order of ranks."""
        tag, works = next(self._tags), []
        own = next((flat[one.start : one.stop] for one in segments if one.rank == self.rank), None)
        others = [member for member in self.members if member != self.rank]
        if own is not None:
            for member in others:
                if member not in scratch:
                    scratch[member] = torch.empty_like(own)
                works.append(self._start(phase, self._receive, scratch[member], member, tag))
        for one in segments:
            if one.rank != self.rank:
                part = flat[one.start : one.stop]
                works.append(self._start(phase, self._send, part, one.rank, tag))

        def add() -> None:
            if own is not None:
                _add([scratch[member] for member in others], own)

        return Arrival(phase, works, add)

    def _reduce_one(self, part: Tensor, root: int) -> Any:
        return dist.reduce(part, group_dst=self._place(root), group=self.group, async_op=True)

    def _broadcast_one(self, part: Tensor, root: int) -> Any:
        return dist.broadcast(part, group_src=self._place(root), group=self.group, async_op=True)

    def _send(self, part: Tensor, to: int, tag: int) -> Any:
        return dist.isend(part, group_dst=self._place(to), group=self.group, tag=tag)

    def _receive(self, part: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(part, group_src=self._place(source), group=self.group, tag=tag)

    def _place(self, member: int) -> int:
        return self._places[member]

    def _start(self, phase: Phase, launch: Callable[..., Any], *args: Any) -> Any:
        try:
            return launch(*args)
        except RuntimeError as error:
            raise LostRankError(
                f"a message of phase {phase!r} could not be sent; another rank has probably ended or "
                f"raised an error (see its output). Restart all ranks from the last checkpoint. "
                f"[{str(error).splitlines()[0]}]"
            ) from error

    def _alone(self, phase: Phase, kind: Kind, flat: Tensor) -> bool:
        if self.size > 1:
            self._record(phase, kind, flat)
        return self.size == 1

    def _record(self, phase: Phase, kind: Kind, flat: Tensor) -> None:
        if self.size > 1:
            self.traffic.record(phase, kind, flat.numel() * flat.element_size(), self.size)


def _add(pieces: Sequence[Tensor], out: Tensor) -> None:
    """Add tensors to another in their order; in single precision what travelled in less than that."""
    total = out.to(torch.promote_types(out.dtype, torch.float32))
    for piece in pieces:
        total.add_(piece)
    if total is not out:
        out.copy_(total)
