"""Counts the elements that K-FAC has in memory: whatever is allocated inside its hooks and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kronfac.capture.capture import Capture
from kronfac.distributed.distributed import Distributed
from kronfac.distributed.shard_exchange import ShardExchange
from kronfac.step.pipeline import Preconditioner
from kronfac.step.updates import Updates


class Live(TorchDispatchMode):
    """Elements of floating point storages that were made inside and are still there, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.peaks: dict[str, int] = {}
        self.where = ""
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {
            one.untyped_storage()._cdata
            for one in tree_leaves((args, kwargs))
            if type(one) is Tensor
        }
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            self._see(one, given)
        now = self.now()
        self.peak = max(self.peak, now)
        self.peaks[self.where] = max(self.peaks.get(self.where, 0), now)
        return found

    def _see(self, value: Any, given: set[int]) -> None:
        if type(value) is not Tensor or not value.is_floating_point():
            return
        storage = value.untyped_storage()
        if storage._cdata in given:
            return  # a view
        known = self._held.get(storage._cdata)
        if known is None or known[0].expired():
            elements = storage.nbytes() // value.element_size()
            self._held[storage._cdata] = (StorageWeakRef(storage), elements)

    def now(self) -> int:
        """What is there at this moment."""
        for key in [key for key, (one, _) in self._held.items() if one.expired()]:
            del self._held[key]
        return sum(elements for _, elements in self._held.values())

    def inside(self, function: Callable[..., Any], where: str) -> Callable[..., Any]:
        """The function, counted."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            before, self.where = self.where, where
            try:
                if before:
                    return function(*args, **kwargs)
                with self:
                    return function(*args, **kwargs)
            finally:
                self.where = before

        return counted


@contextmanager
def counting() -> Iterator[Live]:
    """Count in all optimizers of this process."""
    live = Live()
    patched: list[tuple[Any, str, str]] = [
        (Capture, "observe_call", "forward"),
        (Capture, "observe_output", "backward"),
        (Preconditioner, "run", "step"),
        (Distributed, "land", "land"),
        (Distributed, "refresh", "refresh"),
        *((ShardExchange, name, "exchange") for name in ("_begin", "_land", "_send", "_receive")),
        (Updates, "precondition", "precondition"),
        (Updates, "rescale", "rescale"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    for owner, name, where in patched:
        setattr(owner, name, live.inside(getattr(owner, name), where))
    try:
        yield live
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
