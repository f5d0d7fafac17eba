"""HyLo: natural gradient among samples, of which each rank sends a few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.linalg.low_rank import interpolation, systematic_sample
from kronfac.linalg.solve import cholesky_inverse
from kronfac.methods.kfac.unit_wise import UnitWiseBlock
from kronfac.methods.sample_space.block import SampleBlock, UngroupedBlock
from kronfac.methods.sample_space.gradients import SummedGradients
from kronfac.methods.sample_space.method import MAX_BYTES, refuse_embeddings
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import Options, check_choice, check_count, is_real
from kronfac.protocol.block import Block, Given, Statistic, Tensors
from kronfac.protocol.method import Defaults, Method

Mode = Literal["kid", "kis"]
#: One mode, a function of the step number, or pairs of a step and the mode from there on.
ModeSchedule = Mode | Callable[[int], Mode] | Sequence[tuple[int, Mode]]
MODES = ("kid", "kis")


class HyLoBlock(SampleBlock):
    """``(F + αI)⁻¹ v ≈ (v - Uₛᵀ M Uₛ v / N) / α`` with some of the rows of U.

    Importance sampling (KIS): row i is chosen with probability ``πᵢ ∝ Kᵢᵢ`` and divided by ``√πᵢ``; then
    ``M = (Kₛ/N + αI)⁻¹``. Interpolation (KID): all rows are near ``T Uₛ``, and K is ``T Kₛ Tᵀ`` and a
    residual E; then ``M = R(I + Kₛ R/N)⁻¹`` with ``R = Tᵀ(E/N + αI)⁻¹T``, of each rank for itself.
    """

    def __init__(self, layer: Layer, max_bytes: int, rank: float, mode: ModeSchedule) -> None:
        super().__init__(layer, SummedGradients(layer.matrix_shape), max_bytes)
        self.rank = rank
        self.mode = mode
        self.draws = rank < 1 and mode != "kid"
        self.label = f"{mode if isinstance(mode, str) else 'kid, kis'}, rank {rank:g}"
        *batch, _, _ = self.shape
        #: The lower triangle of R, row by row; nothing where it is ``I/α``.
        residual = Statistic((*batch, 1), "compressed", combine="gather")
        self.statistics = {**self.gradients.statistics, "R": residual}
        self.solution_shapes = {
            **self.gradients.shapes,
            "inverse": (*batch, None, None),
            "scale": (1,) * len(self.shape),
        }

    def compress(self, given: Given) -> dict[str, Tensor]:
        """See :meth:`Block.compress`: this rank's own rows become a few."""
        rows = super().compress(given)
        samples = rows["a"].shape[-2]
        wanted = max(1, round(self.rank * samples))
        if wanted >= samples:
            return rows
        kernel = self.gradients.kernel(rows)
        if mode_at(self.mode, given.step) == "kis":
            return self._sample(rows, kernel, wanted, given)
        return self._interpolate(rows, kernel, wanted, given)

    def _sample(
        self, rows: Tensors, kernel: Tensor, wanted: int, given: Given
    ) -> dict[str, Tensor]:
        lengths = kernel.diagonal(dim1=-2, dim2=-1)
        start = torch.rand(
            lengths.shape[:-1], generator=given.rank_generator, dtype=torch.float64, device="cpu"
        )
        chosen, chances = systematic_sample(lengths, wanted, start.to(lengths.device))
        found = {name: _take(value, chosen) for name, value in rows.items()}
        # Of a sum over all rows, this one over the chosen rows is an unbiased estimate.
        return {**found, "g": found["g"] / chances.sqrt()[..., None]}

    def _interpolate(
        self, rows: Tensors, kernel: Tensor, wanted: int, given: Given
    ) -> dict[str, Tensor]:
        chosen, weights, residual = interpolation(kernel, wanted)
        identity = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
        inside = cholesky_inverse(residual / self.samples(given) + given.damping * identity)
        if inside is None:
            inside = identity / given.damping
        R = weights.mT @ inside @ weights
        lower = torch.tril_indices(wanted, wanted, device=R.device)
        found = {name: _take(value, chosen) for name, value in rows.items()}
        return {**found, "R": R[..., lower[0], lower[1]][..., None]}

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`. With ``R = C Cᵀ``, ``M = C(I + Cᵀ Kₛ C/N)⁻¹Cᵀ``."""
        rows = self.gradients.collect(given.means, 1 / math.sqrt(self.samples(given)))
        assert rows is not None
        kernel = self.gradients.kernel(rows)
        root, info = torch.linalg.cholesky_ex(self._residuals(given, kernel))
        if bool((info != 0).any()):
            return None
        identity = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
        inside = cholesky_inverse(identity + root.mT @ kernel @ root)
        if inside is None:
            return None
        scale = kernel.new_full((1,) * len(self.shape), 1 / given.damping)
        return {**rows, "inverse": root @ inside @ root.mT, "scale": scale}

    def _residuals(self, given: Given, kernel: Tensor) -> Tensor:
        """R of all ranks, block by block: ``I/α`` where a rank has sent nothing else."""
        full = torch.zeros_like(kernel)
        packed, row, entry = given.means.get("R"), 0, 0
        shards = given.shards["a"]
        for size, entries in zip(shards, given.shards.get("R") or [0] * len(shards), strict=True):
            block = full[..., row : row + size, row : row + size]
            if entries and packed is not None:
                lower = torch.tril_indices(size, size, device=kernel.device)
                values = packed[..., entry : entry + entries, 0]
                block[..., lower[0], lower[1]] = values
                block[..., lower[1], lower[0]] = values
            else:
                block.diagonal(dim1=-2, dim2=-1).fill_(1 / given.damping)
            row, entry = row + size, entry + entries
        return full

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`. A change of damping acts at the next refresh."""
        along = self.gradients.along(solution, gradient)[..., None]
        inside = (solution["inverse"] @ along).squeeze(-1)
        return (gradient - self.gradients.back(solution, inside)) * solution["scale"]


def _take(rows: Tensor, chosen: Tensor) -> Tensor:
    """Some rows ``[*b, r, d]`` of ``[*b, n, d]``."""
    return rows.gather(-2, chosen[..., None].expand(*chosen.shape, rows.shape[-1]))


def mode_at(mode: ModeSchedule, step: int) -> Mode:
    """The mode at a step."""
    if isinstance(mode, str):
        return mode
    if callable(mode):
        found = mode(step)
        check_choice(f"mode(step={step})", found, MODES)
        return found
    return [one for start, one in mode if start <= step][-1]


@dataclass(frozen=True, kw_only=True)
class HyLoMethod(Method):
    """HyLo: natural gradient among samples, with a low-rank sketch of each rank's own.

    Mu et al. 2022, "HyLo: A Hybrid Low-Rank Natural Gradient Descent Method". Row n of U is a sample's
    gradient of one layer, taken as ``(Σ g)(mean a)ᵀ`` over positions (exact where there is one),
    ``F = UᵀU/N`` and ``K = U Uᵀ = (a aᵀ)∘(g gᵀ)``:
        ``(F + αI)⁻¹ v = (v - Uᵀ (K/N + αI)⁻¹ U v / N) / α``.
    Each rank sends ``r = rank·n`` of its n rows a layer, ``r(d_in + d_out)`` numbers instead of
    ``d_in² + d_out²``, and ``r(r + 1)/2`` more with KID. With ``rank=1`` the step is exact.

    - ``"kis"``, importance sampling: rows are drawn with a probability that grows as ``‖a‖²‖g‖²``.
      Public code inverts the kernel of the rows as they were drawn. Here a row is divided by the root of
      its probability, which makes the sketch of F unbiased, and rows are drawn without replacement
      (systematic sampling), so that all of them give the exact step.
    - ``"kid"``, interpolative decomposition: the rows that span the others best, found by Cholesky with
      pivoting; what they miss enters the inner inverse. Public code takes the residual of a QR
      decomposition of K, which is not symmetric. Here the others are fitted by least squares in U, whose
      residual is, and K is kept exactly. Between ranks the residual is taken as zero, as in the paper.

    The paper uses KID in critical phases and KIS else. Its rule is not documented beyond lists of epochs,
    so the switch is a schedule of yours.

    It holds the rows of the newest batch, and those that all ranks have sent. Norms keep K-FAC's
    unit-wise Fisher; embeddings are not preconditioned. α is a number, no
    :class:`kronfac.Relative`: ranks need it before they have met.

    Args:
        rank: share of its rows that a rank sends, in (0, 1]; at least one row.
        mode: ``"kid"``, ``"kis"``, a function of the step number that returns one of them, or pairs such
            as ``[(0, "kid"), (2000, "kis")]``.
        max_bytes: most bytes of rows that one layer may keep of a rank's batch; more are refused.
    """

    defaults = Defaults(damping=1.0, factor_every=10, refresh_every=10, decay=0.0)

    rank: float = 0.1
    mode: ModeSchedule = "kid"
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        if not is_real(self.rank) or not 0 < self.rank <= 1:
            raise ValueError(
                f"rank={self.rank!r} must be a number in (0, 1]: 0.1 sends a tenth of the rows."
            )
        check_count("max_bytes", self.max_bytes)
        _check_mode(self.mode)

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        if options.fisher == "forward":
            raise ValueError(
                "HyLo is made of the gradients of each sample, which fisher='forward' does not observe; "
                "choose 'empirical', 'mc' or 'exact'."
            )

    def refusal(self, layer: Layer) -> str | None:
        """See :meth:`Method.refusal`."""
        return refuse_embeddings(layer)

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        if layer.unit_wise:
            return UnitWiseBlock(layer.matrix_shape, layer.factor_dtype, per_sample=grouped)
        if not grouped:
            return UngroupedBlock(layer, SummedGradients(layer.matrix_shape))
        return HyLoBlock(layer, self.max_bytes, self.rank, self.mode)


def _check_mode(mode: Any) -> None:
    if isinstance(mode, str):
        check_choice("mode", mode, MODES)
    elif not callable(mode) and not _is_schedule(mode):
        raise ValueError(
            f"mode={mode!r} is not supported; choose 'kid' or 'kis', a function of the step number "
            "that returns one, or pairs that begin at step 0: [(0, 'kid'), (2000, 'kis')]."
        )


def _is_schedule(mode: Any) -> bool:
    """Whether these are pairs of a step, each later than the one before, and a mode."""
    if not isinstance(mode, Sequence) or not all(isinstance(one, Sequence) for one in mode):
        return False
    if not mode or not all(len(one) == 2 and is_real(one[0]) and one[1] in MODES for one in mode):
        return False
    steps = [step for step, _ in mode]
    return steps[0] == 0 and steps == sorted(set(steps))


HyLo = register_method(HyLoMethod)
