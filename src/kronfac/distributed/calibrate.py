"""Short measurements of the network and of one rank's speed, agreed on by all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.placement.costs import Compute, Link

#: Bytes of the message that measures bandwidth.
PROBE_BYTES = 2**19
#: Width of the matrices that measure speed.
PROBE_WIDTH = 256

#: What was measured, by process group: optimizers on the same ranks plan by the same numbers.
_links: WeakKeyDictionary[Any, Link] = WeakKeyDictionary()
_speeds: WeakKeyDictionary[Any, Compute] = WeakKeyDictionary()


def measure_link(world: ProcessGroup) -> Link:
    """Latency and time per byte of messages among all ranks; measured once."""
    if world.parent not in _links:
        _links[world.parent] = _measure_link(world)
    return _links[world.parent]


def measure_compute(world: ProcessGroup) -> Compute:
    """Speed of decompositions and of products, all ranks working at once; measured once."""
    if world.parent not in _speeds:
        _speeds[world.parent] = _measure_compute(world)
    return _speeds[world.parent]


def _measure_link(world: ProcessGroup, repeat: int = 5) -> Link:
    """From small and large all-reduces."""
    if world.size == 1:
        return Link(0.0, 0.0)
    small = torch.zeros(1, device=world.device)
    large = torch.zeros(PROBE_BYTES // 4, device=world.device)

    def send(flat: torch.Tensor) -> float:
        return _seconds(lambda: world.all.all_reduce("control", flat).wait(), world.device, repeat)

    seconds = [send(small), send(large)]
    latency, whole = (t / world.size for t in world.total(seconds).tolist())
    sent = PROBE_BYTES * 2 * (world.size - 1) / world.size
    return Link(latency, max(whole - latency, 1e-9) / sent)


def measure(device: str = "cpu") -> Compute:
    """Speed of decompositions and of products in this process alone."""
    return _speed(*_probe(torch.device(device)))


def _measure_compute(world: ProcessGroup) -> Compute:
    total = world.total(list(_probe(world.device))).tolist()
    return _speed(*(seconds / world.size for seconds in total))


def _probe(device: torch.device, repeat: int = 5) -> tuple[float, float]:
    """Seconds of one decomposition and of one product."""
    matrix = torch.eye(PROBE_WIDTH, device=device) + 1e-3
    solve = _seconds(lambda: torch.linalg.eigh(matrix), device, repeat)
    return solve, _seconds(lambda: matrix @ matrix, device, repeat)


def _speed(solve: float, product: float) -> Compute:
    cube = PROBE_WIDTH**3
    return Compute(9 * cube / solve, 2 * cube / product)


def _seconds(work: Callable[[], object], device: torch.device, repeat: int) -> float:
    times = []
    for attempt in range(repeat + 1):
        started = _now(device)
        work()
        if attempt:  # the first one warms up
            times.append(_now(device) - started)
    return min(times)  # other work on the machine only ever adds


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
    return time.perf_counter()
