"""EKFAC: the Fisher block of a layer is diagonal in K-FAC's eigenbasis (George et al. 2018).

With ``A = Q_A v_A Q_Aᵀ``, ``G = Q_G v_G Q_Gᵀ`` and ``Q = Q_G ⊗ Q_A`` the curvature is ``Q diag(S) Qᵀ``:
    ``P = Q_G [(Q_Gᵀ V Q_A) / (S + γ)] Q_Aᵀ``, K-FAC with ``S`` in the place of ``v_G v_Aᵀ``.
Moments of samples are ``S = E[(Q_Gᵀ U Q_A)²]`` with ``U`` a sample's gradient: the diagonal of ``QᵀFQ``,
which is what the Frobenius norm asks for. Until there are moments, ``S = v_G v_Aᵀ``. Where a factor is
zero (fewer rows than columns, dead inputs) any basis of the rest will do as eigenvectors. Such directions
share their mean, so that S does not depend on which one rounding chose.

Moments of gradients are ``m = E[(Q_Gᵀ V Q_A)²]`` with ``V`` the gradient of the batch. Of N independent
samples that is ``(Var U)/N + (E U)²``: N times too small where samples disagree, and right where all of
them agree, so that no factor fits. Only their proportions are used, ``S = m·tr(G ⊗ A)/Σm``: K-FAC says
how much curvature there is and the moments say where, so that damping keeps its meaning. One gradient
says little, so the average starts from K-FAC's eigenvalues, whose weight fades as old moments do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kronfac.layers.rows import Rows, TokenRows
from kronfac.methods.ekfac.moments import add_token_moments, levelled, rebased, sample_moments
from kronfac.methods.kfac.paired import PairedBlock, chunks
from kronfac.protocol.block import NOTHING, Context, Cost, Given, Part, Statistic, Tensors

Moments = Literal["sample", "gradient"]


class EKFACBlock(PairedBlock):
    """The curvature of one layer: Kronecker factors for a basis, and moments in it.

    The columns of an embedding are kept apart (its basis on that side is the identity), and a token may
    not be seen for a long time. So its moments are kept as those of one of its rows, ``S/R`` with ``R``
    the share of rows that were its own while S was observed, and multiplied by its share in A, which
    counts every token that was ever seen as at least one row.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        moments: Moments,
        decay: float | None,
        max_dim: int,
        per_sample: bool,
        picks_columns: bool = False,
        power: float = 1.0,
    ) -> None:
        super().__init__(
            shape,
            dtype,
            solver="eigen",
            max_dim=max_dim,
            output_factor=True,
            per_sample=per_sample,
            picks_columns=picks_columns,
            power=power,
        )
        self.moments = moments
        self.label = f"{self.label}, {moments} moments"
        self.turned = tuple(side for side, form in self.forms.items() if form == "dense")
        self.basis = tuple(name for name in self.solution_shapes if name[0] in self.turned)
        self.solution_shapes = {**self.solution_shapes, "S": shape}
        self.fading = decay
        if moments == "gradient":
            kind = Statistic(shape, "gradient", every="step")
            self.solution_shapes["start"] = (1,)
        else:
            kind = Statistic(shape, "output", degree=2)
            self.keeps = "summed" if per_sample else "dense"
        self.statistics = {**self.statistics, "S": replace(kind, basis=self.basis, decay=decay)}
        self.compares_rows = picks_columns and moments == "sample"
        if self.compares_rows:
            shares = Statistic(shape[-1:], "input", basis=self.basis, decay=decay)
            self.statistics = {**self.statistics, "R": shares}

    # --- observing ------------------------------------------------------------------------------

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_input`."""
        found = super().observe_input(inputs, context)
        if self.compares_rows and self._has_basis(context.solution):
            found["R"] = inputs.squares()
        return found

    def observe_pair(
        self, inputs: Rows, outputs: Rows, context: Context = NOTHING
    ) -> dict[str, Tensor]:
        """See :meth:`Block.observe_pair`."""
        if not isinstance(inputs, TokenRows):
            return super().observe_pair(inputs, outputs, context)
        if inputs.positions != outputs.positions or not self._has_basis(context.solution):
            return {}
        basis = (context.solution or {}).get("G.vectors")
        positions, d_out = inputs.positions, self.widths["G"]
        total: Tensor | None = None
        for some, gradients in chunks(inputs, outputs, positions * (positions + 2 * d_out)):
            assert isinstance(some, TokenRows)
            g = gradients.dense()
            total = g.new_zeros(self.shape) if total is None else total
            add_token_moments(total, some.tokens, g, basis)
        return {} if total is None else {"S": total}

    def observe_rows(self, a: Tensor, g: Tensor, solution: Tensors | None) -> dict[str, Tensor]:
        """See :meth:`PairedBlock.observe_rows`."""
        found = super().observe_rows(a, g, solution)
        if self.moments == "sample" and self._has_basis(solution):
            known = solution or {}
            found["S"] = sample_moments(a, g, known.get("A.vectors"), known.get("G.vectors"))
        return found

    def observe_gradient(self, gradient: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_gradient`."""
        if not self._has_basis(context.solution):
            return {}
        return {"S": self._turn(context.solution or {}, gradient).square()}

    def _has_basis(self, solution: Tensors | None) -> bool:
        return not self.basis or solution is not None

    def rebase(self, name: str, value: Tensor, before: Tensors, after: Tensors) -> Tensor | None:
        """See :meth:`Block.rebase`."""
        if name == "R":
            return value
        turns = {
            side: after[f"{side}.vectors"].mT @ before[f"{side}.vectors"] for side in self.turned
        }
        return rebased(self._levelled(value, before), turns.get("A"), turns.get("G"))

    def _levelled(self, moments: Tensor, solution: Tensors) -> Tensor:
        """Give the directions that a factor does not know their mean, since none of them is special."""
        if "A" in self.turned:
            moments = levelled(moments, solution["A.values"])
        if "G" in self.turned:
            moments = levelled(moments.mT, solution["G.values"]).mT
        return moments

    # --- solving --------------------------------------------------------------------------------

    @property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`: the sides of the basis, and the moments in it more often."""
        sides = super().parts
        names = ("S", "R") if self.compares_rows else ("S",)
        part = Part(names, ("S",), math.prod(self.shape), every="factor", after=tuple(sides))
        if self.moments == "gradient":
            part = replace(part, solution=("S", "start"), every="step", after=())
        return {**sides, "S": part}

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`."""
        if part != "S":
            return super().solve(part, given)
        values = {name: given.latest(name) for name in ("A.values", "G.values")}
        start = values["G.values"][..., None] * values["A.values"][..., None, :]
        if self.moments == "gradient":
            return self._followed(given, values, start)
        moments = given.means.get("S")
        if moments is None:
            return {"S": start}
        moments = self._levelled(moments, values)
        if self.compares_rows:
            moments = self._per_token(moments, given.means.get("R"), values, start)
        return {"S": moments.contiguous()}

    def _followed(self, given: Given, values: Tensors, start: Tensor) -> dict[str, Tensor]:
        """Moments of gradients that add up to K-FAC's trace, and what weight K-FAC's own still have."""
        weight, moments = start.new_ones(1), given.means.get("S")
        if given.previous is not None and "start" in given.previous:
            weight = given.previous["start"]
        if moments is None:
            return {"S": start, "start": weight}
        assert self.fading is not None
        weight = weight * self.fading
        moments = self._levelled(moments, values)
        total = moments.sum((-2, -1), keepdim=True)
        trace = super().mean_curvature(values) * math.prod(self.shape[-2:])
        scaled = moments / torch.where(total > 0, total, 1.0) * trace
        mixed = torch.where(total > 0, torch.lerp(scaled, start, weight), start)
        return {"S": mixed.contiguous(), "start": weight}

    def _per_token(
        self, moments: Tensor, shares: Tensor | None, values: Tensors, start: Tensor
    ) -> Tensor:
        """Moments of a token's rows times its share of rows; what K-FAC says if none are left."""
        if shares is None:
            return start
        seen = shares > torch.finfo(shares.dtype).tiny
        weight = values["A.values"] / torch.where(seen, shares, 1.0)
        return torch.where(seen, moments * weight, start)

    # --- applying -------------------------------------------------------------------------------

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`.

        K-FAC's if S has that anyway, and for embeddings, in whose S rare tokens count for more.
        """
        if self.moments == "gradient" or self.picks_columns:
            return super().mean_curvature(solution)
        return solution["S"].mean((-2, -1), keepdim=True)

    def _damped(self, solution: Tensors, damping: float | Tensor) -> Tensor:
        damped = solution["S"] + damping
        return damped if self.power == 1 else damped.pow_(self.power)

    def _eigenvalues(self, solution: Tensors) -> Tensor:
        return solution["S"]

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`: K-FAC's, the turn of the moments, and that of each gradient."""
        cost, (*batch, d_out, d_in) = super().cost, self.shape
        turn = 2 * math.prod(batch) * d_out * d_in * (d_out + d_in)
        each_step = turn if self.moments == "gradient" else 0
        return replace(
            cost,
            refresh_flops=cost.refresh_flops + turn,
            precondition_flops=cost.precondition_flops + each_step,
        )
