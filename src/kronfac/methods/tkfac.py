"""TKFAC: Kronecker factors that keep the trace of the Fisher (Gao et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kronfac.adaptive.relative import Relative
from kronfac.layers import Layer
from kronfac.layers.rows import Rows
from kronfac.linalg.covariance import gram
from kronfac.methods.ekfac.method import check_gradients
from kronfac.methods.kfac.block import KFACBlock
from kronfac.methods.kfac.method import Sharing
from kronfac.methods.kfac.paired import PairedBlock
from kronfac.methods.kfac.unit_wise import UnitWiseBlock
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import Options, check_choice, check_count
from kronfac.protocol.block import NOTHING, Block, Context, Given, Tensors
from kronfac.protocol.method import Defaults, Method


class TKFACBlock(PairedBlock):
    """``F = δ Ψ ⊗ Φ``, with rows of each side weighted by the squared norms of the other's.

    The statistics are ``A = E[‖g‖² a aᵀ] = δΦ`` and ``G = E[‖a‖² g gᵀ] = δΨ``, sums over a sample's
    positions. Both have the trace δ, so that it needs no statistic of its own.

    Eigen form: K-FAC's with ``Φ = A/tr A`` and ``δΨ = G`` for its factors, ``(δΨ ⊗ Φ + γI)⁻¹``.
    Inverse form: ``P = (√δΨ + √γ)⁻¹ V (√δΦ + √γ)⁻¹``; relative damping has ``γ = ρδ/(d_A d_G)``.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> None:
        super().__init__(shape, dtype, **options)
        self.label = f"{self.label}, trace"
        self.keeps = "dense" if self.keeps == "none" else self.keeps
        self.statistics = {
            side: replace(one, source="output", degree=2) for side, one in self.statistics.items()
        }

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_input`; both sides are needed at once."""
        return {}

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_output`."""
        return {}

    def observe_rows(self, a: Tensor, g: Tensor, solution: Tensors | None) -> dict[str, Tensor]:
        """See :meth:`PairedBlock.observe_rows`."""
        found = super().observe_rows(a, g, solution)
        weighted = {"A": a * g.norm(dim=-1, keepdim=True), "G": g * a.norm(dim=-1, keepdim=True)}
        for side, rows in weighted.items():
            flat = rows.flatten(-3, -2)
            found[side] = gram(flat) if self.forms[side] == "dense" else flat.square().sum(-2)
        return found

    def _decompose(self, side: str, mean: Tensor) -> dict[str, Tensor] | None:
        solved = super()._decompose(side, mean)
        if side == "A" and solved is not None:
            values = solved["A.values"]
            trace = values.sum(-1, keepdim=True)
            solved["A.values"] = values / torch.where(trace > 0, trace, 1.0)
        return solved

    def input_square(self, solution: Tensors) -> None:
        """See :meth:`Block.input_square`: the weighted factor does not tell."""

    @property
    def outline_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See :attr:`Block.outline_shapes`; each side knows δ itself."""
        return {}

    def _invert(
        self, side: str, given: Given, share: tuple[int, int] | None = None
    ) -> dict[str, Tensor] | None:
        mean, widths = given.means[side], self.widths
        average = self.outline(side, mean)
        assert average is not None
        trace = average * widths[side]
        usable = trace > 0
        trace = torch.where(usable, trace, 1.0)
        damping = torch.full_like(trace, given.damping)
        if given.relative:
            sides = 1 if given.relative == "trace" else widths["A"] * widths["G"]
            damping = torch.where(usable, damping * trace / sides, 1.0)
        scale = trace.rsqrt()[..., None]
        scaled = mean * (scale[..., None] if self.forms[side] == "dense" else scale)
        scaled_given = replace(given, means={side: scaled})
        inverse = self._damped_inverse(side, scaled_given, damping.sqrt(), share)
        if inverse is not None and given.relative:
            inverse = self._or_identity(side, inverse, usable, share)
        return None if inverse is None else {f"{side}.inverse": inverse}


@dataclass(frozen=True, kw_only=True)
class TKFACMethod(Method):
    """Trace-restricted K-FAC: ``F = δ Ψ ⊗ Φ`` with exactly the trace of the Fisher.

    Gao et al. (2021), "A Trace-restricted Kronecker-Factored Approximation to Natural Gradient". With
    ``Λ = a aᵀ`` and ``Γ = g gᵀ`` of a row: ``δ = E[tr Λ tr Γ]``, ``Φ = E[tr Γ · Λ]/δ``,
    ``Ψ = E[tr Λ · Γ]/δ``. K-FAC multiplies the mean of Λ by that of Γ, as if they were independent; here
    rows count by the norms of both sides. With rows of constant norms it is K-FAC.

    Distinct positions of a sample are taken as uncorrelated, as in the paper: the trace is that of the
    Fisher without such correlations.

    Args:
        sharing: ``"expand"`` treats shared positions as samples, ``"reduce"`` sums over them first.
        solver: ``"eigen"`` is ``(δ Ψ ⊗ Φ + γI)⁻¹``, so that a change of damping acts at once and damping
            may be adaptive. ``"cholesky"`` and ``"newton-schulz"`` have the paper's damping,
            ``(√δΨ + √γI)⁻¹ V (√δΦ + √γI)⁻¹``. (The form ``Ψ̃⁻¹ V Φ̃⁻¹/δ`` is the same with
            ``Φ̃ = Φ + √(γ/δ)I``: δ must not be divided by twice.) ``"auto"`` takes eigen up to a
            width of 2048 and Cholesky beyond.
        max_dim: a side wider than this keeps only its diagonal.

    The paper's rules for γ from layer to layer of a convolutional net are replaced by damping relative to
    each layer's curvature, the default. Inputs and output gradients of the batch are held until the step.
    Norms have K-FAC's exact block. Rows of an embedding all have norm 1, which makes K-FAC's trace
    right already: it has K-FAC's block, as have layers whose rows cannot be told apart by sample.
    ``fisher="forward"`` has no output gradients and is refused.
    """

    defaults = Defaults(damping=Relative(0.1))

    sharing: Sharing = "expand"
    solver: Literal["auto", "eigen", "cholesky", "newton-schulz"] = "auto"
    max_dim: int = 8192

    def __post_init__(self) -> None:
        check_choice("sharing", self.sharing, ("expand", "reduce"))
        check_choice("solver", self.solver, ("auto", "eigen", "cholesky", "newton-schulz"))
        check_count("max_dim", self.max_dim)

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        check_gradients(self.name, options)

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        shape, dtype = layer.matrix_shape, layer.factor_dtype
        if layer.unit_wise:
            return UnitWiseBlock(shape, dtype, per_sample=grouped)
        plain = layer.picks_columns or not grouped
        return (KFACBlock if plain else TKFACBlock)(
            shape,
            dtype,
            solver=self.solver,
            max_dim=self.max_dim,
            output_factor=True,
            per_sample=not plain and self.sharing == "reduce",
            picks_columns=layer.picks_columns,
        )


TKFAC = register_method(TKFACMethod)
