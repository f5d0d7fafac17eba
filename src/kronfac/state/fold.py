"""Folding: what was observed since the last step goes into the running averages."""

from __future__ import annotations

from torch import Tensor

from kronfac.state.layer_state import LayerState
from kronfac.statistics.normalizer import Normalizer


def fold(
    state: LayerState,
    name: str,
    decay: float,
    normalizer: Normalizer | None,
    preview: bool = False,
) -> Tensor | None:
    """Decay a statistic's sum and count, add what is pending, and return the sum.

    ``preview`` changes neither: the result is what the sum will be if nothing more is observed, which is
    how statistics can leave before the step. It shares memory with what is pending if there was no sum.
    """
    running = state.running[name]
    own = running.statistic.decay
    decay = decay if own is None else own
    if preview:
        running = running.faded(decay)
    else:
        running.decay(decay)
    found = state.pending.contribution(name, normalizer, in_place=not preview)
    if found is not None:
        running.add(*found)
    return running.sum
