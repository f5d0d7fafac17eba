"""CG-FAC (Chen 2021): natural gradients by conjugate gradients, from rows alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.layers.rows import Rows
from kronfac.linalg.conjugate import conjugate_gradients
from kronfac.methods.kfac.method import Sharing
from kronfac.methods.kfac.unit_wise import UnitWiseBlock
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import Options, check_choice, check_count, is_real
from kronfac.protocol.block import (
    NOTHING,
    Block,
    Context,
    Cost,
    Given,
    Statistic,
    Tensors,
    bytes_of,
)
from kronfac.protocol.method import Defaults, Method

Matvec = Literal["kronecker", "empirical"]


class CGFACBlock(Block):
    """Rows ``a: [*b, R, d_in]`` and ``g: [*b, R, d_out]`` of the newest batch, and products with them.

    What rows have to be divided by depends on how the loss was averaged and on batches that were
    dropped. So traces are observed as sums too and give rows their scale, ``A = (tr A/Σ|a|²) Σ a aᵀ``.
    """

    undamped = knows_curvature = True

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        matvec: Matvec,
        iterations: int,
        max_rows: int,
        per_sample: bool,
    ) -> None:
        *batch, d_out, d_in = shape
        self.shape = shape
        self.dtype = dtype
        self.matvec = matvec
        self.iterations = iterations
        self.max_rows = max_rows
        self.keeps = "summed" if per_sample else "none"
        self.label = f"cg, {matvec}"
        pairs = matvec == "empirical"
        self.statistics = {
            "a": Statistic((*batch, d_in), "output" if pairs else "input", combine="gather"),
            "g": Statistic((*batch, d_out), "output", degree=1, combine="gather"),
        }
        if pairs:
            self.statistics["F.trace"] = Statistic((*batch, 1), "output", degree=2, decay=0.0)
        else:
            self.statistics["A.trace"] = Statistic((*batch, 1), "input", decay=0.0)
            self.statistics["G.trace"] = Statistic((*batch, 1), "output", degree=2, decay=0.0)
        self.solution_shapes = {
            "a": (*batch, None, d_in),
            "g": (*batch, None, d_out),
            "scale": (*batch, 1, 1),
            "mean": (*batch, 1, 1),
        }

    # --- observing ------------------------------------------------------------------------------

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_input`."""
        if self.matvec == "empirical":
            return {}
        rows = self._held(inputs)
        return {"a": rows, "A.trace": _squares(rows).sum(-1, keepdim=True)}

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_output`."""
        if self.matvec == "empirical":
            return {}
        rows = self._held(outputs)
        return {"g": rows, "G.trace": _squares(rows).sum(-1, keepdim=True)}

    def observe_pair(
        self, inputs: Rows, outputs: Rows, context: Context = NOTHING
    ) -> dict[str, Tensor]:
        """See :meth:`Block.observe_pair`."""
        if self.matvec == "kronecker":
            return {}
        a, g = self._held(inputs), self._held(outputs)
        trace = (_squares(a) * _squares(g)).sum(-1, keepdim=True)
        return {"a": a, "g": g, "F.trace": trace}

    def _held(self, rows: Rows) -> Tensor:
        """All rows of a call, ``[*b, R, d]``, in memory of their own."""
        count = rows.samples * rows.positions
        if count > self.max_rows:
            *batch, d_out, d_in = self.shape
            size = math.prod(batch) * count * (d_in + d_out) * self.dtype.itemsize
            raise ValueError(
                f"CG-FAC would hold {count:,} rows of a layer of shape {d_out} x {d_in}, "
                f"{size / 1e6:,.1f} MB; that is more than max_rows={self.max_rows:,}. Take smaller "
                "batches, sharing='reduce' (one row a sample) or a larger max_rows, or name the layer "
                "in exclude."
            )
        return rows.dense().flatten(-3, -2).clone()

    # --- solving --------------------------------------------------------------------------------

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`: only scales are computed; rows are solved with at each step."""
        *_, d_out, d_in = self.shape
        means, a, g = given.means, given.means["a"], given.means["g"]
        if self.matvec == "empirical":
            trace = means["F.trace"]
            scale = _ratio(trace, (_squares(a) * _squares(g)).sum(-1, keepdim=True))
        else:
            trace = means["A.trace"] * means["G.trace"]
            sums = [_squares(rows).sum(-1, keepdim=True) for rows in (a, g)]
            scale = _ratio(means["A.trace"], sums[0]) * _ratio(means["G.trace"], sums[1])
        mean = trace / (d_out * d_in)
        return {"a": a, "g": g, "scale": scale[..., None], "mean": mean[..., None]}

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`."""
        return solution["mean"]

    # --- applying -------------------------------------------------------------------------------

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`; at the scale of 1, where no square underflows."""
        size = gradient.abs().amax((-2, -1), keepdim=True)
        size = torch.where(size > 0, size, 1)
        right = gradient / size

        def damped(x: Tensor) -> Tensor:
            return self.multiply(solution, x) + damping * x

        return conjugate_gradients(damped, right, right, self.iterations) * size

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`Block.multiply`: ``G X A``, or ``Σ (gᵀXa) g aᵀ/N``."""
        a, g = solution["a"], solution["g"]
        if self.matvec == "empirical":
            along = ((g @ matrix) * a).sum(-1, keepdim=True)
            product = (g * along).mT @ a
        else:
            product = _kronecker_product(a, g, matrix)
        return product * solution["scale"]

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`; by row, since the data decides how many there are."""
        *batch, d_out, d_in = self.shape
        flops = 4 * math.prod(batch) * d_out * d_in * (self.iterations + 1)
        return Cost(
            refresh_flops=0,
            precondition_flops=flops,
            statistics_bytes=bytes_of(
                (one.sum_shape for one in self.statistics.values()), self.dtype
            ),
            solution_bytes=bytes_of(self.solution_shapes.values(), self.dtype),
        )


def _kronecker_product(a: Tensor, g: Tensor, matrix: Tensor) -> Tensor:
    """``(Σ g gᵀ) X (Σ a aᵀ)``: the side with fewer rows than it is wide first, which makes X narrow."""
    if g.shape[-2] < matrix.shape[-2]:
        return g.mT @ (g @ matrix @ a.mT @ a)
    if a.shape[-2] < matrix.shape[-1]:
        return g.mT @ (g @ (matrix @ a.mT)) @ a
    return g.mT @ (g @ (matrix @ a.mT @ a))


def _squares(rows: Tensor) -> Tensor:
    """``|r|²`` of each row, ``[*b, R]``."""
    return rows.square().sum(-1)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """A ratio, and 0 where there is nothing to divide by."""
    usable = denominator > 0
    return torch.where(usable, numerator / torch.where(usable, denominator, 1), 0)


@dataclass(frozen=True, kw_only=True)
class CGFACMethod(Method):
    """CG-FAC: K-FAC's step by conjugate gradients, without K-FAC's factors.

    Chen (2021), An iterative K-FAC algorithm for Deep Learning.

    It keeps the rows of the newest batch and solves, at every step, for each layer::

        (F + γI) vec(X) = vec(V)        by so many iterations of conjugate gradients, from X = V
        "kronecker":  F vec(X) = G X A,  A = Σ a aᵀ/R,  G = Σ g gᵀ/N,  as gᵀ(g(X aᵀ)a)
        "empirical":  F vec(X) = Σ (gᵀXa) g aᵀ/N,  the empirical Fisher of the layer

    No factor is ever formed: a layer keeps ``N (d_in + d_out)`` numbers, however wide it is, and while it
    is solved one matrix of its own size for each iteration, since residuals are made orthogonal again.
    Once converged, the first is :class:`kronfac.KFAC` with ``solver="eigen"``, ``decay=0`` and the same
    ``sharing``, the second the exact solve. That takes at most ``rank(F) + 1`` iterations in exact
    arithmetic; each costs about four products of the size of the layer's own. Fewer iterations are a
    regularisation of their own: what has little curvature is solved last. None at all leaves the raw
    gradient: not ``V/γ``, to which the damped system would tend for small curvature.

    The note does not say which of the two products it means, nor how many iterations; both are here, and
    10. Statistics are not averaged over time, since rows are not; so they are taken at every step, which
    has ``V`` itself in the range of ``F``. Nor does it say how long steps are: they are
    K-FAC's, ``rescale="auto"``, whose products take ``min(d_in, d_out)²`` numbers for a moment.

    Norms keep K-FAC's matrix of each channel. Layers whose rows cannot be told apart by sample use
    the Kronecker product of all of their rows, as ``sharing="expand"`` does.

    Limits: embeddings are not preconditioned, since their rows are as wide as the vocabulary.
    Ranks gather the rows of all of them, ``N (d_in + d_out)`` numbers a layer and step. ``max_rows``
    refuses what would not fit.

    Args:
        matvec: ``"kronecker"`` or ``"empirical"``.
        iterations: how many iterations each step takes, converged or not.
        sharing: which rows are held of layers with shared positions, such as convolutions: ``"reduce"``
            keeps one for each sample (inputs averaged, gradients summed over positions), ``"expand"`` all
            of them, which only the Kronecker product can use.
        max_rows: how many rows one call of a layer may hold on a rank; more are an error that says how
            much memory they would take.
    """

    defaults = Defaults(damping=1e-3, factor_every=1, refresh_every=1)

    matvec: Matvec = "kronecker"
    iterations: int = 10
    sharing: Sharing = "reduce"
    max_rows: int = 32768

    def __post_init__(self) -> None:
        check_choice("matvec", self.matvec, ("kronecker", "empirical"))
        if not is_real(self.iterations) or self.iterations % 1 or self.iterations < 0:
            raise ValueError(
                f"iterations={self.iterations!r} must be a whole number of at least 0."
            )
        check_choice("sharing", self.sharing, ("expand", "reduce"))
        check_count("max_rows", self.max_rows)
        if self.matvec == "empirical" and self.sharing == "expand":
            raise ValueError(
                "sharing='expand' keeps rows of single positions, but matvec='empirical' takes one "
                "pair of rows for each sample; choose sharing='reduce'."
            )

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        if options.fisher == "forward":
            raise ValueError(
                "fisher='forward' observes no gradients, of which CG-FAC needs the rows; choose "
                "fisher='empirical', 'mc' or 'exact'."
            )

    def refusal(self, layer: Layer) -> str | None:
        """See :meth:`Method.refusal`."""
        if layer.picks_columns:
            return "its rows are as wide as the vocabulary, and CG-FAC would hold them"
        return None

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        shape, dtype = layer.matrix_shape, layer.factor_dtype
        if layer.unit_wise:
            return UnitWiseBlock(shape, dtype, per_sample=grouped)
        return CGFACBlock(
            shape,
            dtype,
            matvec=self.matvec if grouped else "kronecker",
            iterations=int(self.iterations),
            max_rows=int(self.max_rows),
            per_sample=grouped and self.sharing == "reduce",
        )


CGFAC = register_method(CGFACMethod)
