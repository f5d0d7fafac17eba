"""Norms of matrices of which each rank has a slice."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kronfac.distributed.coordinator import Coordinator
from kronfac.layers.slices import Slice
from kronfac.rescale.factors import NORMS, Update
from kronfac.state.layer_state import LayerState
from kronfac.statistics.running import count_dtype
from kronfac.step.batching import Group

#: A layer, or one of its matrices.
Key = TypeVar("Key", LayerState, tuple[LayerState, str])


def whole_squares(
    slices: Mapping[Key, tuple[Slice, Tensor]], coordinator: Coordinator
) -> dict[Key, Tensor]:
    """Squared norms of whole matrices, by the names of their slices.

    All ranks ask for the same ones, in an order that follows from the names, and one small vector
    travels.
    """
    slices = {key: slices[key] for key in sorted(slices, key=_order)}
    if not slices:
        return {}
    device = next(iter(slices.values()))[1].device
    wide = count_dtype(device)
    alike: dict[Hashable, list[Key]] = {}
    for key, (_, matrix) in slices.items():
        alike.setdefault((matrix.device, matrix.dtype), []).append(key)
    here: dict[Key, Tensor] = {}
    for keys in alike.values():
        norms = torch.stack(torch._foreach_norm([slices[key][1] for key in keys]))
        here |= zip(keys, norms.to(device, wide).square_().unbind(), strict=True)
    own = torch.stack([here[key] * piece.weight for key, (piece, _) in slices.items()])
    return dict(zip(slices, coordinator.add_up_slices(own).unbind(), strict=True))


def gradient_squares(
    groups: Sequence[Group], gradients: Sequence[Tensor], coordinator: Coordinator
) -> dict[LayerState, Tensor]:
    """Squared norms of the gradients of which slices are here."""
    slices = {
        state: (state.view.slice, matrix)
        for group, stack in zip(groups, gradients, strict=True)
        for state, matrix in zip(group.states, stack.unbind(), strict=True)
        if state.view.slice is not None
    }
    return whole_squares(slices, coordinator)


def take_norms(
    groups: Sequence[Group], updates: Sequence[Update], coordinator: Coordinator, coherence: bool
) -> dict[LayerState, Tensor]:
    """Give updates of which slices are here the norms of the whole that their rules look at.

    Returns those of momentum buffers, for ``coherence``.
    """
    sliced = [(g, u) for g, u in zip(groups, updates, strict=True) if u.slice is not None]
    slices: dict[tuple[LayerState, str], tuple[Slice, Tensor]] = {}
    for group, update in sliced:
        assert update.slice is not None
        for state, own in zip(group.states, _looked_at(group, update), strict=True):
            if coherence and "momentum" in state.buffers:
                own["momentum"] = state.buffers["momentum"]
            slices |= {(state, name): (update.slice, one) for name, one in own.items()}
    norms = {key: one.sqrt() for key, one in whole_squares(slices, coordinator).items()}
    for group, update in sliced:
        if names := NORMS.get(group.states[0].rule):
            update.norms = {
                name: torch.stack([norms[state, name] for state in group.states]).to(update.after)
                for name in names
            }
    return {state: norm for (state, name), norm in norms.items() if name == "momentum"}


def _order(key: LayerState | tuple[LayerState, str]) -> tuple[str, ...]:
    state, *names = key if isinstance(key, tuple) else (key,)
    return state.name, state.layer.part, *map(str, names)


def _looked_at(group: Group, update: Update) -> list[dict[str, Tensor]]:
    """Of each layer, the slices of matrices of whose norms its rule makes a length."""
    matrices = {"before": update.before, "after": update.after}
    names = NORMS.get(group.states[0].rule, ())
    known = [update.known(matrices[name]).unbind() for name in names]
    return [dict(zip(names, own, strict=True)) for own in zip(*known, strict=True)] or [
        {} for _ in group.states
    ]
