"""FNGD: the natural gradient as a weighted sum of per-sample gradients, whose weights are used again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.adaptive.relative import Relative
from kronfac.methods.sample_space.method import PerSampleMethod
from kronfac.methods.sample_space.weighted import WeightedBlock
from kronfac.optimizer.fronts import register_method
from kronfac.protocol.block import Given
from kronfac.protocol.method import Defaults


class FNGDBlock(WeightedBlock):
    """``c = (NγI + K)⁻¹ 1``, which makes ``Uᵀc`` the natural gradient."""

    def mean_eigenvalue(self, values: Tensor, samples: float) -> Tensor:
        """See :meth:`WeightedBlock.mean_eigenvalue`: that of F."""
        return values.sum() / (samples * self.gradients.size)

    def shift(self, damping: Tensor, samples: float) -> Tensor:
        """See :meth:`WeightedBlock.shift`."""
        return samples * damping

    def targets(self, given: Given, rows: int) -> Tensor:
        """See :meth:`WeightedBlock.targets`."""
        return torch.ones(rows)


@dataclass(frozen=True, kw_only=True)
class FNGDMethod(PerSampleMethod):
    """Fast natural gradient: a weighted sum of per-sample gradients with weights that are used again.

    Ou et al. 2024, "Inverse-Free Fast Natural Gradient Descent Method for Deep Learning". Row n of U is
    a sample's gradient of one layer, ``F = UᵀU/N``, ``K = U Uᵀ``:
        ``(F + γI)⁻¹ V = Uᵀ c`` with ``c = (NγI + K)⁻¹ 1``, and ``Δ = Σ cₙ gₙ aₙᵀ``.
    At a refresh these weights are exact, and the step is that of ``EmpiricalNGD``. In between they are
    used again without a kernel or a solve.

    The paper uses the weights of the first epoch in all others. How they are matched with the samples of
    batches that are shuffled is not documented, and an optimizer sees no sample numbers. What can be
    derived is used here: of a sample that was not seen the mean weight is the best guess, so that the
    gradient of a layer is multiplied by ``N c̄`` between refreshes. Steps then cost as much as those of
    SGD. With momentum the buffer gets the mean weight too, and a refresh adds what the single weights of
    its own batch change, ``Uᵀ(c - c̄)``.

    It keeps two matrices a layer, and rows of both sides until the step at factor steps, as
    ``EmpiricalNGD``. Norms keep K-FAC's unit-wise Fisher; embeddings are not preconditioned.

    Args:
        keep: what is gathered of a layer: ``"rows"``, ``"gradients"`` or ``"auto"``, as in
            ``EmpiricalNGD``.
        max_bytes: most bytes of rows that one layer may keep of a rank's batch; more are refused.
    """

    defaults = Defaults(damping=Relative(10.0), factor_every=10, refresh_every=10, decay=0.0)
    made = FNGDBlock
    of_the_loss = True


FNGD = register_method(FNGDMethod)
