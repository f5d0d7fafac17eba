"""The inverses of both factors of one layer, updated by one vector a side at a time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.layers.rows import Rows
from kronfac.methods.mkor.updates import Update, scaled_identity, stabilized, take_in
from kronfac.protocol.block import (
    NOTHING,
    Block,
    Context,
    Cost,
    Given,
    Part,
    Statistic,
    Tensors,
    bytes_of,
)

#: Weight of the old rate of decrease in its average, and how many updates it takes to act on it.
RATE_MEMORY, PATIENCE = 0.9, 10
#: Statistics of the sides, by the name of what is solved from them.
_VECTORS = {"A": "a", "G": "g"}
#: What is kept to see how fast the loss falls.
_WATCHED = ("weight", "gradient", "rate")


@dataclass(frozen=True)
class Rule:
    """How inverses are updated, kept within bounds and given up; see :class:`MKORMethod`."""

    update: Update
    memory: float
    threshold: float
    keep: float
    switch_below: float | None


class MKORBlock(Block):
    """``P = J_G V J_A``.

    A side that is wider than ``max_dim``, or whose rows are one-hot (an embedding's inputs), keeps the
    diagonal of its factor only.
    """

    label = "rank-one updates"

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rule: Rule,
        max_dim: int,
        half: bool,
        picks_columns: bool = False,
    ) -> None:
        *batch, d_out, d_in = shape
        self.shape = shape
        self.dtype = dtype
        self.rule = rule
        self.picks_columns = picks_columns
        self.solution_dtype = torch.bfloat16 if half else None
        self.widths = {"A": d_in, "G": d_out}
        self.dense = {"A": d_in <= max_dim and not picks_columns, "G": d_out <= max_dim}
        diagonal = [f", {side} diag" for side, dense in self.dense.items() if not dense]
        self.label += "".join(diagonal) + (", 16 bits" if half else "")
        self.statistics = {
            "a": Statistic((*batch, d_in), "input", decay=0.0, occurrences=picks_columns),
            "g": Statistic((*batch, d_out), "output", degree=1, decay=0.0),
        }
        self.solution_shapes = {
            side: (*batch, width, width) if self.dense[side] else (*batch, width)
            for side, width in self.widths.items()
        }
        if rule.switch_below is not None:
            self.statistics["weight"] = Statistic(shape, "weight", decay=0.0)
            self.statistics["gradient"] = Statistic(shape, "gradient", decay=0.0)
            self.solution_shapes |= {"weight": shape, "gradient": shape, "rate": (4,)}
            self.full_precision = frozenset(_WATCHED)
        self._parts = self._make_parts()

    def _make_parts(self) -> dict[str, Part]:
        """Each rank updates its own inverses, so that vectors are all that travels."""
        parts = {}
        hybrid = self.rule.switch_below is not None
        for side, vector in _VECTORS.items():
            flops = 6 * self.widths[side] * math.prod(self.statistics[vector].shape)
            first = ("rate",) if hybrid else ()
            parts[side] = Part((vector,), (side,), flops, every="factor", after=first, by_each=True)
        if hybrid:
            flops = 5 * math.prod(self.shape)
            parts["rate"] = Part(_WATCHED[:2], _WATCHED, flops, every="factor", by_each=True)
        return parts

    @property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`."""
        return self._parts

    # --- observing ------------------------------------------------------------------------------

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_input`."""
        return {"a": inputs.total()}

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_output`."""
        return {"g": outputs.total()}

    def observe_gradient(self, gradient: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_gradient`."""
        return {"gradient": gradient}

    def observe_weight(self, weight: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_weight`."""
        return {"weight": weight}

    # --- solving --------------------------------------------------------------------------------

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        """See :meth:`Block.solve`."""
        if part == "rate":
            return self._watch(given)
        inverse = self._update(part, given)
        return {part: inverse if self.solution_dtype is None else inverse.to(self.solution_dtype)}

    def _update(self, side: str, given: Given) -> Tensor:
        rule, dense = self.rule, self.dense[side]
        start = given.damping**-0.5
        vector = given.means[_VECTORS[side]]
        if not dense and not (side == "A" and self.picks_columns):
            vector = vector.square()
        before = identity = scaled_identity(vector, start, dense)
        if given.previous is not None:
            before = given.previous[side].to(vector.dtype)
            before = stabilized(
                before, start, threshold=rule.threshold, keep=rule.keep, dense=dense
            )
        after = take_in(before, vector, start, update=rule.update, memory=rule.memory, dense=dense)
        if rule.switch_below is None:
            return after
        return torch.where(given.latest("rate")[3] > 0, identity, after)

    def _watch(self, given: Given) -> dict[str, Tensor]:
        """How fast the loss falls: an average, its weight, its best, and whether that is long past.

        From one update to the next by the trapezoidal rule, ``½⟨V + V', W' - W⟩``, which is exact for a
        quadratic loss.
        """
        weight, slope, previous = given.means["weight"], given.means["gradient"], given.previous
        if previous is None:
            return {"weight": weight, "gradient": slope, "rate": weight.new_zeros(4)}
        fallen = ((slope + previous["gradient"]) * (previous["weight"] - weight)).sum() / 2
        total, count, best, over = previous["rate"].unbind()
        total = RATE_MEMORY * total + (1 - RATE_MEMORY) * fallen
        count = RATE_MEMORY * count + (1 - RATE_MEMORY)
        rate = total / count
        best = torch.maximum(best, rate)
        assert self.rule.switch_below is not None
        believed = count > 1 - RATE_MEMORY ** (PATIENCE - 0.5)
        over = torch.where(believed & (rate < self.rule.switch_below * best), 1, over)
        rates = torch.stack([total, count, best, over])
        return {"weight": weight, "gradient": slope, "rate": rates}

    # --- applying -------------------------------------------------------------------------------

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`."""
        left, right = (solution[side].to(gradient.dtype) for side in ("G", "A"))
        result = left @ gradient if self.dense["G"] else left[..., None] * gradient
        return result @ right if self.dense["A"] else result * right[..., None, :]

    @property
    def signature(self) -> Hashable:
        """See :attr:`Block.signature`."""
        hybrid = self.rule.switch_below is not None
        return MKORBlock, self.shape, self.dtype, self.label, hybrid

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`."""
        sides = [width for side, width in self.widths.items() if self.dense[side]]
        kept = bytes_of((one.shape for one in self.statistics.values()), self.dtype)
        shapes = self.solution_shapes
        solution = bytes_of((shapes[one] for one in _VECTORS), self.solution_dtype or self.dtype)
        solution += bytes_of((shapes[one] for one in self.full_precision), self.dtype)
        return Cost(
            refresh_flops=sum(part.flops for part in self._parts.values()),
            precondition_flops=2 * math.prod(self.shape) * sum(sides),
            statistics_bytes=kept,
            solution_bytes=solution,
        )
