"""Settling which rows each layer's statistics are taken from, alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from kronfac.distributed.coordinator import Coordinator
from kronfac.options.config import LEAST_ROWS, RowsOption
from kronfac.state.layer_state import LayerState
from kronfac.statistics.sampled import Stride

#: ``rows="auto"``: so many for each column of the wider side.
ROWS_PER_COLUMN = 8
#: Rows of one sample are alike: positions are left out before fewer samples than this would be left.
LEAST_SAMPLES = 16
#: The patches of neighbouring positions cost less together than one by one, so that a smaller stride than
#: this over the positions of a convolution would save nothing.
LEAST_STRIDE_OF_PATCHES = 8


class SampledRows:
    """The option ``rows``, and the strides that layers have for it."""

    def __init__(self, option: RowsOption) -> None:
        self.option: RowsOption = option if option in (None, "auto") else int(option)
        #: Whether ranks know that they have the same strides.
        self._agreed = True

    def target(self, state: LayerState) -> int | None:
        """The rows that a layer's statistics are taken from at a factor step; ``None`` for all."""
        if self.option == "auto":
            width = state.block.widest or max(state.layer.matrix_shape[-2:])
            return max(LEAST_ROWS, ROWS_PER_COLUMN * width)
        return self.option

    def fix(self, states: Sequence[LayerState], coordinator: Coordinator) -> None:
        """Fix the strides of layers that have none, from what all ranks have observed at this step.

        A layer that is trained and that no rank has used at its first factor step sees all of its rows
        for good: ranks would have to ask each other at every later step.
        """
        missing = [one for one in states if one.stride is None and one.layer.weight.requires_grad]
        if self.option is None or (self._agreed and not missing):
            return
        seen = [[*_seen(state), float(state in missing)] for state in states]
        numbers = torch.tensor(seen, dtype=torch.float64, device="cpu")
        total = coordinator.total(numbers.flatten()) / coordinator.observers
        found = total.reshape(-1, 4).tolist()
        if not any(rows for rows, *_ in found):
            return  # nothing was observed at all
        self._agreed = True
        for state, (rows, entries, samples, misses) in zip(states, found, strict=True):
            target = self.target(state)
            if misses and target is not None:
                state.stride = fix_stride(
                    target, int(rows), int(entries), int(samples), state.layer.overlaps
                )
        if any(state.stride is not None and state.stride.leaves_out for state in states):
            passes = {one: None for state in states for one in state.pending.whole}
            coordinator.compare_samples(sum(forward_pass.samples for forward_pass in passes))
            self._place(states, coordinator)

    def loaded(self, states: Iterable[LayerState], coordinator: Coordinator) -> None:
        """Forget loaded strides that were fixed for another number of rows."""
        self._agreed = False
        kept = []
        for state in states:
            if state.stride is not None and state.stride.target == self.target(state):
                kept.append(state)
            else:
                state.stride = None
        self._place(kept, coordinator)

    @staticmethod
    def _place(states: Iterable[LayerState], coordinator: Coordinator) -> None:
        """Say which of all samples this rank has: together, ranks choose what one process would."""
        for state in states:
            if state.stride is not None:
                first = coordinator.first_sample(state.stride.total)
                state.stride = replace(state.stride, first=first)

    def describe(self, states: Iterable[LayerState]) -> list[str]:
        """Lines of the summary: what is left out of the rows of which layers."""
        names: dict[tuple[int, int], list[str]] = {}
        for state in states:
            if state.stride is not None and state.stride.leaves_out and may_leave_out(state):
                stride = (state.stride.samples, state.stride.positions)
                names.setdefault(stride, []).append(state.name or "(model)")
        if not names and self.option in (None, "auto"):
            return []
        much = f"{LEAST_ROWS if self.option == 'auto' else self.option:,} rows of a layer"
        further = f"{ROWS_PER_COLUMN} times its width if that is more"
        auto = self.option == "auto"
        lines = [f"Statistics take about {much}{f' ({further})' if auto else ''}."]
        for (samples, positions), found in sorted(names.items()):
            parts = [f"1 of {samples} samples"] if samples > 1 else []
            parts += [f"1 of {positions} positions"] if positions > 1 else []
            lines.append(f"  {', '.join(parts)}: {' '.join(found)}")
        return lines


def fix_stride(target: int, rows: int, entries: int, total: int, overlaps: bool = False) -> Stride:
    """The stride for so many rows of a whole step, over all ranks.

    ``entries`` is the number of samples that they are grouped by, ``total`` that of the whole step;
    ``overlaps`` says that neighbouring positions share their inputs.
    """
    ratio = max(1, min(round(rows / target), rows // LEAST_ROWS))
    samples = min(ratio, max(1, entries // LEAST_SAMPLES))
    positions = ratio // samples
    if overlaps and positions < LEAST_STRIDE_OF_PATCHES:
        positions = 1
    return Stride(target, samples, positions, total)


def may_leave_out(state: LayerState) -> bool:
    """Whether a layer's statistics may be taken from some of its rows."""
    return state.block.leaves_out != "nothing"


def _seen(state: LayerState) -> tuple[float, float, float]:
    """Rows of a layer at this step, what they are grouped by, and samples of the passes that had them."""
    whole = state.input_pending.whole
    rows, entries = (float(sum(one[index] for one in whole.values())) for index in (0, 1))
    return rows, entries, float(sum(forward_pass.samples for forward_pass in whole))
