"""Everything the optimizer keeps for one layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.layers.parameter_view import ParameterView
from kronfac.options.config import Rule, ShareOf
from kronfac.protocol.block import Given, bytes_of
from kronfac.protocol.context import number_of
from kronfac.protocol.method import Method
from kronfac.protocol.statistic import Tensors
from kronfac.protocol.transform import Transform
from kronfac.state.input_group import InputGroup
from kronfac.state.row_choice import BUFFER, RowChoice
from kronfac.state.shares import share_of
from kronfac.statistics.pending import Pending
from kronfac.statistics.running import Running
from kronfac.statistics.sampled import Stride

_OUTLAST_STATISTICS = (
    "solution",
    "solved_at",
    "last_refresh",
    "failures",
    "failures_in_a_row",
    "buffers",
)

#: Names under which the engine saves things of its own.
_RESERVED = {
    *("step", "partial", "last_factor", "random", "damping", "interval", "update"),
    *("schedule", "dropped", "compared", "broadcast", "seeds"),
    *("looks", "stride", "group", "row_form"),
}


class LayerState:
    """A layer, its block, and the tensors that the block works on."""

    def __init__(
        self,
        layer: Layer,
        method: Method,
        transforms: Sequence[Transform] = (),
        narrow: bool = False,
    ) -> None:
        self.layer = layer
        self.method = method
        self.view = ParameterView(layer)
        self.transforms = transforms
        #: Whether its products may be in bfloat16, and those of its rows.
        self.narrow = narrow
        self._narrow_rows = False
        #: Whether rows could not be told apart by sample although the method wanted it.
        self.fell_back = False
        self.note = ""
        self.offset = 0
        #: Whether this rank observes the layer, holds its solution, and keeps what is prepared of that.
        self.observed = self.is_worker = self.keeps_prepared = True
        #: Whether statistics are compared with those of earlier refreshes, which are then kept.
        self.compares = False
        #: Whether some of its inputs stand for all samples of a forward, as all ranks have agreed, how
        #: many numbers the gradients of their rows are, and whether an embedding's tokens are positions.
        self.broadcast = False
        self.broadcast_size = 0
        self.embeds_positions: bool | None = None
        #: Which rows its statistics are taken from; ``None`` until that is settled.
        self.stride: Stride | None = None
        #: Layers that see the same input, if others do, and whether that has been settled.
        self.group: InputGroup | None = None
        self.group_settled = False
        #: Whether it is preconditioned from its rows, if it may be.
        self.row_form: RowChoice | None = None
        self._rule: Rule = "solved"
        #: Names of the statistics that this rank keeps; ``None`` for all of them.
        self.kept: frozenset[str] | None = None
        self.reset()

    @property
    def rule(self) -> Rule:
        """How its step gets its length."""
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self._rule = rule
        self._allow_rounding()

    @property
    def narrow_rows(self) -> bool:
        """Whether second moments of its rows may be in bfloat16."""
        return self._narrow_rows

    @narrow_rows.setter
    def narrow_rows(self, allowed: bool) -> None:
        self._narrow_rows = self.narrow and allowed
        self._allow_rounding()

    def _allow_rounding(self) -> None:
        """Round preconditioned steps if nothing follows that would amplify it.

        Orthogonal steps make what rounding puts where singular values were zero 50 times as large.
        """
        self.block.narrow = self.narrow and self._rule != "orthogonal"
        self.block.narrow_rows = self._narrow_rows

    def reset(self) -> None:
        """Start again with the layer's present shape: no statistics, no solution."""
        if self.group is not None:
            self.group.dissolve()
        self.layer.renew()
        self.block = self.method.block(self.layer, grouped=not self.fell_back)
        self._allow_rounding()
        self.running = {name: Running(one) for name, one in self.block.statistics.items()}
        self.pending = Pending(self.block)
        self.solution: dict[str, Tensor] | None = None if self.has_curvature else {}
        #: The solution that a mean curvature was computed for, and that; the same for a damping.
        self._curvature: tuple[dict[str, Tensor], Tensor] | None = None
        self._damping: tuple[Tensor, float, Tensor] | None = None
        #: The solution and the damping that something was prepared for, and that.
        self._prepared: tuple[dict[str, Tensor], float | Tensor, dict[str, Tensor]] | None = None
        self.solved_at: int | None = None if self.has_curvature else 0
        self.last_refresh: int | None = None
        self.has_new_statistics = False
        self.failures = 0
        self.failures_in_a_row = 0
        #: What the rules that change gradients keep, by name.
        self.buffers: dict[str, Tensor] = {}
        if self.row_form is not None:
            self.row_form.solved_at = None
        self.forget_history()

    def forget_history(self) -> None:
        """Keep no statistics of earlier refreshes: those of the last two, the newest first."""
        self.history: dict[str, tuple[Tensor, Tensor]] = {}
        self.compared = 0

    @property
    def name(self) -> str:
        """Full name of the layer's module."""
        return self.layer.name

    @property
    def number(self) -> int:
        """A number by which its random numbers differ from those of other layers, on every rank."""
        return number_of(f"{self.name}{self.layer.part}")

    @property
    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of :attr:`buffers` once they exist."""
        shapes: dict[str, tuple[int, ...]] = {}
        for transform in self.transforms:
            shapes |= transform.buffer_shapes(self.layer)
        if self.row_form is not None and self.row_form.keeps_buffer:
            shapes[BUFFER] = self.layer.matrix_shape
        taken = sorted(_RESERVED & set(shapes))
        if taken:
            raise ValueError(f"a buffer may not be called {taken[0]!r}, a name that is taken.")
        return shapes

    @property
    def shapes_here(self) -> dict[str, tuple[int, ...]]:
        """The same of what is here of them."""
        return {name: self.view.shape_here(one) for name, one in self.buffer_shapes.items()}

    def lender(self, name: str) -> LayerState:
        """The layer that a statistic, or a tensor of the solution, is computed for: this one, mostly."""
        group = self.group
        shared = group is not None and (name in group.statistics or name in group.solutions)
        return group.leader if group is not None and shared else self

    @property
    def input_pending(self) -> Pending:
        """Where its inputs are observed."""
        shared = self.group is not None and not self.group.parted
        return self.group.leader.pending if self.group is not None and shared else self.pending

    def watches(self, side: str) -> bool:
        """Whether the rows of a side are observed: ``"input"`` or ``"output"``."""
        statistics = self.block.statistics.values()
        return self.block.holds_rows or any(one.source == side for one in statistics)

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient to work on at this step."""
        return self.view.has_gradient

    @property
    def has_curvature(self) -> bool:
        """Whether there is anything to solve, and not only a length to choose."""
        return bool(self.block.parts)

    @property
    def is_preconditioned(self) -> bool:
        """Whether some rank has a solution for it, and the weight is trained."""
        return self.solved_at is not None and self.layer.weight.requires_grad

    def forget_solution(self) -> None:
        """Let it be solved again at the next step, from the statistics that there are."""
        self._curvature = None
        self.solution = self.solved_at = self.last_refresh = None
        self.has_new_statistics = True

    def renew_if_stale(self) -> None:
        """Start again if the layer has another shape now, since its bias was frozen or unfrozen."""
        if self.layer.stale():
            self.reset()

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the solution's tensors that this rank holds.

        All of them where it works on the layer, elsewhere those in which it observes rows.
        """
        names = self.block.solution_shapes
        if self.is_worker:
            return tuple(names)
        seen = self.block.seen_through if self.observed else ()
        return tuple(name for name in names if name in seen)

    @property
    def solution_in_use(self) -> dict[str, Tensor] | None:
        """The solution, ``None`` before the first: loaders may have made tensors without a meaning."""
        return self.solution if self.solved_at is not None else None

    def cut(self, solution: Tensors) -> Tensors:
        """What of a solution belongs to the part of the matrix that is here."""
        piece = self.view.slice
        if piece is None:
            return solution
        names = self.block.cuts(piece.dim) or ()
        return {n: piece.entries(one) if n in names else one for n, one in solution.items()}

    def dtype_of(self, name: str) -> torch.dtype:
        """Precision of a tensor of the solution."""
        narrow = None if name in self.block.full_precision else self.block.solution_dtype
        return narrow or self.layer.factor_dtype

    def news(self, parts: Iterable[str]) -> list[str]:
        """Of some parts, those that there is something new for, or that follow the clock alone."""
        chosen = []
        for part in parts:
            described = self.block.parts[part]
            waits = described.every == "factor" and self.solved_at is not None
            if not waits or any(self._is_fresh(name) for name in described.statistics):
                chosen.append(part)
        return chosen

    def _is_fresh(self, name: str) -> bool:
        """Whether something new was observed; what is compressed is as new as the rows it is made of."""
        if self.running[name].statistic.source != "compressed":
            return self.running[name].fresh
        return any(one.fresh for one in self.running.values() if one.statistic.combine == "gather")

    def names_of(self, parts: Iterable[str]) -> list[str]:
        """The statistics that some parts are solved from, and those whose outlines they need."""
        described = self.block.parts
        wanted = {name for part in parts for name in described[part].statistics}
        wanted |= set(self.block.outline_shapes)
        return [name for name in self.running if name in wanted]

    def own_rows(self) -> dict[str, Tensor]:
        """This rank's rows of gathered statistics, by name; empty where it has none."""
        rows = {}
        for name, running in self.running.items():
            statistic = running.statistic
            if statistic.combine == "gather":
                shape = [*statistic.shape[:-1], 0, statistic.shape[-1]]
                dtype, device = self.layer.factor_dtype, self.layer.weight.device
                empty = torch.zeros(shape, dtype=dtype, device=device)
                rows[name] = empty if running.sum is None else running.sum
        return rows

    def compressed_rows(self, given: Given) -> dict[str, Tensor]:
        """What the block makes of them before they are sent."""
        rows = self.own_rows()
        held = {name: value for name, value in rows.items() if value.shape[-2]}
        return rows | (self.block.compress(replace(given, means=held)) if held else {})

    def counts_of(self, names: Iterable[str]) -> dict[str, Tensor]:
        """What the means of some statistics that are here are divided by; it stays on the device."""
        counts = {name: self.running[name].count for name in names}
        return {name: count for name, count in counts.items() if count is not None}

    def row_counts(self, counts: Mapping[str, float]) -> dict[str, float]:
        """N of the gathered rows that are here, among the counts of statistics by name."""
        gathered = (n for n, one in self.running.items() if one.statistic.combine == "gather")
        return {name: counts[name] for name in gathered if name in counts}

    def use(self, solved: Mapping[str, Tensor]) -> None:
        """Take newly solved parts into use, and express statistics in the basis that they make."""
        before = self.solution_in_use
        after = {**(before or {}), **solved}
        for name, running in self.running.items():
            if running.sum is None or not any(one in solved for one in running.statistic.basis):
                continue
            total = None if before is None else self.block.rebase(name, running.sum, before, after)
            if total is None:
                running.forget()
            else:
                running.sum = total
        held = self.held
        self._curvature = self._prepared = None  # they would keep the old solution
        self.solution = {name: after[name] for name in held if name in after} if held else None

    def move_solution(self, solution: dict[str, Tensor]) -> None:
        """Hold the same solution in other memory."""
        if self._curvature is not None and self._curvature[0] is self.solution:
            self._curvature = (solution, self._curvature[1])
        self.solution = solution

    def applied(self, damping: float | Tensor) -> dict[str, Tensor]:
        """What a step multiplies by: the solution, or what the block prepares of it for this damping."""
        assert self.solution is not None
        if not (self.block.prepares and self.keeps_prepared):
            return self.solution
        known = self._prepared
        if known is None or known[0] is not self.solution or not _same(known[1], damping):
            made = self.block.prepare(self.solution, damping)
            known = self._prepared = (self.solution, damping, made)
        return known[2]

    def forget_prepared(self) -> None:
        """Let what was prepared be made again when it is needed."""
        self._prepared = None

    def move_applied(self, tensors: dict[str, Tensor]) -> None:
        """Hold what :meth:`applied` returned in other memory."""
        if self._prepared is None:
            self.move_solution(tensors)
        else:
            self._prepared = (*self._prepared[:2], tensors)

    def damping(self, value: float, relative: ShareOf | None) -> float | Tensor:
        """The damping γ of this layer, given it or its share of the curvature."""
        if relative is None or self.solution is None:
            return value
        if relative == "trace":  # of one block, as the mean is that of one
            value *= math.prod(self.layer.matrix_shape[-2:])
        if self._curvature is None or self._curvature[0] is not self.solution:
            self._curvature = (self.solution, self.block.mean_curvature(self.solution))
        mean, known = self._curvature[1], self._damping
        if known is None or known[0] is not mean or known[1] != value:
            share = share_of(mean, value, self.rule, self.buffers)
            known = self._damping = (mean, value, share)
        return known[2]

    def keeps(self, name: str) -> bool:
        """Whether this rank keeps a statistic between refreshes."""
        return self.kept is None or name in self.kept

    def fall_back_to_expand(self) -> None:
        """Give up per-sample rows for a layer whose rows do not group by sample."""
        self.fell_back = True
        self.note = "expand: rows not grouped by sample"
        # Statistics are of another kind now; a solution still serves, and other ranks count on it.
        kept = {name: getattr(self, name) for name in _OUTLAST_STATISTICS}
        before = self.block.solution_shapes
        self.reset()
        for name, value in kept.items():
            setattr(self, name, value)
        if before != self.block.solution_shapes:
            self.forget_solution()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the statistics that this rank keeps, once they exist; of rows, those that are here."""
        dtype, rows = self.layer.factor_dtype, 0
        own = [name for name in self.running if self.lender(name) is self]
        kept = [self.running[name] for name in own if self.keeps(name)]
        sums = [one.statistic.shape for one in kept if one.statistic.combine == "sum"]
        for one in self.running.values():  # they stay where they were observed
            if one.statistic.combine == "gather" and one.sum is not None:
                rows += one.sum.numel() * dtype.itemsize
        return bytes_of(sums, dtype) * (3 if self.compares else 1) + rows

    @property
    def observed_bytes(self) -> int:
        """Bytes of what it observes itself at a factor step."""
        lent = [n for n in self.block.statistics if self.lender(n) is not self]
        shapes = [self.block.statistics[name].shape for name in lent]
        return self.block.cost.statistics_bytes - bytes_of(shapes, self.layer.factor_dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of each gathered statistic."""
        if not self.observed:
            return 0
        known = self.block.statistics.values()
        own = (one for one in known if one.combine == "gather" and one.source != "compressed")
        return bytes_of([one.shape for one in own], self.layer.factor_dtype)

    @property
    def held_bytes(self) -> int:
        """Bytes of the statistics, solution and buffers that this rank keeps, once they exist."""
        known, shapes = self.solution or {}, dict(self.block.solution_shapes)
        if any(None in shapes[name] for name in self.held):
            shapes = {name: tuple(known[name].shape) for name in self.held if name in known}
        held = [name for name in self.held if name in shapes and not self._borrows(name)]
        solution = sum(bytes_of([shapes[name]], self.dtype_of(name)) for name in held)
        buffers = self.shapes_here.values() if self.is_worker else ()
        return self.kept_bytes + solution + bytes_of(buffers, self.layer.factor_dtype)

    def _borrows(self, name: str) -> bool:
        """Whether a tensor of the solution is that of another layer."""
        theirs, own = self.lender(name).solution, self.solution
        if theirs is own or theirs is None or own is None or name not in theirs or name not in own:
            return False
        return theirs[name].data_ptr() == own[name].data_ptr()

    def allocate(self) -> None:
        """Make every tensor at its final shape without giving it a meaning."""
        weight = self.layer.weight
        dtype, device = self.layer.factor_dtype, weight.device
        for name, running in self.running.items():
            if self.keeps(name):
                running.allocate(dtype, device)
                if self.compares and running.sum is not None and name not in self.history:
                    empty = torch.zeros_like(running.sum)
                    self.history[name] = (empty, empty.clone())
        if self.solution is None and self.held:
            shapes = self.block.solution_shapes
            self.solution = {
                name: torch.zeros(
                    [n or 0 for n in shapes[name]], dtype=self.dtype_of(name), device=device
                )
                for name in self.held
            }
        if self.has_curvature:
            self.pending.count_dropped(device)
        for name, shape in self.shapes_here.items() if self.is_worker else ():
            if name not in self.buffers:
                self.buffers[name] = torch.zeros(shape, dtype=dtype, device=device)


#: Layers that are solved at a step, and the parts of each.
Due = Mapping[LayerState, Sequence[str]]


def _same(one: float | Tensor, other: float | Tensor) -> bool:
    """Whether a damping is the same number, or the same tensor."""
    return one is other if isinstance(one, Tensor) or isinstance(other, Tensor) else one == other
