"""The protocol in which methods and the machinery around them meet: the curvature of one layer.

A block is pure mathematics of one layer. It holds shapes and options, never tensors, ranks or modules:
whoever drives it keeps the statistics and solutions and may therefore add, gather, send or save them.
These kinds of statistics cover the family:

- matrices (K-FAC and its relatives): ``combine="sum"``, ``symmetric=True``;
- vectors (rank-one methods): ``combine="sum"``, ``degree=1`` for a mean of output gradients;
- gathered per-sample rows: ``combine="gather"`` with ``keeps = "summed"`` or ``"dense"``;
- gradient only: ``source="gradient"``, seen by :meth:`Block.observe_gradient`;
- moments in the basis that was solved: ``basis=("A.vectors", "G.vectors")``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kronfac.layers.rows import Rows
from kronfac.protocol.context import NOTHING, Context, Given
from kronfac.protocol.statistic import (
    Cadence,
    Cost,
    Part,
    Shape,
    Statistic,
    Tensors,
    bytes_of,
    fits,
)

__all__ = [
    "NOTHING",
    "Block",
    "Cadence",
    "Context",
    "Cost",
    "Given",
    "Part",
    "Shape",
    "Statistic",
    "Tensors",
    "bytes_of",
    "fits",
]


class Block(ABC):
    """The curvature of one layer whose gradient matrix is ``[*b, d_out, d_in]``."""

    #: Human-readable name of the method and its solver, for the summary.
    label: str
    #: What is observed, by name.
    statistics: Mapping[str, Statistic]
    #: Names and shapes of the tensors that :meth:`refresh` returns.
    solution_shapes: Mapping[str, Shape]
    #: Those of them of which a triangle says all.
    symmetric_solutions: frozenset[str] = frozenset()
    #: What of each call is kept until the step: ``"none"``, since it is observed when it happens; each
    #: sample's rows ``"summed"`` over positions and all uses in a pass; or all of its rows, ``"dense"``,
    #: of which patches and one-hot vectors are made only when the block asks for them.
    keeps: Literal["none", "summed", "dense"] = "none"
    #: Which rows may be left out, since statistics are second moments over many of them: none, those of
    #: whole ``"samples"``, or any ``"rows"`` (positions too).
    leaves_out: Literal["nothing", "samples", "rows"] = "nothing"
    #: How wide the widest second moment of rows is, if that is not the wider side of the layer.
    widest: int | None = None
    #: Whether solutions hold the curvature without damping: a change of damping then acts at once,
    #: and :meth:`quadratic` works.
    undamped: bool = False
    #: Whether :meth:`mean_curvature` works, so that damping may be a share of it.
    knows_curvature: bool = False
    #: Whether damping may be a share of the trace as well (``Given.relative == "trace"``): solutions
    #: hold the undamped curvature, or :meth:`solve` heeds it.
    knows_trace: bool = False
    #: Precision of solutions; ``None`` for that of the statistics.
    solution_dtype: torch.dtype | None = None
    #: Tensors of the solution that have the precision of the statistics in any case.
    full_precision: frozenset[str] = frozenset()
    #: Whether :meth:`precondition` may multiply in bfloat16 where that is faster and no error grows;
    #: whoever drives the block sets it.
    narrow: bool = False
    #: The same for second moments of rows, where damping hides what rounding changes.
    narrow_rows: bool = False
    #: Whether steps multiply by what :meth:`prepare` makes of a solution, and not by the solution.
    prepares: bool = False
    #: Whether :meth:`compress` or :meth:`solve` draws random numbers.
    draws: bool = False

    @property
    def holds_rows(self) -> bool:
        """Whether rows are kept until the step, so that both sides of a sample meet."""
        return self.keeps != "none"

    @property
    def seen_through(self) -> frozenset[str]:
        """Tensors of the solution in which rows are observed: every rank that observes holds them."""
        statistics = self.statistics.values()
        return frozenset(name for one in statistics if not one.is_replicated for name in one.basis)

    @property
    def input_key(self) -> Hashable:
        """What decides, beside the rows, what :meth:`observe_input` makes of a call.

        Layers of equal keys that see the same rows have the same input statistics, with the same
        outlines. They are then observed, sent and kept once. ``None`` if that is never so: because rows
        are kept, or the solution is looked at.
        """
        return None

    @property
    def input_moment(self) -> str | None:
        """The statistic that is the second moment of a call's input rows, if nothing else is observed.

        Whoever drives the block may then compute it for several layers at once.
        """
        return None

    def weight(self, name: str, share: float) -> float:
        """The factor that makes a contribution count ``share`` times.

        Gathered rows are weighted so that their second moment has the share: those of inputs by
        themselves, those of outputs together with what they are multiplied by, by their degree.
        """
        statistic = self.statistics[name]
        if statistic.combine != "gather":
            return share
        degree = 1 if statistic.source == "input" else statistic.degree
        return float(share ** (degree / 2))

    # Observing. Contributions of inputs and outputs are tensors of their own, not views of rows, since
    # sums are kept in place.

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """Contributions of a call's input side."""
        return {}

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """Contributions of a call's output side."""
        return {}

    def observe_pair(
        self, inputs: Rows, outputs: Rows, context: Context = NOTHING
    ) -> dict[str, Tensor]:
        """Contributions that need both sides of the same samples (only if rows are kept)."""
        return {}

    def observe_gradient(self, gradient: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        """Contributions of the gradient matrix itself."""
        return {}

    def observe_weight(self, weight: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        """Contributions of the parameters, as a matrix shaped like the gradient's."""
        return {}

    def check_rows(self, rows: Rows, draws: int = 1) -> None:  # noqa: B027 - most can keep any
        """Raise if rows of a call like these, of so many draws, are more than can be kept."""

    def compress(self, given: Given) -> dict[str, Tensor]:
        """Turn a rank's own gathered rows, ``given.means``, into what it sends to the others, by name.

        In one process its rows are all that there are. ``given.rank_generator`` is there if
        :attr:`draws`; ranks have different numbers, and checkpoints resume them.
        """
        return dict(given.means)

    def rebase(self, name: str, value: Tensor, before: Tensors, after: Tensors) -> Tensor | None:
        """Express the sum or mean of a statistic in the basis of another solution, linearly.

        ``None`` forgets it.
        """
        return None

    # Solving.

    def refresh(self, given: Given, parts: Iterable[str] | None = None) -> dict[str, Tensor] | None:
        """Solve some parts, or all, from the means of all their statistics.

        ``None`` means that there is no solution. Means in a basis that has just been solved again are
        expressed in the new one first.
        """
        chosen = self.parts if parts is None else parts
        outlines = given.outlines or self.outlines(given.means)
        solution = dict(given.solved)
        for part in sorted(chosen, key=lambda name: bool(self.parts[name].after)):
            own = {}
            for name in self.parts[part].statistics:
                mean = self._rebased(name, given.means.get(name), given.previous, solution)
                if mean is not None:
                    own[name] = mean
            solved = self.solve(part, replace(given, means=own, outlines=outlines, solved=solution))
            if solved is None:
                return None
            solution |= solved
        return solution

    def _rebased(
        self, name: str, mean: Tensor | None, previous: Tensors | None, solved: Tensors
    ) -> Tensor | None:
        if mean is None or not any(one in solved for one in self.statistics[name].basis):
            return mean
        return None if previous is None else self.rebase(name, mean, previous, solved)

    def outlines(self, means: Tensors) -> dict[str, Tensor]:
        """The outlines of some means, by name."""
        found = {name: self.outline(name, mean) for name, mean in means.items()}
        return {name: outline for name, outline in found.items() if outline is not None}

    def due_parts(self, *cadences: Cadence) -> tuple[str, ...]:
        """The parts that are solved again on some occasions."""
        return tuple(name for name, part in self.parts.items() if part.every in cadences)

    @property
    def shared_parts(self) -> Mapping[str, Part]:
        """The parts that ranks solve for each other; those of every step each solves itself."""
        return {name: part for name, part in self.parts.items() if part.every != "step"}

    @property
    def parts(self) -> Mapping[str, Part]:
        """Parts of the solution that can be solved on their own; one for all of it by default."""
        solution = tuple(self.solution_shapes)
        return {"": Part(tuple(self.statistics), solution, self.cost.refresh_flops)}

    @property
    def outline_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the outlines by name of the statistic; those without an outline are missing."""
        return {}

    def outline(self, name: str, value: Tensor) -> Tensor | None:
        """What other parts need to know of a statistic: a small tensor, linear in it, if any."""
        return None

    @abstractmethod
    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """Solve one part. ``None`` means that no solution could be found.

        Random numbers come from ``given.generator(part)`` if :attr:`draws`; checkpoints resume them.
        """

    def solve_key(self, part: str) -> Hashable:
        """Parts of equal keys have the same solution if they have the same statistics.

        ``None`` if a solution depends on anything else: damping, outlines, what was solved before.
        """
        return None

    def batch_key(self, part: str) -> Hashable:
        """Parts of equal keys, of whichever layers, can be solved together by :meth:`solve_batch`.

        ``None`` if a part is solved alone.
        """
        return None

    def solve_batch(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """Solve a part of several layers, side by side in a leading dimension, or of one without it.

        Nothing is read from the device. A layer whose solution is not finite, and all of them if this
        returns ``None``, are solved again by :meth:`solve`.
        """
        return self.solve(part, given)

    def solve_share(self, part: str, given: Given, index: int, of: int) -> dict[str, Tensor] | None:
        """Summand ``index`` of ``of`` whose sum is what :meth:`solve` finds, up to rounding.

        There is a solution only if no summand is ``None``.
        """
        raise NotImplementedError(f"{self.label!r} cannot divide part {part!r} into summands.")

    def prepare(self, solution: Tensors, damping: float | Tensor) -> dict[str, Tensor]:
        """What :meth:`precondition` takes in place of a solution, if the block :attr:`prepares` it.

        It is made once for a solution and a damping γ, each layer by itself, and never sent or saved.
        """
        raise NotImplementedError(f"{type(self).__name__} takes its solutions as they are")

    @abstractmethod
    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """Apply a solution to a gradient matrix ``[*b, d_out, d_in]``.

        ``damping`` is γ: a number, or a tensor ``[*b, 1, 1]`` if it is relative to the curvature.
        """

    def cuts(self, dim: int) -> frozenset[str] | None:
        """Whether rows (``dim=-2``) or columns (``-1``) of a gradient are preconditioned each alone.

        Then :meth:`precondition` and :meth:`raw_columns` take some of them, with the solution cut
        likewise: these are the tensors that have a number for each, in their last dimension. All parts
        of the solution can be solved for others. ``None`` if a row or column needs the others.
        """
        return None

    @property
    def row_flops(self) -> int | None:
        """Operations of :meth:`precondition_rows` for one row; ``None`` if there is no such form.

        There is one if a solution is linear in the gradient and has its damping in it.
        """
        return None

    def precondition_rows(self, solution: Tensors, outputs: Tensor, inputs: Tensor) -> Tensor:
        """Apply a solution to ``Σ g aᵀ``, given the rows ``g: [R, d_out]`` and ``a: [R, d_in]``."""
        raise NotImplementedError(f"{self.label!r} is not applied to rows.")

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """The mean eigenvalue of the undamped curvature, ``[*b, 1, 1]``, or ones instead of *b."""
        raise NotImplementedError(f"{self.label!r} does not know its mean curvature.")

    def input_square(self, solution: Tensors) -> Tensor | None:
        """The mean square of a layer's inputs, a scalar, if the solution tells."""
        return None

    @property
    def signature(self) -> Hashable:
        """Blocks of equal signatures can be applied together, with a leading dimension for them.

        ``None`` if that is not so.
        """
        return None

    def raw_columns(self, solution: Tensors) -> Tensor | None:
        """Columns ``[d_in]`` of which nothing is known and whose gradient passes as it is, if any."""
        return None

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """The undamped curvature times a matrix ``[*b, d_out, d_in]``."""
        raise NotImplementedError(
            f"{self.label!r} keeps no curvature without damping; use a method and solver that does."
        )

    def quadratic(self, solution: Tensors, step: Tensor) -> Tensor:
        """``vᵀFv`` of the undamped curvature for a step ``v: [*b, d_out, d_in]``, a scalar."""
        return (step * self.multiply(solution, step)).sum()

    @property
    @abstractmethod
    def cost(self) -> Cost:
        """What the block costs."""
