"""Layers in portions: while one is worked on, the gradients of another are on their way.

Each owner's layers, the last first, are cut into equally many stretches of about the same size; a portion
is one stretch of every owner, so that all of them have something to do. It follows from placement and
shapes alone, and is the same on all ranks and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from kronfac.distributed.layout import Layout
from kronfac.state.layer_state import LayerState

#: How many portions there are at most. Whole gradients exist for about three of them at a time.
MAX_PORTIONS = 16
#: Elements of an owner's gradients that are worth messages of their own.
MIN_ELEMENTS = 2**20


def make_portions(layout: Layout, states: Sequence[LayerState]) -> list[list[LayerState]]:
    """Layers that are worked on one after the other; those worked on by slices come first.

    Layers that share a parameter stay together: each parameter travels once.
    """
    sliced = [state for state in states if layout.slice_of(state) is not None]
    owners: dict[int, list[list[LayerState]]] = {}
    for unit in _tied(state for state in states if layout.slice_of(state) is None):
        owners.setdefault(layout.gradient_root(unit[0]), []).append(unit)
    largest = max((sum(map(_elements, units)) for units in owners.values()), default=0)
    most = max(map(len, owners.values()), default=0)
    count = max(1, min(MAX_PORTIONS, most, largest // MIN_ELEMENTS))
    found: list[list[LayerState]] = [[] for _ in range(count)]
    for owner in sorted(owners):
        units = owners[owner][::-1]
        total, before = sum(map(_elements, units)), 0
        for unit in units:
            middle = before + _elements(unit) / 2
            found[min(count - 1, int(count * middle / total))] += unit
            before += _elements(unit)
    return [some for some in (sliced, *found) if some]


def _tied(states: Iterable[LayerState]) -> list[list[LayerState]]:
    """Layers, those with a common parameter as one."""
    units: list[tuple[set[nn.Parameter], list[LayerState]]] = []
    for state in states:
        own, members, rest = _parameters(state), [], []
        for unit in units:
            if own.isdisjoint(unit[0]):
                rest.append(unit)
            else:
                own |= unit[0]
                members += unit[1]
        units = [*rest, (own, [*members, state])]
    return [members for _, members in units]


def _elements(unit: Sequence[LayerState]) -> int:
    """Elements of the parameters of some layers."""
    return sum(p.numel() for p in {p for state in unit for p in _parameters(state)})


def _parameters(state: LayerState) -> set[nn.Parameter]:
    """Weight and bias, whether the bias trains or not: that may change, and portions do not."""
    return {p for p in (state.layer.weight, state.layer.bias) if p is not None}
