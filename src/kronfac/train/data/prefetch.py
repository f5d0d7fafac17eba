"""Making items in a thread, a few ahead of whoever uses them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")
K = TypeVar("K")
_AHEAD = 2


def prefetch(make: Callable[[K], T], keys: Iterable[K]) -> Iterator[T]:
    """``make(key)`` for each key in order; an exception of the thread is raised here."""
    items: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    room = threading.Semaphore(_AHEAD)
    stopped, single = threading.Event(), threading.Event()

    def work() -> None:
        torch.set_num_threads(1)
        single.set()
        error: BaseException | None = None
        try:
            for key in keys:
                room.acquire()
                if stopped.is_set():
                    return
                items.put((make(key), None))
        except BaseException as caught:
            error = caught
        room.acquire()
        items.put((None, error or StopIteration()))

    thread = threading.Thread(target=work, name="kronfac-data", daemon=True)
    thread.start()
    _keep_threads(single)
    try:
        while True:
            item, error = items.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            room.release()
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        room.release()
        thread.join()


def _keep_threads(single: threading.Event) -> None:
    """Let only the data thread compute alone.

    Its operations are short, and threads of its own would take the cores from training. Torch keeps
    the number per thread, but new threads start with the number that was set last: set ours again.
    """
    single.wait()
    torch.set_num_threads(torch.get_num_threads())
