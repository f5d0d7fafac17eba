"""TEKFAC: second moments of gradients in TKFAC's eigenbasis (Gao et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from kronfac.layers import Layer
from kronfac.methods.ekfac.block import EKFACBlock
from kronfac.methods.ekfac.method import EKFACMethod
from kronfac.methods.tkfac import TKFACBlock
from kronfac.optimizer.fronts import register_method
from kronfac.protocol.block import Block


class TEKFACBlock(EKFACBlock, TKFACBlock):
    """EKFAC's moments in the eigenbasis of TKFAC's factors; until there are any, its eigenvalues."""


@dataclass(frozen=True, kw_only=True)
class TEKFACMethod(EKFACMethod):
    """EKFAC in the eigenbasis of trace-restricted factors.

    Gao et al. (2020), "Eigenvalue-corrected Natural Gradient Based on a New Approximation". The step is
    ``Q_Ψ [(Q_Ψᵀ V Q_Φ) / (S + γ)] Q_Φᵀ`` with Φ and Ψ of :class:`kronfac.TKFAC`, whose rows count by
    the norms of both sides, and S of :class:`kronfac.EKFAC`.
    The trace is right twice: that of TKFAC, from which S starts, and that of exact moments.

    There are three cadences: ``factor_every`` for Φ and Ψ, ``refresh_every`` for the basis, and that
    of ``moments`` for S, which has an average of its own (``moments_decay``).

    Args:
        moments: ``"sample"``: exact moments, at every update of the factors. ``"gradient"``: proportions
            of the batch gradient's squares at every step, with the trace of TKFAC.
        moments_decay: weight of the old moments at each update; by default ``decay`` for those of
            samples, and 0.95 for those of gradients.
        sharing: ``"expand"`` treats shared positions as samples in the factors, ``"reduce"`` sums over
            positions first, in the moments as well.
        power: exponent p of ``(S + γ)⁻ᵖ``.
        max_dim: a side wider than this keeps its own basis.

    The paper fixes γ of dense layers, derives that of convolutions from a trace and scales the former by
    the latter; damping relative to each layer's curvature, the default, does that for all of them.
    Inputs and output gradients of the batch are held until the step, for the factors too. Embeddings, and
    layers whose rows cannot be told apart by sample, are EKFAC's: rows of an embedding have norm 1.
    ``fisher="forward"`` has no output gradients and is refused.
    """

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        if layer.unit_wise or layer.picks_columns or not grouped:
            return super().block(layer, grouped)
        return self._moments(layer, grouped, TEKFACBlock)


TEKFAC = register_method(TEKFACMethod)
