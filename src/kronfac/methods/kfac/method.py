"""K-FAC as a method: its options, and the block of each kind of layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kronfac.adaptive.relative import Relative
from kronfac.layers import Layer
from kronfac.methods.kfac.block import KFACBlock, choose_solver
from kronfac.methods.kfac.block_diagonal import BlockDiagonalBlock, BlockDim, pieces_of
from kronfac.methods.kfac.separable import SeparableBlock, applies
from kronfac.methods.kfac.thermodynamic import (
    CovarianceBlock,
    LinearSystemsBlock,
    Readout,
    Thermodynamic,
)
from kronfac.methods.kfac.unit_wise import UnitWiseBlock
from kronfac.options.config import Options, check_choice, check_count, is_real
from kronfac.protocol.block import Block
from kronfac.protocol.method import Defaults, Method
from kronfac.protocol.transform import Transform

Sharing = Literal["expand", "reduce"]
SolverOption = (
    Literal["auto", "eigen", "separable", "cholesky", "newton-schulz", "thermodynamic"]
    | Thermodynamic
)
SOLVERS = ("auto", "eigen", "separable", "cholesky", "newton-schulz", "thermodynamic")


@dataclass(frozen=True, kw_only=True)
class KFACMethod(Method):
    """Options of :class:`kronfac.KFAC`.

    ``output_factor`` is false if ``G = I``, and ``hides_form`` true if steps are made orthogonal and
    damping is relative: ``solver="auto"`` then takes two products a step, by the separable form.
    """

    defaults = Defaults(damping=Relative(0.1))

    sharing: Sharing = "expand"
    solver: SolverOption = "auto"
    power: float = 1.0
    max_dim: int = 8192
    block_dim: BlockDim = "auto"
    output_factor: bool = True
    hides_form: bool = False

    def __post_init__(self) -> None:
        check_choice("sharing", self.sharing, ("expand", "reduce"))
        if not isinstance(self.solver, Thermodynamic):
            check_choice("solver", self.solver, SOLVERS)
        check_count("max_dim", self.max_dim)
        check_block_dim(self.block_dim, self.solver)
        check_power(self.power)
        if self.power != 1 and self.solver not in ("auto", "eigen"):
            raise ValueError(
                f"power={self.power!r} needs eigenvalues, which solver={self.solver!r} does not find; "
                "choose solver='eigen'."
            )

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        check_power(self.power, options)

    def refusal(self, layer: Layer) -> str | None:
        """See :meth:`Method.refusal`."""
        if not self.output_factor and layer.unit_wise:
            return "fisher='forward' observes no gradients, and its inputs alone show nothing"
        return None

    @property
    def device(self) -> Thermodynamic | None:
        """The thermodynamic computer that solves, if one does."""
        if isinstance(self.solver, Thermodynamic):
            return self.solver
        return Thermodynamic() if self.solver == "thermodynamic" else None

    def transforms(self) -> tuple[Transform, ...]:
        """See :meth:`Method.transforms`."""
        return (Readout(),) if self.device is not None and self.device.method == 2 else ()

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        if layer.unit_wise:
            return UnitWiseBlock(
                layer.matrix_shape, layer.factor_dtype, per_sample=grouped, power=self.power
            )
        common: dict[str, Any] = {
            "power": self.power,
            "max_dim": self.max_dim,
            "output_factor": self.output_factor,
            "per_sample": grouped and self.sharing == "reduce" and not layer.picks_columns,
            "picks_columns": layer.picks_columns,
        }
        shape, dtype = layer.matrix_shape, layer.factor_dtype
        if self.device is not None:
            made = CovarianceBlock if self.device.method == 1 else LinearSystemsBlock
            return made(shape, dtype, device=self.device, **common)
        pieces = self._pieces(layer)
        if pieces:
            return BlockDiagonalBlock(shape, dtype, pieces=pieces, bias=layer.bias_trains, **common)
        solver = self._solver(max(shape[-2:]))
        if solver == "separable":
            if applies(shape, self.max_dim, self.output_factor) and not layer.picks_columns:
                return SeparableBlock(shape, dtype, **common)
            solver = "eigen"  # two products at most
        return KFACBlock(shape, dtype, solver=solver, **common)

    def _pieces(self, layer: Layer) -> dict[str, int]:
        """Into how many blocks the sides of a layer are cut, if they are."""
        if self.block_dim == "auto" and not (self.hides_form and self.solver == "auto"):
            return {}
        pieces = pieces_of(layer, self.block_dim, self.max_dim)
        return pieces if self.output_factor else {s: n for s, n in pieces.items() if s == "A"}

    def _solver(self, width: int) -> Any:
        """How a layer is solved whose wider side is this wide."""
        if self.power != 1:
            return "eigen"
        if self.solver == "auto" and self.hides_form and choose_solver(width) == "eigen":
            return "separable"
        return self.solver


def check_block_dim(block_dim: BlockDim, solver: SolverOption) -> None:
    """Raise unless sides can be cut like this, and solved then."""
    if block_dim is None or block_dim == "auto":
        return
    if isinstance(block_dim, str):
        raise ValueError(
            f"block_dim={block_dim!r} must be a number of units, 'auto', or None to cut no side."
        )
    check_count("block_dim", block_dim)
    if solver not in ("auto", "eigen", "separable"):
        raise ValueError(
            f"block_dim={block_dim!r} cuts sides into blocks that are decomposed, which "
            f"solver={solver!r} does not do; choose solver='eigen' or block_dim=None."
        )


def check_power(power: float, options: Options | None = None) -> None:
    """Raise unless this is an exponent that makes sense, with the engine's options too."""
    if not is_real(power) or not 0 < power <= 1:
        raise ValueError(f"power={power!r} must be a number in (0, 1]: 1 or 0.5, for example.")
    if power != 1 and options is not None and options.rescale == "quadratic":
        raise ValueError(
            f"power={power!r} does not minimise the quadratic model that rescale='quadratic' builds; "
            "choose another rescale, or power=1."
        )
