"""SINGD on one layer: roots ``K`` and ``C`` of the inverse, ``K Kᵀ ⊗ C Cᵀ ≈ (G ⊗ A + λI)⁻¹``, without it.

With ``H_K = Π(KᵀAK)`` and ``H_C = Π(CᵀGC)`` of the newest batch, and ``τ(M) = tr M/d``::

    m_K ← α₁ m_K + ½ (τ(H_C) H_K + λ τ(CᵀC) Π(KᵀK) - I)      K ← K (I - β m_K)
    m_C ← α₁ m_C + ½ (τ(H_K) H_C + λ τ(KᵀK) Π(CᵀC) - I)      C ← C (I - β m_C)
    P = C Cᵀ V K Kᵀ

``K (I - βm)`` begins the series of ``K exp(-βm)``, which is regular whatever ``m`` is. The truncated one
is regular only while ``β‖m‖ < 1``; beyond, it would change signs and grow. So ``β`` is lowered to
``β‖m‖ <= ½`` where needed, with a bound of the spectral norm that takes no decomposition: no update more
than halves a root, or makes it more than half as large again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kronfac.layers.rows import Rows
from kronfac.methods.singd.structures import Structure
from kronfac.protocol.block import (
    NOTHING,
    Block,
    Context,
    Cost,
    Given,
    Part,
    Shape,
    Statistic,
    Tensors,
    bytes_of,
)

#: How much of a root one update may change.
MAX_CHANGE = 0.5
#: The root that belongs to each factor, and the other factor.
ROOTS = {"A": "K", "G": "C"}
OTHER = {"A": "G", "G": "A"}


class SINGDBlock(Block):
    """The roots of one layer's inverse curvature, of a structure for each side."""

    knows_curvature = True

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        structures: Mapping[str, Structure],
        *,
        lr_cov: float,
        alpha1: float,
        kfac_like: bool,
        per_sample: bool = False,
        picks_columns: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        *batch, _, _ = shape
        self.shape = shape
        self.dtype = dtype
        self.structures = structures
        self.lr_cov = lr_cov
        self.alpha1 = 0.0 if kfac_like else alpha1
        self.kfac_like = kfac_like
        self.picks_columns = picks_columns
        self.keeps = "summed" if per_sample else "none"
        if not picks_columns:
            self.leaves_out = "samples" if per_sample else "rows"
        self.solution_dtype = state_dtype
        names = dict.fromkeys(one.name for one in structures.values())
        self.label = ", ".join(["inverse-free", *names])
        self.statistics: dict[str, Statistic] = {}
        self.solution_shapes: dict[str, Shape] = {}
        for side, structure in structures.items():
            root, whole = ROOTS[side], (*batch, *structure.shape)
            self.statistics |= self._observed(side, structure, tuple(batch))
            self.solution_shapes[root] = whole
            if self.alpha1:
                self.solution_shapes[f"{root}.momentum"] = whole

    def _observed(
        self, side: str, structure: Structure, batch: tuple[int, ...]
    ) -> dict[str, Statistic]:
        """What is observed on one side: the newest batch's alone."""
        inputs = side == "A"
        plain = Statistic((), "input" if inputs else "output", degree=0 if inputs else 2, decay=0.0)
        found = {
            side: replace(
                plain,
                shape=(*batch, *structure.observed_shape),
                symmetric=structure.symmetric,
                occurrences=inputs and self.picks_columns,
                basis=(ROOTS[side],) if structure.through_root else (),
            )
        }
        if structure.through_root:  # relative damping needs the trace of the factor itself
            found[f"{side}.trace"] = replace(plain, shape=(*batch, 1))
        return found

    # --- observing ------------------------------------------------------------------------------

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_input`."""
        return self._observe("A", inputs, context)

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_output`."""
        return self._observe("G", outputs, context)

    def _observe(self, side: str, rows: Rows, context: Context) -> dict[str, Tensor]:
        structure = self.structures[side]
        if not structure.through_root:
            return {side: structure.observe(rows, None)}
        root = None if context.solution is None else context.solution[ROOTS[side]]
        trace = rows.squares().sum(-1, keepdim=True)
        return {side: structure.observe(rows, root), f"{side}.trace": trace}

    # --- solving --------------------------------------------------------------------------------

    @property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`: each side needs the other's trace, at every update."""
        statistics, solution = tuple(self.statistics), tuple(self.solution_shapes)
        return {"": Part(statistics, solution, self.cost.refresh_flops, every="factor")}

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`: one update of both roots; none without both statistics."""
        if given.previous is None:
            before = self._start(next(iter(given.means.values())))
        else:
            before = self._widened(given.previous)
        result = before
        if all(side in given.means for side in self.structures):
            result = self._finite_or(before, self._update(before, given))
        if self.picks_columns:
            # What was never seen is known by a root of zero.
            seen = given.means["A"] > 0
            result |= {name: result[name] * seen for name in result if name[0] == "K"}
        narrow = self.solution_dtype or self.dtype
        return {name: value.to(narrow) for name, value in result.items()}

    def _start(self, like: Tensor) -> dict[str, Tensor]:
        """Identities, and momenta of zero."""
        batch, found = self.shape[:-2], {}
        for side, structure in self.structures.items():
            root = structure.identity(like).expand(*batch, *structure.shape).clone()
            found[ROOTS[side]] = root
            if self.alpha1:
                found[f"{ROOTS[side]}.momentum"] = torch.zeros_like(root)
        return found

    def _widened(self, solution: Tensors) -> dict[str, Tensor]:
        """A solution in the precision of statistics; tokens that were never seen start at one."""
        wide = {name: solution[name].to(self.dtype) for name in self.solution_shapes}
        if self.picks_columns:
            wide["K"] = wide["K"].masked_fill(wide["K"] == 0, 1.0)
        return wide

    def _update(self, before: Tensors, given: Given) -> dict[str, Tensor]:
        curvature, inner, averages = {}, {}, {}
        for side, structure in self.structures.items():
            root = before[ROOTS[side]]
            curvature[side] = structure.curvature(given.means[side], root)
            inner[side] = structure.inner(root)
            averages[side] = self._mean_diagonal(side, given)
        damping = self._damping(averages, given)
        updated: dict[str, Tensor] = {}
        for side, structure in self.structures.items():
            weight, shift = torch.ones_like(damping[side]), damping[side]
            if not self.kfac_like:
                other, name = self.structures[OTHER[side]], OTHER[side]
                weight = other.mean_diagonal(curvature[name])
                shift = shift * other.mean_diagonal(inner[name])
            wanted = structure.spread(weight) * curvature[side]
            wanted = wanted + structure.spread(shift) * inner[side]
            updated |= self._move(side, before, (wanted - structure.identity(wanted)) / 2)
        return updated

    def _mean_diagonal(self, side: str, given: Given) -> Tensor:
        """``tr A/d`` of a factor, ``[*b]``."""
        structure = self.structures[side]
        if structure.through_root:
            return given.means[f"{side}.trace"][..., 0] / structure.width
        mean = structure.observed_mean_diagonal(given.means[side])
        if (
            side == "A" and self.picks_columns
        ):  # each row is one token, however rare tokens are counted
            return torch.full_like(mean, 1 / structure.width).where(mean > 0, 0.0)
        return mean

    def _damping(self, averages: Mapping[str, Tensor], given: Given) -> dict[str, Tensor]:
        """λ for each side, ``[*b]``. Relative to a curvature that is zero it is 1, and roots stay."""
        share = given.damping
        if not given.relative:
            return {side: torch.full_like(mean, share) for side, mean in averages.items()}
        product = averages["A"] * averages["G"]
        found = dict.fromkeys(averages, share * product)
        if self.kfac_like:
            found = {side: math.sqrt(share) * mean for side, mean in averages.items()}
        return {side: torch.where(product > 0, one, 1.0) for side, one in found.items()}

    def _move(self, side: str, before: Tensors, wanted: Tensor) -> dict[str, Tensor]:
        """``m ← α₁m + wanted`` and ``K ← K - βKm``."""
        structure, name = self.structures[side], ROOTS[side]
        root, momentum = before[name], wanted
        if self.alpha1:
            momentum = self.alpha1 * before[f"{name}.momentum"] + wanted
        tiny = torch.finfo(momentum.dtype).tiny
        rate = (MAX_CHANGE / structure.bound(momentum).clamp_min(tiny)).clamp_max(self.lr_cov)
        moved = root - structure.spread(rate) * structure.times(root, momentum)
        return {name: moved, f"{name}.momentum": momentum} if self.alpha1 else {name: moved}

    def _finite_or(self, before: Tensors, after: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An update, or what was before where a number of it has overflowed."""
        batch = len(self.shape) - 2
        fits = [torch.isfinite(value).flatten(batch).all(-1) for value in after.values()]
        kept = torch.stack(fits).all(0)
        found = {}
        for name, value in after.items():
            flags = kept.reshape(*kept.shape, *([1] * (value.dim() - batch)))
            found[name] = torch.where(flags, value, before[name])
        return found

    # --- applying -------------------------------------------------------------------------------

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`; the roots have their damping in them."""
        return torch.ones((), dtype=self.dtype, device=solution["K"].device)

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`: ``C Cᵀ V K Kᵀ``."""
        root, left = (solution[name].to(gradient.dtype) for name in ("K", "C"))
        result = self.structures["A"].apply(gradient, root)
        result = self.structures["G"].apply(result.mT, left).mT
        raw = self.raw_columns(solution)
        return result if raw is None else torch.where(raw[..., None, :], gradient, result)

    def raw_columns(self, solution: Tensors) -> Tensor | None:
        """See :meth:`Block.raw_columns`."""
        return solution["K"] == 0 if self.picks_columns else None

    @property
    def signature(self) -> Hashable:
        """See :attr:`Block.signature`."""
        forms = tuple((one.name, one.shape) for one in self.structures.values())
        kind = SINGDBlock, self.shape, self.dtype, self.solution_dtype
        return *kind, forms, self.picks_columns, bool(self.alpha1)

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`: four products of roots an update, two by each root a step."""
        *batch, d_out, d_in = self.shape
        blocks = math.prod(batch)
        rows = {"A": d_out, "G": d_in}
        refresh = precondition = 0
        for side, structure in self.structures.items():
            refresh += 4 * structure.flops(structure.width)
            precondition += 2 * structure.flops(rows[side])
        dtype = self.solution_dtype or self.dtype
        return Cost(
            refresh_flops=blocks * refresh,
            precondition_flops=blocks * precondition,
            statistics_bytes=bytes_of((one.shape for one in self.statistics.values()), self.dtype),
            solution_bytes=bytes_of(self.solution_shapes.values(), dtype),
        )
