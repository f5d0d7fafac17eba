"""K-FAC: the Fisher block of a layer is ``G ⊗ A`` (Martens & Grosse 2015, Grosse & Martens 2016).

``A`` is the second moment of the layer's input rows and ``G`` that of its output gradients. A side is
kept *dense*, as its *diagonal* when it is wider than ``max_dim``, or not at all (the *identity*).
The rows of an embedding are one-hot, so that its ``A`` is diagonal; tokens that the statistics have
not seen pass their raw gradient, since ``1/γ`` would multiply it a thousandfold.

Eigen form, with ``A = Q_A v_A Q_Aᵀ`` and ``G = Q_G v_G Q_Gᵀ``:
    ``P = Q_G [(Q_Gᵀ V Q_A) / (v_G v_Aᵀ + γ)] Q_Aᵀ``, which is ``(G ⊗ A + γI)⁻¹ vec(V)``.
Inverse form (Cholesky, Newton-Schulz), with ``π² = (tr A/d_A)/(tr G/d_G)``:
    ``P = (G + √γ/π)⁻¹ V (A + π√γ)⁻¹``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kronfac.layers.rows import Rows
from kronfac.linalg.narrow import matmul
from kronfac.linalg.precision import full_precision
from kronfac.linalg.solve import (
    cholesky_inverse,
    cholesky_inverse_batch,
    cholesky_inverse_share,
    eigen,
    eigen_batch,
    newton_schulz_inverse,
)
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

Form = Literal["dense", "diagonal", "identity"]
Solver = Literal["eigen", "cholesky", "newton-schulz", "thermodynamic"]

#: Solvers whose solution is one matrix, or one diagonal, for each side.
_ONE_MATRIX = ("cholesky", "newton-schulz")

#: Widest side that ``solver="auto"`` decomposes; beyond it Cholesky is about four times cheaper.
EIGEN_MAX_WIDTH = 2048


def choose_solver(width: int) -> Solver:
    """Resolve ``solver="auto"`` from the widest dense side of a layer."""
    return "eigen" if width <= EIGEN_MAX_WIDTH else "cholesky"


class KFACBlock(Block):
    """The Kronecker-factored curvature of one layer."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        solver: Literal["auto"] | Solver,
        max_dim: int,
        output_factor: bool,
        per_sample: bool,
        picks_columns: bool = False,
        power: float = 1.0,
        cut: frozenset[str] = frozenset(),
    ) -> None:
        *batch, d_out, d_in = shape
        self.shape = shape
        self.dtype = dtype
        self.power = power
        self.keeps = "summed" if per_sample else "none"
        if not picks_columns:
            self.leaves_out = "samples" if per_sample else "rows"
        self.picks_columns = picks_columns
        dense_input = (d_in <= max_dim or "A" in cut) and not picks_columns
        self.forms: dict[str, Form] = {"A": "dense" if dense_input else "diagonal"}
        self.forms["G"] = "dense" if d_out <= max_dim or "G" in cut else "diagonal"
        if not output_factor:
            self.forms["G"] = "identity"
        self.widths = {"A": d_in, "G": d_out}
        dense = [self.widths[side] for side, form in self.forms.items() if form == "dense"]
        self.solver: Solver = choose_solver(max(dense, default=1)) if solver == "auto" else solver
        self.undamped = self.solver == "eigen"
        self.knows_curvature = True
        self.knows_trace = output_factor  # the trace of G = I says nothing of its eigenvalues
        marks = {"diagonal": " diag", "identity": " = I"}
        forms = [f"{side}{marks[form]}" for side, form in self.forms.items() if form in marks]
        self.label = ", ".join([self.solver, *forms])
        self.statistics = {}
        self.solution_shapes = {}
        for side, form in self.forms.items():
            if form == "identity":
                continue
            vector = (*batch, self.widths[side])
            matrix = (*vector, self.widths[side])
            self.statistics[side] = Statistic(
                shape=matrix if form == "dense" else vector,
                source="input" if side == "A" else "output",
                degree=0 if side == "A" else 2,
                symmetric=form == "dense",
                occurrences=side == "A" and picks_columns,
            )
            if self.solver == "eigen":
                self.solution_shapes[f"{side}.values"] = vector
                if form == "dense":
                    self.solution_shapes[f"{side}.vectors"] = matrix
            else:
                self.solution_shapes[f"{side}.inverse"] = matrix if form == "dense" else vector
        self.symmetric_solutions = frozenset(
            f"{side}.inverse" for side, form in self.forms.items() if form == "dense"
        )

    # --- observing ------------------------------------------------------------------------------

    @property
    def input_key(self) -> Hashable:
        """See :attr:`Block.input_key`: the second moment of the rows, or its diagonal."""
        if self.holds_rows or type(self).observe_input is not KFACBlock.observe_input:
            return None
        return KFACBlock, self.statistics["A"], self.dtype, self.solver == "eigen"

    @property
    def input_moment(self) -> str | None:
        """See :attr:`Block.input_moment`."""
        return "A" if self.input_key is not None and self.forms["A"] == "dense" else None

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_input`."""
        if self.forms["A"] != "dense":
            return {"A": inputs.squares()}
        return {"A": inputs.covariance(self.narrow_rows)}

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_output`."""
        if self.forms["G"] == "identity":
            return {}
        if self.forms["G"] != "dense":
            return {"G": outputs.squares()}
        return {"G": outputs.covariance(self.narrow_rows)}

    # --- solving --------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`: one for each side that is kept."""
        parts = {}
        for side, form in self.forms.items():
            if form == "identity":
                continue
            dense = form == "dense"
            divisible = dense and self.solver == "cholesky"
            parts[side] = Part(
                statistics=(side,),
                solution=tuple(name for name in self.solution_shapes if name[0] == side),
                flops=self._cubes(side) if dense else math.prod(self.statistics[side].shape),
                # A Cholesky factor takes a third of the operations of the inverse.
                shared_flops=self._cubes(side) // 3 if divisible else None,
            )
        return parts

    @property
    def outline_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See :attr:`Block.outline_shapes`."""
        return {} if self.solver == "eigen" else dict.fromkeys(self.statistics, self.shape[:-2])

    def outline(self, name: str, value: Tensor) -> Tensor | None:
        """See :meth:`Block.outline`: the mean eigenvalue ``[*b]``, by which damping is split."""
        if self.solver == "eigen":
            return None
        dense = self.forms[name] == "dense"
        return (value.diagonal(dim1=-2, dim2=-1) if dense else value).mean(-1)

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`."""
        if self.solver == "eigen":
            return self._decompose(part, given.means[part])
        return self._invert(part, given)

    def solve_key(self, part: str) -> Hashable:
        """See :meth:`Block.solve_key`; an eigendecomposition knows nothing of the other side."""
        if self.solver != "eigen" or part not in self.forms:
            return None
        return "eigen", part, self.forms[part], self.statistics[part].shape, self.dtype

    def batch_key(self, part: str) -> Hashable:
        """See :meth:`Block.batch_key`."""
        if type(self) is not KFACBlock or self.solver == "newton-schulz":
            return None  # others may solve in another way
        return self.solve_key(part) or (self.signature, part)

    def solve_batch(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve_batch`."""
        if self.solver != "eigen":
            return self._invert(part, replace(given, unchecked=True))
        if self.forms[part] == "diagonal":
            return self._decompose(part, given.means[part])
        solved = eigen_batch(given.means[part])
        return solved and {f"{part}.vectors": solved[0], f"{part}.values": solved[1]}

    def solve_share(self, part: str, given: Given, index: int, of: int) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve_share`."""
        if self.parts[part].shared_flops is None:
            return super().solve_share(part, given, index, of)
        return self._invert(part, given, (index, of))

    def _decompose(self, side: str, mean: Tensor) -> dict[str, Tensor] | None:
        if self.forms[side] == "diagonal":
            return {f"{side}.values": mean.clamp(min=0)}
        solved = eigen(mean)
        if solved is None:
            return None
        return {f"{side}.vectors": solved[0], f"{side}.values": solved[1]}

    def _invert(
        self, side: str, given: Given, share: tuple[int, int] | None = None
    ) -> dict[str, Tensor] | None:
        shifts, usable = self._split_damping(given)
        inverse = self._damped_inverse(side, given, shifts[side], share)
        if inverse is None:
            return None
        if self.forms["G"] == "identity":
            scale = (1 / (1 + shifts["G"]))[..., None]
            inverse = inverse * (scale[..., None] if self.forms["A"] == "dense" else scale)
        if given.relative:  # without any curvature the gradient stays as it is
            inverse = self._or_identity(side, inverse, usable, share)
        return {f"{side}.inverse": inverse}

    def _damped_inverse(
        self, side: str, given: Given, shift: Tensor, share: tuple[int, int] | None
    ) -> Tensor | None:
        mean = given.means[side]
        if self.forms[side] == "diagonal":
            inverse = 1 / (mean + shift[..., None])
            if side == "A" and self.picks_columns:
                inverse = inverse.masked_fill(mean == 0, 0)  # marks what was never seen
            return inverse
        identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        damped = mean + identity * shift[..., None, None]
        if share is not None:
            return cholesky_inverse_share(damped, *share)
        return self._inverse(side, damped, shift, given)

    def _inverse(self, side: str, damped: Tensor, floor: Tensor, given: Given) -> Tensor | None:
        """The inverse of a dense side, no eigenvalue of which is below ``floor``."""
        if self.solver == "cholesky":
            return cholesky_inverse_batch(damped) if given.unchecked else cholesky_inverse(damped)
        return newton_schulz_inverse(damped, floor)

    def _or_identity(
        self, side: str, inverse: Tensor, usable: Tensor, share: tuple[int, int] | None
    ) -> Tensor:
        """The identity in place of an inverse that is not usable; one of several summands has it."""
        dense = self.forms[side] == "dense"
        identity = torch.ones_like(inverse)
        if dense:
            size = inverse.shape[-1]
            identity = torch.eye(size, dtype=inverse.dtype, device=inverse.device)
        if share is not None and share[0] > 0:
            identity = torch.zeros_like(identity)
        return torch.where(
            usable[..., None, None] if dense else usable[..., None], inverse, identity
        )

    def _split_damping(self, given: Given) -> tuple[dict[str, Tensor], Tensor]:
        """``π√γ`` for A and ``√γ/π`` for G, ``[*b]`` each, and whether there is curvature.

        ``√γ`` for both when a trace is zero. Relative damping makes that ``√ρ`` times each mean or trace.
        """
        outlines, damping = given.outlines, given.damping
        average_in = outlines["A"]
        if self.picks_columns:  # each row is one token, however rare tokens are counted
            average_in = torch.full_like(average_in, 1 / self.widths["A"])
        average_out = outlines.get("G", torch.ones_like(average_in))
        ratio = average_in / average_out
        usable = (average_in > 0) & (average_out > 0) & torch.isfinite(ratio) & (ratio > 0)
        pi = torch.where(usable, ratio, torch.ones_like(ratio)).sqrt()
        root = math.sqrt(damping)
        if given.relative:
            one = torch.ones_like(ratio)
            means = {"A": average_in, "G": average_out}
            if given.relative == "trace":
                means = {side: mean * self.widths[side] for side, mean in means.items()}
            return {side: torch.where(usable, root * m, one) for side, m in means.items()}, usable
        return {"A": pi * root, "G": root / pi}, usable

    # --- applying -------------------------------------------------------------------------------

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`."""
        result = self._apply(solution, gradient, damping)
        raw = self.raw_columns(solution)
        return result if raw is None else torch.where(raw[..., None, :], gradient, result)

    @property
    def signature(self) -> Hashable:
        """See :attr:`Block.signature`."""
        forms = tuple(self.forms.values())
        kind = type(self), self.shape, self.dtype, self.solver, self.power
        return *kind, forms, self.picks_columns

    def raw_columns(self, solution: Tensors) -> Tensor | None:
        """See :meth:`Block.raw_columns`."""
        if not self.picks_columns:
            return None
        return solution["A.values" if self.solver == "eigen" else "A.inverse"] == 0

    def cuts(self, dim: int) -> frozenset[str] | None:
        """See :meth:`Block.cuts`: what is not dense does not mix rows, or columns."""
        side = "A" if dim == -1 else "G"
        if type(self) is not KFACBlock or len(self.shape) > 2 or self.forms[side] == "dense":
            return None  # others may precondition in another way
        return frozenset(name for name in self.solution_shapes if name.startswith(f"{side}."))

    def _apply(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        if self.solver != "eigen":
            inverse = solution["A.inverse"]
            right = (
                gradient @ inverse
                if self.forms["A"] == "dense"
                else gradient * inverse[..., None, :]
            )
            if self.forms["G"] == "identity":
                return right
            inverse = solution["G.inverse"]
            return inverse @ right if self.forms["G"] == "dense" else inverse[..., None] * right
        turned = self._turn(solution, gradient) / self._damped(solution, damping)
        return self._turn_back(solution, turned, self.narrow)

    @property
    def row_flops(self) -> int | None:
        """See :attr:`Block.row_flops`: ``2(d_A² + d_G² + d_A d_G)``, without ``d_G²`` if ``G = I``."""
        own = type(self)
        plain = own.precondition is KFACBlock.precondition and own._apply is KFACBlock._apply
        return self._row_flops() if plain and self.solver in _ONE_MATRIX else None

    def _row_flops(self) -> int | None:
        whole = len(self.shape) == 2 and not self.picks_columns
        if not whole or "diagonal" in self.forms.values():
            return None
        dense = [self.widths[side] for side, form in self.forms.items() if form == "dense"]
        return 2 * (sum(width**2 for width in dense) + math.prod(self.widths.values()))

    def precondition_rows(self, solution: Tensors, outputs: Tensor, inputs: Tensor) -> Tensor:
        """See :meth:`Block.precondition_rows`: ``(g G⁻¹)ᵀ (a A⁻¹)``, since inverses are symmetric."""
        right = inputs @ solution["A.inverse"]
        dense = self.forms["G"] == "dense"
        return (outputs @ solution["G.inverse"] if dense else outputs).mT @ right

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`Block.multiply`."""
        if self.solver != "eigen":
            return super().multiply(solution, matrix)
        return self._turn_back(solution, self._turn(solution, matrix) * self._eigenvalues(solution))

    def quadratic(self, solution: Tensors, step: Tensor) -> Tensor:
        """See :meth:`Block.quadratic`; half the products of :meth:`multiply`."""
        if self.solver != "eigen":
            return super().quadratic(solution, step)
        return (self._turn(solution, step).square() * self._eigenvalues(solution)).sum()

    @full_precision
    def _turn(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """Express a matrix ``[*b, d_out, d_in]`` in the eigenbasis."""
        rotate_in, rotate_out = solution.get("A.vectors"), solution.get("G.vectors")
        turned = matrix if rotate_out is None else rotate_out.mT @ matrix
        return turned if rotate_in is None else turned @ rotate_in

    def _turn_back(self, solution: Tensors, turned: Tensor, rounded: bool = False) -> Tensor:
        """Undo :meth:`_turn`; where products may be rounded to bfloat16, nothing divides them any more.

        Before the division they may not: ``1/(v_G v_Aᵀ + γ)`` would amplify what the rounding of
        directions of high curvature leaves in those of low curvature.
        """
        rotate_in, rotate_out = solution.get("A.vectors"), solution.get("G.vectors")
        if rotate_in is not None:
            turned = matmul(turned, rotate_in.mT, rounded)
        return turned if rotate_out is None else matmul(rotate_out, turned, rounded)

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`; inverses have their damping in them."""
        if self.solver != "eigen":
            inverse = solution["A.inverse"]
            return torch.ones((), dtype=inverse.dtype, device=inverse.device)
        mean = solution["A.values"].mean(-1)
        if self.picks_columns:  # each row is one token, however rare tokens are counted
            mean = torch.full_like(mean, 1 / self.widths["A"]).where(mean > 0, 0.0)
        if self.forms["G"] != "identity":
            mean = mean * solution["G.values"].mean(-1)
        return mean[..., None, None]

    def input_square(self, solution: Tensors) -> Tensor | None:
        """See :meth:`Block.input_square`: the mean eigenvalue of A, where it is kept."""
        known = not self.picks_columns and "A.values" in solution
        return solution["A.values"].mean() if known else None

    def _damped(self, solution: Tensors, damping: float | Tensor) -> Tensor:
        """Eigenvalues of ``(G ⊗ A + γI)ᵖ``, without the power in one pass."""
        values = solution["A.values"][..., None, :]
        if self.forms["G"] == "identity":
            damped = values + damping
        else:
            shift = damping if isinstance(damping, Tensor) else values.new_full((), damping)
            damped = torch.addcmul(shift, solution["G.values"][..., None], values)
        return damped if self.power == 1 else damped.pow_(self.power)

    def _eigenvalues(self, solution: Tensors) -> Tensor:
        """Eigenvalues of ``G ⊗ A`` as a matrix, or as a row that stands for all of them."""
        values = solution["A.values"][..., None, :]
        return values if self.forms["G"] == "identity" else solution["G.values"][..., None] * values

    # --- cost -----------------------------------------------------------------------------------

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`. An eigendecomposition is counted as ``9d³``, an inverse as ``d³``."""
        *batch, d_out, d_in = self.shape
        blocks = math.prod(batch)
        products = 4 if self.solver == "eigen" else 2
        refresh = precondition = 0
        for side, form in self.forms.items():
            if form == "dense":
                refresh += self._cubes(side)
                precondition += products * d_out * d_in * self.widths[side]
        return Cost(
            refresh_flops=refresh,
            precondition_flops=blocks * precondition,
            statistics_bytes=bytes_of((s.shape for s in self.statistics.values()), self.dtype),
            solution_bytes=bytes_of(self.solution_shapes.values(), self.dtype),
        )

    def _cubes(self, side: str) -> int:
        """Operations to solve a dense side."""
        per_cube = {"eigen": 9, "cholesky": 1, "newton-schulz": 80}.get(self.solver, 9)
        return math.prod(self.shape[:-2]) * per_cube * self.widths[side] ** 3
