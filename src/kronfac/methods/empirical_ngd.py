"""Natural gradient descent with the exact empirical Fisher of each layer, solved among samples."""

from __future__ import annotations

from dataclasses import dataclass

from kronfac.adaptive.relative import Relative
from kronfac.methods.sample_space.block import SampleSpaceBlock
from kronfac.methods.sample_space.method import PerSampleMethod
from kronfac.optimizer.fronts import register_method
from kronfac.protocol.method import Defaults


@dataclass(frozen=True, kw_only=True)
class EmpiricalNGDMethod(PerSampleMethod):
    """Natural gradient with the exact Fisher block of each layer, from the newest batch.

    The identity behind it is old (Sherman, Morrison and Woodbury); Ren and Goldfarb 2019, "Efficient
    Subsampled Gauss-Newton and Natural Gradient Methods for Training Neural Networks", use it for nets.
    Row n of U is a sample's gradient of one layer, ``F = UᵀU/N`` and ``K = U Uᵀ``:
        ``(F + γI)⁻¹ v = (v - Uᵀ (K/N + γI)⁻¹ U v / N) / γ``.
    Nothing is approximated but the batch: F is that of the newest factor step and is not averaged.

    What it costs: rows of both sides wait until the step, ``N·S·(d_in + d_out)`` numbers a layer for N
    samples of S positions; then rows (or gradients) of all ranks are gathered where the layer is solved
    and stay in the solution. A refresh takes ``9n³`` operations for n samples, a step as many as the
    layer's part of a backward pass. Choose it for small batches and layers that are wider than those.

    ``damping=kronfac.Relative(ρ)`` is a share of the mean eigenvalue over all parameters. Most of F's
    eigenvalues are zero, and a gradient that is not of the newest batch (momentum, a stale solution) is
    divided by γ alone where they are: ρ is larger here than for K-FAC. It is larger still than for
    ``FNGD``, which has the same F: the default solves for every batch with its own F, along which the
    empirical Fisher makes steps longer the better a sample is fitted.

    Norms keep the unit-wise Fisher of K-FAC; embeddings are not preconditioned. A layer whose
    rows are not those of samples passes its raw gradient, with a note in the summary. With
    ``fisher="exact"`` F is the Gauss-Newton matrix, with ``"mc"`` an unbiased estimate of it; there are
    then as many rows a sample as draws.

    Args:
        keep: what is gathered of a layer: ``"rows"`` of both sides; ``"gradients"``, ``d_in·d_out``
            numbers a sample, which are fewer where S is large; ``"auto"``, which is gradients of
            convolutions and rows of the others.
        max_bytes: most bytes of rows that one layer may keep of a rank's batch; more are refused.
    """

    defaults = Defaults(damping=Relative(100.0), factor_every=1, refresh_every=1, decay=0.0)
    made = SampleSpaceBlock


EmpiricalNGD = register_method(EmpiricalNGDMethod)
