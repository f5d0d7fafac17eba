"""EKFAC as a method: its options, and the block of each kind of layer."""

from __future__ import annotations

from dataclasses import dataclass

from kronfac.adaptive.relative import Relative
from kronfac.layers import Layer
from kronfac.methods.ekfac.block import EKFACBlock, Moments
from kronfac.methods.kfac.block import KFACBlock
from kronfac.methods.kfac.method import Sharing, check_power
from kronfac.methods.kfac.unit_wise import UnitWiseBlock
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import Options, check_choice, check_count, check_fraction
from kronfac.protocol.block import Block
from kronfac.protocol.method import Defaults, Method

#: Weight of the old moments at each step if they are those of gradients: those of about 20 steps.
GRADIENT_DECAY = 0.95


@dataclass(frozen=True, kw_only=True)
class EKFACMethod(Method):
    """K-FAC with corrected eigenvalues: second moments of gradients in its eigenbasis.

    George, Laurent, Bouthillier, Ballas and Vincent (2018), "Fast Approximate Natural Gradient Descent
    in a Kronecker-factored Eigenbasis". With K-FAC's ``A = Q_A v_A Q_Aᵀ`` and ``G = Q_G v_G Q_Gᵀ`` the
    step is ``Q_G [(Q_Gᵀ V Q_A) / (S + γ)] Q_Aᵀ``, where K-FAC has ``v_G v_Aᵀ`` for S. With exact moments
    ``S = E[(Q_Gᵀ U Q_A)²]`` over the gradients U of samples, no other diagonal in this basis is nearer
    to the layer's Fisher, and the trace is right.

    The basis is renewed every ``refresh_every`` steps, its factors every ``factor_every``, and S as often
    as ``moments`` says. When the basis changes, S becomes the diagonal, in the new one, of what it stood
    for. (Public code starts again from ``v_G v_Aᵀ``.) Before there are moments, S is K-FAC's.

    Args:
        moments: ``"sample"`` takes S from each sample's gradient on factor steps, exactly. Inputs
            and output gradients of the batch are then held until the step. ``"gradient"`` takes the
            squares of the batch's gradient at every step, which holds nothing and sends nothing. Their
            scale depends on how much samples agree, so only their proportions are used: S has the trace
            of ``G ⊗ A``, and damping means what it means in K-FAC. (Public code multiplies by the batch
            size instead, which is right where the mean gradient is zero, and too much elsewhere.) The
            average starts from K-FAC's eigenvalues. They are the loss's gradients, whatever ``fisher``
            says.
        moments_decay: weight of the old moments at each update; by default ``decay`` for those of
            samples, and 0.95 for those of gradients.
        sharing: ``"expand"`` treats shared positions as samples in the factors; moments of samples are of
            whole gradients, with all correlations between positions. ``"reduce"`` sums over positions
            first, in the moments as well: cheaper, and exact with one position a sample.
        power: exponent p of ``(S + γ)⁻ᵖ``; 1/2 with ``moments="gradient"`` resembles Adam in a basis.
        max_dim: a side wider than this keeps its own basis.

    S is as large as the weight. Norms have K-FAC's exact block. An embedding's tokens keep their own
    axes, and those never seen pass their raw gradient. Layers whose rows cannot be told apart by sample
    (flattened tokens, inputs broadcast over the batch) have K-FAC's eigenvalues if moments are those of
    samples. ``fisher="forward"`` has no output gradients and is refused.
    """

    defaults = Defaults(damping=Relative(0.1))

    moments: Moments = "sample"
    moments_decay: float | None = None
    sharing: Sharing = "expand"
    power: float = 1.0
    max_dim: int = 8192

    def __post_init__(self) -> None:
        check_choice("moments", self.moments, ("sample", "gradient"))
        if self.moments_decay is not None:
            check_fraction("moments_decay", self.moments_decay)
        check_choice("sharing", self.sharing, ("expand", "reduce"))
        check_count("max_dim", self.max_dim)
        check_power(self.power)

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        check_power(self.power, options)
        check_gradients(self.name, options)

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        if layer.unit_wise:
            return UnitWiseBlock(
                layer.matrix_shape, layer.factor_dtype, per_sample=grouped, power=self.power
            )
        if not grouped and self.moments == "sample":
            return self._plain(layer)
        return self._moments(layer, grouped)

    def _plain(self, layer: Layer) -> Block:
        """K-FAC, where no sample has a gradient of its own."""
        return KFACBlock(
            layer.matrix_shape,
            layer.factor_dtype,
            solver="eigen",
            power=self.power,
            max_dim=self.max_dim,
            output_factor=True,
            per_sample=False,
            picks_columns=layer.picks_columns,
        )

    def _moments(
        self, layer: Layer, grouped: bool, kind: type[EKFACBlock] = EKFACBlock
    ) -> EKFACBlock:
        decay = GRADIENT_DECAY if self.moments == "gradient" else None
        return kind(
            layer.matrix_shape,
            layer.factor_dtype,
            moments=self.moments,
            decay=decay if self.moments_decay is None else self.moments_decay,
            power=self.power,
            max_dim=self.max_dim,
            per_sample=grouped and self.sharing == "reduce" and not layer.picks_columns,
            picks_columns=layer.picks_columns,
        )


def check_gradients(name: str, options: Options) -> None:
    """Raise if there are no output gradients for a method that cannot do without them."""
    if options.fisher == "forward":
        raise ValueError(
            f"fisher='forward' observes no output gradients, which {name} needs; choose "
            "fisher='empirical', 'mc' or 'exact', or kronfac.KFAC."
        )


EKFAC = register_method(EKFACMethod)
