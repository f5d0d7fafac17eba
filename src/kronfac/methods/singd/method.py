"""``kronfac.SINGD``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kronfac.layers import Layer
from kronfac.methods.kfac.method import Sharing
from kronfac.methods.kfac.unit_wise import UnitWiseBlock
from kronfac.methods.singd.block import SINGDBlock
from kronfac.methods.singd.sparse import Hierarchical, Toeplitz
from kronfac.methods.singd.structures import (
    BlockDiagonal,
    Dense,
    Diagonal,
    LowerTriangular,
    Structure,
)
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import (
    Options,
    check_choice,
    check_count,
    check_momentum,
    check_positive,
)
from kronfac.protocol.block import Block
from kronfac.protocol.method import Defaults, Method

StructureName = Literal[
    "dense", "diagonal", "block-diagonal", "lower-triangular", "hierarchical", "toeplitz"
]
STRUCTURES = (
    *("dense", "diagonal", "block-diagonal", "lower-triangular"),
    *("hierarchical", "toeplitz"),
)
STATE_DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class SINGDMethod(Method):
    """Structured inverse-free natural gradient descent: K-FAC by products only, in little memory.

    Lin, Dangel, Eschenhagen, Neklyudov, Kristiadi, Turner and Makhzani (2024), Structured Inverse-Free
    Natural Gradient Descent: Memory-Efficient & Numerically-Stable KFAC. For dense matrices it is INGD:
    Lin, Duruisseaux, Leok, Nielsen, Khan and Schmidt (2023), Simplifying Momentum-based
    Positive-definite Submanifold Optimization with Applications to Deep Learning.

    It keeps roots of the inverse curvature, ``K Kᵀ ⊗ C Cᵀ ≈ (G ⊗ A + λI)⁻¹``, and moves them at every
    update of the statistics. With ``H_K = Π(KᵀAK)``, ``H_C = Π(CᵀGC)`` of the newest batch and
    ``τ(M) = tr M/d``::

        m_K ← α₁ m_K + ½ (τ(H_C) H_K + λ τ(CᵀC) Π(KᵀK) - I)      K ← K (I - β m_K)
        m_C ← α₁ m_C + ½ (τ(H_K) H_C + λ τ(KᵀK) Π(CᵀC) - I)      C ← C (I - β m_C)
        P = C Cᵀ V K Kᵀ

    ``Π`` projects on the structure, in which ``K``, ``m_K`` and ``H_K`` stay; no matrix is inverted or
    decomposed. Both roots start at the identity, so the first steps are those of the base optimizer.
    ``kfac_like=True`` is IKFAC: all four τ are 1 and α₁ = 0, and ``K Kᵀ`` follows
    ``((1 - β) A_before + β (A + λI))⁻¹`` up to O(β²). Its λ is added to each factor by itself.

    Where this differs from the paper and its public code:

    - ``lr_cov`` is 0.1, not 0.01. With an update every 10 steps the roots grow by ``1 + lr_cov`` at most,
      and 0.01 leaves them near the identity for the first thousand steps.
    - ``K (I - βm)`` may change signs and diverge if ``β‖m‖ > 1``, which the code leaves to a schedule of
      ``lr_cov``, or divides by the largest entry of ``m`` if asked to. Here β is lowered to
      ``β‖m‖ <= ½`` with a bound of the spectral norm, which guarantees regular roots and does nothing
      near the fixed point.
    - the code takes the blocks of a block-diagonal ``K`` for symmetric, which products of symmetric
      matrices are not; here ``Kᵀ`` is the transpose.
    - steps have the lengths of K-FAC's (``rescale="auto"``, by products too); the paper's are
      ``rescale=None``, whose rate has to be small at first, while roots are near the identity.
    - ``A`` and ``G`` are those of :class:`kronfac.KFAC`, so that λ has its meaning there.

    Norms keep K-FAC's matrix of each channel. Embeddings have a diagonal ``K``; tokens never seen pass
    their raw gradient.

    Limits: ``fisher="forward"`` is refused, and so is a damping that adapts itself, since λ is inside the
    roots and acts at the next updates. ``kronfac.Relative`` shares are those of the newest batch. Dense,
    triangular and diagonal matrices take the statistics of convolutions from whole maps; the others need
    their patches, which costs time and memory at each update.

    Args:
        structure: ``"dense"`` (``d²`` numbers a side), ``"lower-triangular"`` (half of them; as accurate,
            and no faster), ``"block-diagonal"``, ``"hierarchical"`` (a diagonal with two dense corners),
            ``"toeplitz"`` (constant along diagonals, by Fourier transforms) or ``"diagonal"`` (``d``
            numbers each). What travels between ranks has the same sizes.
        lr_cov: β, the step of the roots.
        alpha1: α₁, their momentum; 0 keeps none.
        kfac_like: the update of IKFAC, which ignores ``alpha1``.
        block_dim: width of the blocks of ``"block-diagonal"``, and of both corners of ``"hierarchical"``
            together.
        sharing: ``"expand"`` treats shared positions as samples, ``"reduce"`` sums over them first.
        max_dim: a side wider than this is diagonal where it would take ``d²`` numbers.
        state_dtype: ``"bfloat16"`` halves the memory of roots and momenta. Changes below a part in 500
            are then lost, so that roots stop within about ``1/(500·lr_cov)`` of where they would.
    """

    defaults = Defaults(damping=1e-3, factor_every=10, refresh_every=10)

    structure: StructureName = "dense"
    lr_cov: float = 0.1
    alpha1: float = 0.5
    kfac_like: bool = False
    block_dim: int = 32
    sharing: Sharing = "expand"
    max_dim: int = 8192
    state_dtype: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self) -> None:
        check_choice("structure", self.structure, STRUCTURES)
        check_positive("lr_cov", self.lr_cov)
        check_momentum("alpha1", self.alpha1)
        check_choice("kfac_like", self.kfac_like, (True, False))
        check_count("block_dim", self.block_dim)
        check_choice("sharing", self.sharing, ("expand", "reduce"))
        check_count("max_dim", self.max_dim)
        check_choice("state_dtype", self.state_dtype, tuple(STATE_DTYPES))

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        if options.fisher == "forward":
            raise ValueError(
                "fisher='forward' observes no gradients, and SINGD ties the roots of both sides of a "
                "layer to each other; choose fisher='empirical', 'mc' or 'exact'."
            )

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        shape, dtype = layer.matrix_shape, layer.factor_dtype
        if layer.unit_wise:
            return UnitWiseBlock(shape, dtype, per_sample=grouped)
        picks = layer.picks_columns
        structures = {
            "A": Diagonal(shape[-1]) if picks else self._structure(shape[-1]),
            "G": self._structure(shape[-2]),
        }
        return SINGDBlock(
            shape,
            dtype,
            structures,
            lr_cov=self.lr_cov,
            alpha1=self.alpha1,
            kfac_like=self.kfac_like,
            per_sample=grouped and self.sharing == "reduce" and not picks,
            picks_columns=picks,
            state_dtype=STATE_DTYPES[self.state_dtype],
        )

    def _structure(self, width: int) -> Structure:
        """The structure of a side of this width."""
        if self.structure in ("dense", "lower-triangular") and width > self.max_dim:
            return Diagonal(width)
        if self.structure == "block-diagonal":
            return BlockDiagonal(width, int(self.block_dim))
        if self.structure == "hierarchical":
            return Hierarchical(width, max(1, int(self.block_dim) // 2))
        plain: dict[str, type[Dense | Diagonal | LowerTriangular | Toeplitz]] = {
            "dense": Dense,
            "diagonal": Diagonal,
            "lower-triangular": LowerTriangular,
            "toeplitz": Toeplitz,
        }
        return plain[self.structure](width)


SINGD = register_method(SINGDMethod)
