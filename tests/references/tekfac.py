"""TEKFAC of one layer, slowly: EKFAC's moments in the basis of TKFAC's factors (Gao et al. 2020)."""

from __future__ import annotations

from torch import Tensor

from tests.references.ekfac import SlowEKFAC
from tests.references.nets import Seen
from tests.references.tkfac import trace_sums


class SlowTEKFAC(SlowEKFAC):
    """`Φ` and `δΨ` take the places of A and G."""

    def sums(self, seen: Seen) -> tuple[Tensor, Tensor]:
        _, Phi, Psi = trace_sums(seen)
        return Phi, Psi

    def curvature(self) -> tuple[Tensor, Tensor]:
        assert self.factors is not None
        Phi, Psi = self.factors
        return Phi / Phi.trace(), Psi / self.seen
