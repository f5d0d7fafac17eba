"""K-FAC whose inverses come from a (simulated) thermodynamic computer: ``solver="thermodynamic"``.

The factors are damped as for Cholesky, ``A + π√γ`` and ``G + √γ/π``, and uploaded to a device with states
that follow an Ornstein-Uhlenbeck process (:mod:`kronfac.linalg.thermodynamic`). It inverts them in one of
two ways. Diagonal sides need no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kronfac.linalg import thermodynamic
from kronfac.methods.kfac.block import KFACBlock
from kronfac.options.config import check_choice, check_count, check_non_negative, check_positive
from kronfac.protocol.block import Given, Tensors
from kronfac.protocol.transform import LayerStep, Transform


@dataclass(frozen=True, kw_only=True)
class Thermodynamic:
    """A thermodynamic computer as K-FAC's solver, simulated digitally: ``KFAC(..., solver=...)``.

    "Scalable Thermodynamic Second-order Optimization" (Donatella et al. 2025) leaves the inverses of
    K-FAC to a physical system with states ``dx = -(Mx - b) dt + N(0, 2κ dt)``, in time that grows like
    the square of the width instead of its cube. Here the system is simulated from its exact transitions,
    which takes longer than an inverse: this shows what a device's errors do to training, not its speed.
    Its own text on converters is not public in detail; what is modelled is said below.

    Method 1 reads the states without ``b``, whose covariance is ``κM⁻¹``, and takes
    ``M⁻¹ ≈ (1/κN) Σ x xᵀ``; its error is ``E‖Σ̂ - Σ‖² = (tr(Σ)² + tr(Σ²))/N`` for independent states.
    Gradients are multiplied by these inverses digitally. Method 2 solves for each gradient: the mean
    states over time of ``Gy = v`` for its columns, then of ``Ax = y`` for the rows of the result.

    Args:
        method: 1 or 2.
        samples: N, the number of states that are read, or averaged, for each inverse or solution.
        spacing: time between them, in relaxation times ``1/λ_min`` of the slowest direction.
        burn_in: time before the first of method 1, in the same unit; method 2 starts at rest.
        bits: of the converters, at least 2; ``None`` for ideal ones. What goes in is rounded to
            ``2^bits - 1`` levels between ± its largest magnitude, and what comes out as well.
        converters: which of them have these bits: ``"both"``, those of ``"inputs"`` or ``"outputs"``.
        noise: standard deviation of the device's own errors, added to every uploaded entry and to every
            reading, as a share of the largest magnitude.
        temperature: κ, the strength of the process's noise if the largest entry of ``b`` is 1 and
            ``λ_min`` is 1. Method 1 does not depend on it.

    An uploaded matrix that errors have made indefinite is replaced by the nearest one whose eigenvalues
    are at least the damping. Random numbers come from a generator that checkpoints keep.
    """

    method: Literal[1, 2] = 1
    samples: int = 10_000
    spacing: float = 1.0
    burn_in: float = 5.0
    bits: int | None = None
    converters: Literal["both", "inputs", "outputs"] = "both"
    noise: float = 0.0
    temperature: float = 1e-3

    def __post_init__(self) -> None:
        check_choice("method", self.method, (1, 2))
        check_count("samples", self.samples)
        check_positive("spacing", self.spacing)
        check_positive("burn_in", self.burn_in)
        check_choice("converters", self.converters, ("both", "inputs", "outputs"))
        check_non_negative("noise", self.noise)
        check_non_negative("temperature", self.temperature)
        if self.bits is not None:
            check_count("bits", self.bits)
            if self.bits < 2:
                raise ValueError(
                    f"bits={self.bits!r} leaves no level but zero; give at least 2, or None."
                )

    @property
    def bits_in(self) -> int | None:
        """Bits of what is uploaded."""
        return None if self.converters == "outputs" else self.bits

    @property
    def bits_out(self) -> int | None:
        """Bits of what is read."""
        return None if self.converters == "inputs" else self.bits


class CovarianceBlock(KFACBlock):
    """Method 1: inverses are second moments of states, taken at each refresh."""

    draws = True

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, device: Thermodynamic, **further: Any
    ) -> None:
        super().__init__(shape, dtype, solver="thermodynamic", **further)
        self.device = device

    def _upload(
        self, damped: Tensor, floor: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor] | None:
        bits, noise = self.device.bits_in, self.device.noise
        return thermodynamic.upload(damped, floor, bits=bits, noise=noise, generator=generator)

    def _inverse(self, side: str, damped: Tensor, floor: Tensor, given: Given) -> Tensor | None:
        device, generator = self.device, given.generator(side)
        uploaded = self._upload(damped, floor, generator)
        if uploaded is None:
            return None
        inverse = thermodynamic.covariance_inverse(
            *uploaded,
            device.samples,
            spacing=device.spacing,
            burn_in=device.burn_in,
            bits=device.bits_out,
            noise=device.noise,
            generator=generator,
        )
        return inverse if bool(torch.isfinite(inverse).all()) else None

    def _cubes(self, side: str) -> int:
        """What the simulation takes: a decomposition and three products of all states."""
        width, blocks = self.widths[side], super()._cubes(side) // (9 * self.widths[side] ** 3)
        return blocks * (9 * width**3 + 6 * self.device.samples * width**2)


class LinearSystemsBlock(CovarianceBlock):
    """Method 2: a refresh uploads matrices, and each gradient is solved for.

    A solution has the mean of what the device answers, the inverse of what it holds, and the spread.
    :meth:`precondition` is the mean; :class:`Readout` puts what is read in its place.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, device: Thermodynamic, **further: Any
    ) -> None:
        super().__init__(shape, dtype, device=device, **further)
        dense = [side for side, form in self.forms.items() if form == "dense"]
        spreads = {f"{side}.spread": self.statistics[side].shape for side in dense}
        self.solution_shapes = {**self.solution_shapes, **spreads}
        self.symmetric_solutions |= frozenset(spreads)

    def _inverse(self, side: str, damped: Tensor, floor: Tensor, given: Given) -> Tensor | None:
        uploaded = self._upload(damped, floor, given.generator(side))
        if uploaded is None:
            return None
        vectors, values = uploaded
        return (vectors / values[..., None, :]) @ vectors.mT

    def _invert(
        self, side: str, given: Given, share: tuple[int, int] | None = None
    ) -> dict[str, Tensor] | None:
        solved, device = super()._invert(side, given, share), self.device
        if solved is None or self.forms[side] != "dense":
            return solved
        duration = device.samples * device.spacing
        inverse = solved[f"{side}.inverse"]
        spread = thermodynamic.thermal_spread(inverse, duration, device.temperature)
        return None if spread is None else {**solved, f"{side}.spread": spread}

    def read_out(self, solution: Tensors, gradient: Tensor, generator: torch.Generator) -> Tensor:
        """What the device answers for a gradient ``[*b, d_out, d_in]``."""
        result = self._solve_for(solution, "G", gradient, generator)
        result = self._solve_for(solution, "A", result.mT, generator).mT
        raw = self.raw_columns(solution)
        return result if raw is None else torch.where(raw[..., None, :], gradient, result)

    def _solve_for(
        self, solution: Tensors, side: str, right: Tensor, generator: torch.Generator
    ) -> Tensor:
        if self.forms[side] == "identity":
            return right
        inverse, device = solution[f"{side}.inverse"], self.device
        if self.forms[side] == "diagonal":
            return inverse[..., None] * right
        return thermodynamic.time_average(
            inverse,
            solution[f"{side}.spread"],
            right,
            bits_in=device.bits_in,
            bits_out=device.bits_out,
            noise=device.noise,
            generator=generator,
        )


class Readout(Transform):
    """Puts what a device has answered in the place of its mean."""

    draws = True

    def __call__(self, gradient: Tensor, at: LayerStep) -> Tensor:
        """See :meth:`Transform.__call__`."""
        return gradient

    def after(self, update: Tensor, gradient: Tensor, at: LayerStep) -> Tensor:
        """See :meth:`Transform.after`."""
        if not isinstance(at.block, LinearSystemsBlock) or at.solution is None:
            return update
        return at.block.read_out(at.solution, gradient, at.generator())
