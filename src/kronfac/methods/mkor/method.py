"""MKOR as a method: its options, and the block of each kind of layer."""

from __future__ import annotations

from dataclasses import dataclass

from kronfac.layers import Layer
from kronfac.methods.mkor.block import MKORBlock, Rule
from kronfac.methods.mkor.updates import Update
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import Options, check_choice, check_count, is_real
from kronfac.protocol.block import Block
from kronfac.protocol.method import Defaults, Method


@dataclass(frozen=True, kw_only=True)
class MKORMethod(Method):
    """MKOR: the inverses of K-FAC's factors, kept up to date by one mean vector a side at a time.

    Mozaffari, Li, Zhang & Mehri Dehnavi 2023, "MKOR: Momentum-Enabled Kronecker-Factor-Based Optimizer
    Using Rank-1 Updates" (NeurIPS). With ``v`` the mean of a layer's input rows, or the mean over samples
    of its output gradients (added up over positions), and ``V`` its gradient::

        S ← μS + (1-μ)vvᵀ,  J = S⁻¹ = (J - (1-μ)Jv(Jv)ᵀ/(μ + (1-μ)vᵀJv))/μ,  P = J_G V J_A

    An update takes d² operations instead of d³, and only vectors travel: ``d_in + d_out`` numbers a
    layer, since each rank updates its own inverses; in 16 bits with ``kronfac.Distribute(...,
    wire_dtype=torch.bfloat16)``. Each layer's step gets the norm of its gradient (``rescale="graft"``).

    Both inverses start from ``γ^-½ I``; ``damping=1`` is the paper's identity. A *stabilizer* keeps them
    bounded, since what no vector shows would grow as ``μ⁻ᵗ``: before an update, ``J ← ζJ + (1-ζ)γ^-½ I``
    if the largest entry of ``γ^½ J`` is more than ε. So γ bounds curvature from below, as damping does.

    Args:
        update: ``"exact"``, the inverse of the running average, as above; ``"paper"``,
            ``J ← μJ + (1-μ)/(μ²(1 + μ(1-μ)vᵀJv))·Jv(Jv)ᵀ``; or ``"code"``,
            ``J ← (J̃⁻¹ + vvᵀ)⁻¹`` with ``J̃ = μJ + (1-μ)I`` and entries of ``v`` within ±100.
        memory: μ, the weight of the old average at each update. (``decay`` has no effect.)
        threshold: ε of the stabilizer; ``math.inf`` turns it off.
        keep: ζ of the stabilizer.
        half: keep inverses in bfloat16. They are updated in single precision.
        hybrid: MKOR-H: a layer goes over to the plain gradient, for good, when the loss no longer falls
            as fast as it did.
        switch_below: the share of its best rate of decrease below which a layer goes over.
        max_dim: a side wider than this keeps only the diagonal of its factor.

    Where sources disagree. The form that the paper prints (``"paper"``; as it is quoted, no copy could be
    compared) adds where an inverse has to subtract: steps get *longer* along ``v``, it is not the inverse
    of an average, and small nets train worse with it than with SGD. The public code (``"code"``) averages
    the inverse with the identity and adds ``vvᵀ`` with weight 1. It leaves out the first vector, which is
    used here. Its stabilizer falls back to the identity as a whole (``keep=0``) beyond ε = 2; the
    defaults are that ε, and the ζ = 0.9 that it sets but does not reach. It computes in float16; here
    inverses are rounded, to bfloat16, only to be kept.

    When to go over to first order, no source says. Here each layer estimates how fast the loss falls
    without being given the loss: from one update to the next by ``½⟨V + V', W' - W⟩``, with ``W`` its
    weights and ``V`` its gradient now, ``W'`` and ``V'`` those before, which is exact for a quadratic
    loss of one batch. When the average of that over about ten updates is less than ``switch_below`` of
    its best, both inverses become ``γ^-½ I``. That takes four more matrices of the layer's size, and
    saves no time: the choice is made on the device.

    Limits. The mean output gradient is zero on average over the model's own labels, so the Fisher must be
    the empirical one. An embedding keeps the frequencies of its tokens, the exact diagonal, on its input
    side. Norms are not preconditioned. :class:`kronfac.Relative` damping is refused: inverses
    know no mean curvature.
    """

    defaults = Defaults(damping=1.0, factor_every=10, refresh_every=10, decay=0.0, rescale="graft")

    update: Update = "exact"
    memory: float = 0.95
    threshold: float = 2.0
    keep: float = 0.9
    half: bool = False
    hybrid: bool = False
    switch_below: float = 0.1
    max_dim: int = 8192

    def __post_init__(self) -> None:
        check_choice("update", self.update, ("exact", "paper", "code"))
        check_count("max_dim", self.max_dim)
        for name in ("half", "hybrid"):
            check_choice(name, getattr(self, name), (True, False))
        if not is_real(self.memory) or not 0 < self.memory < 1:
            raise ValueError(
                f"memory={self.memory!r} must be a number in (0, 1): 0.95, for example."
            )
        if not is_real(self.threshold) or not self.threshold >= 1:
            raise ValueError(
                f"threshold={self.threshold!r} must be a number of at least 1, which inverses start "
                "from, or math.inf for no stabilizer."
            )
        if not is_real(self.keep) or not 0 <= self.keep < 1:
            raise ValueError(f"keep={self.keep!r} must be a number in [0, 1): 0.9, for example.")
        if not is_real(self.switch_below) or not 0 < self.switch_below <= 1:
            raise ValueError(
                f"switch_below={self.switch_below!r} must be a number in (0, 1]: 0.1, for example."
            )

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        if options.fisher != "empirical":
            raise ValueError(
                f"MKOR needs the mean of the loss's own output gradients, which "
                f"fisher={options.fisher!r} does not observe; choose fisher='empirical'."
            )

    def refusal(self, layer: Layer) -> str | None:
        """See :meth:`Method.refusal`."""
        if layer.unit_wise:
            return "a norm has no mean input that it multiplies"
        return None

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        return MKORBlock(
            layer.matrix_shape,
            layer.factor_dtype,
            rule=Rule(
                self.update,
                self.memory,
                self.threshold,
                self.keep,
                self.switch_below if self.hybrid else None,
            ),
            max_dim=self.max_dim,
            half=self.half,
            picks_columns=layer.picks_columns,
        )


MKOR = register_method(MKORMethod)
