"""iEF: the improved empirical Fisher, whose step lowers each sample's loss by what it can be lowered."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kronfac.adaptive.relative import Relative
from kronfac.layers.rows import Rows
from kronfac.methods.sample_space.method import PerSampleMethod
from kronfac.methods.sample_space.weighted import WeightedBlock
from kronfac.optimizer.fronts import register_method
from kronfac.protocol.block import NOTHING, Context, Given, Statistic
from kronfac.protocol.method import Defaults


class IEFBlock(WeightedBlock):
    """``c = (K + λI)⁻¹ s`` with s the squared length of each sample's gradient at the outputs."""

    further = {"s": Statistic((1,), "output", degree=2, combine="gather")}  # noqa: RUF012

    def observe_pair(
        self, inputs: Rows, outputs: Rows, context: Context = NOTHING
    ) -> dict[str, Tensor]:
        """See :meth:`Block.observe_pair`."""
        assert context.output_gradient is not None
        lengths = context.output_gradient.flatten(1).to(self.dtype).square().sum(1, keepdim=True)
        return {**super().observe_pair(inputs, outputs), "s": lengths}

    def mean_eigenvalue(self, values: Tensor, samples: float) -> Tensor:
        """See :meth:`WeightedBlock.mean_eigenvalue`: that of K."""
        return values.mean()

    def shift(self, damping: Tensor, samples: float) -> Tensor:
        """See :meth:`WeightedBlock.shift`."""
        return damping

    def targets(self, given: Given, rows: int) -> Tensor:
        """See :meth:`WeightedBlock.targets`."""
        return given.means["s"].squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class IEFMethod(PerSampleMethod):
    """The improved empirical Fisher (iEF), layer by layer.

    Wu et al. 2024, "An Improved Empirical Fisher Approximation for Natural Gradient Descent". Row n of U
    is a sample's gradient of one layer, ``K = U Uᵀ`` and ``sₙ = ‖∂lₙ/∂zₙ‖²`` at the model's outputs z:
        ``Δ = Uᵀ (K + λI)⁻¹ s``.
    The natural gradient with the empirical Fisher, ``s = 1``, lowers every sample's loss by the same
    amount, which takes the longest steps for samples that are fitted already. Here sample n is lowered by
    ``sₙ``. For a model with one output and squared loss ``½(z - y)²`` that is the Gauss-Newton step as λ
    goes to 0; other losses are taken to have curvature 1 at the outputs, and c times the loss has c times
    the step.

    λ is in units of squared gradients; ``damping=kronfac.Relative(ρ)`` makes it ρ times the mean
    eigenvalue of K. The step takes the place of the gradient instead of preconditioning it: written as
    ``Δ = N c̄ V + Uᵀ(c - c̄)`` with weights ``c = (K + λI)⁻¹ s``, its first term follows whatever gradient
    is there, with momentum the buffer, and its second is of the newest batch. Between refreshes only the
    first is known: keep ``factor_every=refresh_every=1``. Clipping acts on the first term.

    It needs ``optimizer.observe(outputs)`` between forward and backward. It keeps two matrices a layer,
    and rows of both sides until the step, as ``EmpiricalNGD``. Norms keep K-FAC's unit-wise Fisher;
    embeddings are not preconditioned.

    Args:
        keep: what is gathered of a layer: ``"rows"``, ``"gradients"`` or ``"auto"``, as in
            ``EmpiricalNGD``.
        max_bytes: most bytes of rows that one layer may keep of a rank's batch; more are refused.
    """

    defaults = Defaults(damping=Relative(1.0), factor_every=1, refresh_every=1, decay=0.0)
    made = IEFBlock
    of_the_loss = True

    @property
    def needs_observe(self) -> bool:
        """See :attr:`Method.needs_observe`."""
        return True


IEF = register_method(IEFMethod)
