"""Thermodynamic natural gradient descent: what a noisy linear system has found after a finite time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.linalg.thermodynamic import normal_like
from kronfac.methods.kfac.block import KFACBlock
from kronfac.methods.kfac.unit_wise import UnitWiseBlock
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import Options, check_choice, check_count, check_non_negative, is_real
from kronfac.protocol.block import Block, Tensors
from kronfac.protocol.method import Defaults, Method
from kronfac.protocol.transform import LayerStep, Transform


class RelaxingBlock(Block):
    """A block that knows the eigenbasis of its damped curvature ``M``, in which entries relax alone."""

    @abstractmethod
    def _turn(self, solution: Tensors, matrix: Tensor) -> Tensor: ...

    @abstractmethod
    def _turn_back(self, solution: Tensors, turned: Tensor) -> Tensor: ...

    @abstractmethod
    def _damped(self, solution: Tensors, damping: float | Tensor) -> Tensor: ...

    def relax(
        self,
        solution: Tensors,
        damping: float | Tensor,
        start: Tensor,
        rest: Tensor,
        time: float,
        kicks: Tensor | None = None,
    ) -> Tensor:
        """``x₀ + (1 - e^{-Mt})(x_∞ - x₀) + √(M⁻¹(1 - e^{-2Mt})) z``, all ``[*b, d_out, d_in]``.

        ``kicks`` are normal numbers z times √κ₀. They are turned like the rest, so that the result does
        not depend on which eigenvectors were found where eigenvalues coincide.
        """
        rates = self._damped(solution, damping)
        turned = self._turn(solution, rest - start) * -torch.expm1(-rates * time)
        if kicks is not None:
            spread = (-torch.expm1(-2 * rates * time) / rates).sqrt()
            turned = turned + self._turn(solution, kicks) * spread
        return start + self._turn_back(solution, turned)


class TNGDBlock(KFACBlock, RelaxingBlock):
    """K-FAC's block of a layer, ``M = G ⊗ A + γI``."""


class UnitWiseTNGDBlock(UnitWiseBlock, RelaxingBlock):
    """The matrices of a norm's channels, ``M_c = F_c + γI``."""


class Relaxation(Transform):
    """Puts the state at a finite time in the place of the one at rest, the natural gradient."""

    def __init__(self, time: float, warm: bool, noise: float) -> None:
        self.time = time
        self.warm = warm
        self.noise = noise
        self.draws = noise > 0

    def buffer_shapes(self, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        """See :meth:`Transform.buffer_shapes`: the last state, if the next one starts there."""
        return {"estimate": layer.matrix_shape} if self.warm else {}

    def __call__(self, gradient: Tensor, at: LayerStep) -> Tensor:
        """See :meth:`Transform.__call__`."""
        return gradient

    def after(self, update: Tensor, gradient: Tensor, at: LayerStep) -> Tensor:
        """See :meth:`Transform.after`."""
        block, solution = at.block, at.solution
        assert isinstance(block, RelaxingBlock)
        assert solution is not None
        start = at.buffers.get("estimate", gradient)
        kicks = normal_like(update, at.generator()) * self.noise**0.5 if self.draws else None
        state = block.relax(solution, at.damping, start, update, self.time, kicks)
        raw = block.raw_columns(solution)
        if raw is not None:
            state = torch.where(raw[..., None, :], update, state)
        if self.warm:  # a state that is not finite would stay so
            finite = torch.isfinite(state.sum())
            at.buffers["estimate"] = torch.where(finite, state, torch.zeros_like(state))
        return state


@dataclass(frozen=True, kw_only=True)
class TNGDMethod(Method):
    """Thermodynamic natural gradient descent, after Donatella et al. (2024).

    "Thermodynamic Natural Gradient Descent" lets an analog system relax to the natural gradient,
    ``dx = -(Mx - b) dt + N(0, 2κ₀ dt)`` with ``M = F + γI`` and ``b`` the gradient, and reads it after a
    time t, before it is at rest:

        ``x(t) = M⁻¹b + e^{-Mt}(x₀ - M⁻¹b)``, and with noise plus ``N(0, κ₀M⁻¹(1 - e^{-2Mt}))``.

    That lies between the start x₀ (t = 0; SGD, if it starts at the gradient) and the natural gradient
    (t → ∞): directions of high curvature are solved, the others still are where they began. The system
    is simulated by these equations, which are exact.

    The paper feeds the generalised Gauss-Newton matrix of the whole model to the system through its
    factors. Here ``M`` is block-diagonal over layers and each block is K-FAC's, ``G ⊗ A + γI``, whose
    eigenbasis makes the exponential a function of each entry; ``fisher="exact"`` or ``"mc"`` make ``G``
    that of the Gauss-Newton matrix, the default takes the gradients of the loss. Norms have their exact
    unit-wise blocks. Beside K-FAC's state it holds an estimate as large as the gradient, and a step takes
    four more products (six with noise). Layers of every width are decomposed.

    The paper trains with a learning rate of 0.01, a damping of 0.01 and t = 50; it found noise harmless
    for κ₀ < 0.01. Those are the defaults for damping and time, in units of the loss's curvature.
    Steps as they are read were not steady on small nets; they get the lengths of K-FAC's.

    Args:
        time: t, in units of the inverse curvature (the paper's time constant is 1); 0 stays at the
            start, and ``math.inf`` is the natural gradient.
        start: x₀: ``"previous"``, the last estimate (the gradient at first), or ``"gradient"``.
        noise: κ₀, the strength of the system's noise; random numbers resume from checkpoints.
        sharing: as for K-FAC.
        max_dim: as for K-FAC.
    """

    defaults = Defaults(damping=0.01, factor_every=1, refresh_every=10)

    time: float = 50.0
    start: Literal["previous", "gradient"] = "previous"
    noise: float = 0.0
    sharing: Literal["expand", "reduce"] = "expand"
    max_dim: int = 8192

    def __post_init__(self) -> None:
        if not is_real(self.time) or self.time < 0:
            raise ValueError(
                f"time={self.time!r} must be a number of at least 0; math.inf waits until all is at rest."
            )
        check_choice("start", self.start, ("previous", "gradient"))
        check_non_negative("noise", self.noise)
        check_choice("sharing", self.sharing, ("expand", "reduce"))
        check_count("max_dim", self.max_dim)

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        if options.fisher == "forward":
            raise ValueError(
                "fisher='forward' observes no gradients, from which TNGD takes one of its factors; "
                "choose 'empirical', 'mc' or 'exact'."
            )
        if options.rescale == "quadratic":
            raise ValueError(
                "rescale='quadratic' goes with steps that are solved, and TNGD reads them before; choose "
                "another rescale, or KFAC."
            )

    def transforms(self) -> tuple[Transform, ...]:
        """See :meth:`Method.transforms`."""
        return (Relaxation(self.time, self.start == "previous", self.noise),)

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        shape, dtype = layer.matrix_shape, layer.factor_dtype
        if layer.unit_wise:
            return UnitWiseTNGDBlock(shape, dtype, per_sample=grouped)
        return TNGDBlock(
            shape,
            dtype,
            solver="eigen",
            max_dim=self.max_dim,
            output_factor=True,
            per_sample=grouped and self.sharing == "reduce" and not layer.picks_columns,
            picks_columns=layer.picks_columns,
        )


TNGD = register_method(TNGDMethod)
