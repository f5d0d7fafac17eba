"""Parameters with owners (Osawa et al. 2019): one rank steps each of them and sends it to all others.

The owner of a layer preconditions its gradient, runs the base optimizer for its parameters, and spreads
the new weights, so that the base optimizer's state is divided among the ranks as well. Without
``DistributedDataParallel`` the gradients, too, go to their owner only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.distributed.comm.broadcast import Broadcast, make_broadcasts
from kronfac.distributed.comm.buckets import Bucket
from kronfac.distributed.comm.flat import Item, alike
from kronfac.distributed.exchange import dense
from kronfac.distributed.layout import Layout
from kronfac.layers.shards import local
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases
from kronfac.statistics.running import count_dtype


class Ownership:
    """Which rank steps which parameter. Without owners it does nothing."""

    def __init__(self, layout: Layout, phases: Phases, reduces: bool) -> None:
        self.layout = layout
        self.phases = phases
        #: Whether gradients are still each rank's own when a step begins.
        self.reduces = reduces
        self.owners: dict[nn.Parameter, int] = {}
        self._broadcasts: list[Broadcast] | None = None
        self._buckets: list[Bucket] = []
        self._flags: dict[tuple[float, ...], Tensor] = {}

    @property
    def active(self) -> bool:
        """Whether parameters have owners."""
        return bool(self.owners)

    @property
    def separate(self) -> bool:
        """Whether each rank has gradients of its own until the step."""
        return self.active and self.reduces

    def assign(self, states: Sequence[LayerState], groups: Sequence[dict[str, Any]]) -> None:
        """Give each parameter of a layer to the layer's owner, and the others to whoever has least.

        Nothing happens unless the scheme gives parameters owners.
        """
        if not self.layout.owns_parameters:
            return
        self._broadcasts, self._buckets = None, []
        placed: dict[nn.Parameter, int] = {}
        for state in states:
            for parameter in (state.layer.weight, state.layer.bias):
                if parameter is not None:
                    placed.setdefault(parameter, self.layout.owner(state))
        trained = list(dict.fromkeys(p for group in groups for p in group["params"]))
        # The others keep their owners: the base optimizer's state of them is there.
        known = self.owners | placed
        owners = {p: known[p] for p in trained if p in known}
        owners |= self._divide([p for p in trained if p not in owners], owners)
        self.owners = {p: owners[p] for p in trained}

    def _divide(
        self, rest: Sequence[nn.Parameter], owners: Mapping[nn.Parameter, int]
    ) -> dict[nn.Parameter, int]:
        """Give each parameter, the largest first, to the rank that has least."""
        load = [0] * self.layout.world.size
        for parameter, owner in owners.items():
            load[owner] += parameter.numel()
        heap = [(size, rank) for rank, size in enumerate(load)]
        heapq.heapify(heap)
        found = {}
        for parameter in sorted(rest, key=lambda one: -one.numel()):
            size, rank = heapq.heappop(heap)
            found[parameter] = rank
            heapq.heappush(heap, (size + parameter.numel(), rank))
        return found

    def steps(self, parameter: nn.Parameter) -> bool:
        """Whether this rank steps a parameter."""
        return not self.active or self.owners.get(parameter) == self.layout.world.rank

    def own(self) -> list[nn.Parameter]:
        """The parameters that this rank steps."""
        rank = self.layout.world.rank
        return [p for p, owner in self.owners.items() if owner == rank]

    @property
    def message_bytes(self) -> int:
        """Memory for weights, and for gradients if they are added up here, at most."""
        total = sum(p.numel() * p.element_size() for p in self.owners)
        if not self.separate:
            return total
        world = self.layout.world
        collected = sum(p.numel() * p.element_size() for p in self.own()) * world.all.direct
        return 2 * total + (world.size - 1) * collected

    def _items(self) -> list[Item]:
        return [
            Item(str(index), tuple(p.shape), p.dtype, p.device, root=owner)
            for index, (p, owner) in enumerate(self.owners.items())
        ]

    # --- gradients ------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Leave the mean of the ranks' gradients with each parameter's owner."""
        if not self.active or not self.reduces:
            return
        with self.phases("reduce"):
            self._reduce_gradients()

    def _reduce_gradients(self) -> None:
        collectives, size = self.layout.world.all, self.layout.world.size
        parameters = list(self.owners)
        if not self._buckets:
            self._buckets = [Bucket(items, collectives) for items in alike(self._items())]
        for bucket in self._buckets:
            for key in bucket.keys:
                bucket.flat.put(key, dense(parameters[int(key)].grad))
            bucket.launch()
        used = self._count_used(parameters)
        for bucket in self._buckets:
            bucket.wait()
            for key, total in bucket.sums().items():
                parameter = parameters[int(key)]
                if parameter.grad is None and used is not None and used[int(key)] > 0:
                    parameter.grad = torch.zeros_like(parameter)
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = total / size
                elif parameter.grad is not None:
                    parameter.grad.copy_(total / size)

    def _count_used(self, parameters: Sequence[nn.Parameter]) -> list[float] | None:
        """On how many ranks each parameter has a gradient; looked at only if an owner has none."""
        flags = tuple(float(p.grad is not None) for p in parameters)
        if flags not in self._flags:  # to put them on a device makes the host wait
            self._flags = {flags: torch.tensor(flags, device=parameters[0].device)}
        total = self._flags[flags].clone()
        self.layout.world.all.all_reduce("control", total).wait()
        missing = any(p.grad is None for p in self.own())
        return total.tolist() if missing else None

    def add_up(self, value: Tensor) -> Tensor:
        """Add a number over the owners of parameters; without owners all ranks know the whole."""
        if not self.active:
            return value
        device = next(iter(self.owners)).device
        flat = value.to(device, count_dtype(device), copy=True).reshape(1)
        self.layout.world.all.all_reduce("rescale", flat).wait()
        return flat[0]

    # --- the base optimizer's step --------------------------------------------------------------

    @contextmanager
    def only_own(self) -> Iterator[None]:
        """Hide the gradients of parameters that other ranks step."""
        if not self.active:
            yield
            return
        rank = self.layout.world.rank
        hidden = {p: p.grad for p, owner in self.owners.items() if owner != rank}
        for parameter in hidden:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, grad in hidden.items():
                parameter.grad = grad

    def spread_weights(self) -> None:
        """Send each parameter from its owner to all others."""
        if not self.active:
            return
        with self.phases("spread"), torch.no_grad():
            parameters = list(self.owners)
            if self._broadcasts is None:
                collectives = self.layout.world.all
                self._broadcasts = make_broadcasts(self._items(), collectives, "spread", None)
            for broadcast in self._broadcasts:
                if broadcast.mine:
                    for key in broadcast.keys:
                        broadcast.put(key, local(parameters[int(key)].detach()))
                broadcast.launch()
            for broadcast in self._broadcasts:
                broadcast.wait()
                if not broadcast.mine:
                    for key in broadcast.keys:
                        local(parameters[int(key)]).copy_(broadcast.take(key))
