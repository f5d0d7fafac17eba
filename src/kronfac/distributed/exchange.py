"""Gradients that active ranks send to those that have run out of batches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from kronfac.distributed.comm.broadcast import make_broadcasts
from kronfac.distributed.comm.flat import Item
from kronfac.distributed.comm.process_group import ProcessGroup


def exchange_gradients(
    world: ProcessGroup, parameters: Sequence[nn.Parameter], active: bool
) -> None:
    """Give joined ranks the gradients that the active ones agree on."""
    here = [0.0] * world.size
    here[world.rank] = float(active)
    flags = world.total(here).tolist()
    if all(flags):
        return
    root = flags.index(1.0)
    has = [float(p.grad is not None) for p in parameters]
    found = world.total(has if world.rank == root else [0.0] * len(has)).tolist()
    used = [p for p, flag in zip(parameters, found, strict=True) if flag]
    items = [
        Item(str(index), tuple(p.shape), p.dtype, p.device, root=root)
        for index, p in enumerate(used)
    ]
    for broadcast in make_broadcasts(items, world.all, "control", None):
        if broadcast.mine:
            for key in broadcast.keys:
                broadcast.put(key, dense(used[int(key)].grad))
        broadcast.launch()
        broadcast.wait()
        if not active:
            for key in broadcast.keys:
                used[int(key)].grad = broadcast.take(key).clone()
    if not active:
        for parameter, flag in zip(parameters, found, strict=True):
            if not flag:
                parameter.grad = None


def dense(grad: Tensor | None) -> Tensor | None:
    """A gradient as a tensor that can be sent."""
    return grad.to_dense() if grad is not None and grad.is_sparse else grad
