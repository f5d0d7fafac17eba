"""Communication of the training loop; in one process each method does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kronfac.distributed.comm.collectives import LostRankError
from kronfac.runs.errors import UserError, of_a_file

_joined: tuple[Any, Ranks] | None = None


def current() -> Ranks:
    """The ranks of this process's group: the same object as long as the group exists."""
    global _joined
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if _joined is None or _joined[0] is not group:
        _joined = group, Ranks()
    return _joined[1]


def forget() -> None:
    """Release the group before it is destroyed."""
    global _joined
    _joined = None


@contextmanager
def _messages() -> Iterator[None]:
    """Only messages are sent inside: an error means that another rank is gone, whatever it says."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(f"another rank did not answer: {error}") from error


class Ranks:
    """The ranks that train one model."""

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.size = dist.get_world_size() if joined else 1
        # Flags have a group of their own: they overlap with gradients and never wait for a GPU.
        self._flags = dist.new_group(backend="gloo") if self.size > 1 else None
        self._sent: tuple[Tensor, Any] | None = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def total(self, values: list[float]) -> list[float]:
        """Sums over ranks."""
        if self.size == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64)
        with _messages():
            dist.all_reduce(sums, group=self._flags)
        return [float(value) for value in sums]

    def agree(self, flag: int) -> int:
        """The largest flag of any rank at the last call, the same on all ranks; no rank waits for it."""
        if self.size == 1:
            return flag
        known = self._collect()
        value = torch.tensor(flag)
        with _messages():
            work = dist.all_reduce(value, dist.ReduceOp.MAX, self._flags, async_op=True)
        self._sent = value, work
        return known

    def agree_now(self, flag: int) -> int:
        """The largest flag of any rank."""
        return max(self.agree(flag), self._collect())

    def settle(self) -> None:
        """Wait for the last flag."""
        self._collect()

    def _collect(self) -> int:
        if self._sent is None:
            return 0
        value, work = self._sent
        self._sent = None
        with _messages():
            work.wait()
        return int(value)

    def share_buffers(self, model: nn.Module) -> None:
        """Give all ranks the running averages of the first one."""
        if self.size > 1:
            with _messages():
                for buffer in model.buffers():
                    dist.broadcast(buffer, 0)

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value on the first rank, by rank; nothing elsewhere."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.first else None
        with _messages():
            dist.gather_object(value, found, group=self._flags)
        return found or []

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the first rank; its result, or its :class:`UserError`, reaches all ranks."""
        if self.size == 1:
            return work()
        box: list[Any] = [None, None]
        if self.first:
            try:
                box[0] = work()
            except UserError as error:
                box[1] = str(error)
            except OSError as error:
                box[1] = str(of_a_file(error))
        with _messages():
            dist.broadcast_object_list(box, src=0, group=self._flags)
        if box[1] is not None:
            raise UserError(box[1])
        return box[0]
