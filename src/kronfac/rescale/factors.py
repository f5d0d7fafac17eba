"""How long a preconditioned step may be. Everything stays on the device."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronfac.linalg.batching import MAX_ELEMENTS
from kronfac.linalg.orthogonal import nearest_orthogonal
from kronfac.options.config import Rule

#: Norms scale whole channels: their steps are this much shorter than those of matrices.
CHANNELS = 0.1


@dataclass
class Update:
    """A layer's step: ``before`` and ``after`` preconditioning, ``[*b, d_out, d_in]``.

    ``rates`` are the learning rates of the matrix's columns: one number, or two when the bias, the
    last column, is in a parameter group with a rate of its own. ``raw`` marks columns that keep their
    gradient whatever the others do, ``moving`` those that have one at this step, if that matters.
    """

    before: Tensor
    after: Tensor
    rates: tuple[float | Tensor, ...]
    raw: Tensor | None = None
    moving: Tensor | None = None

    def times(self, factor: float | Tensor) -> Tensor:
        """The step at another length."""
        scaled = self.after if isinstance(factor, float) and factor == 1 else self.after * factor
        return scaled if self.raw is None else torch.where(self.raw, self.before, scaled)

    def known(self, matrix: Tensor) -> Tensor:
        """``before`` or ``after`` without the raw columns."""
        return matrix if self.raw is None else matrix.masked_fill(self.raw, 0)


def own_factors(rules: Sequence[Rule], updates: Sequence[Update]) -> list[float | Tensor]:
    """Factors of the rules that look at each layer alone."""
    grafted = [u for rule, u in zip(rules, updates, strict=True) if rule == "graft"]
    grafts = iter(graft_factors(grafted))
    factors: list[float | Tensor] = []
    for rule, update in zip(rules, updates, strict=True):
        if rule == "graft":
            factors.append(next(grafts))
        elif rule in ("unit", "orthogonal"):
            factors.append(unit_factor(update))
        elif rule == "channels":
            factors.append(channel_factor(update))
        else:
            factors.append(column_factors(update) if rule == "columns" else 1.0)
    return factors


def channel_factor(update: Update) -> Tensor:
    """Factor that gives the weights and biases of a norm a root mean square of :data:`CHANNELS`."""
    norm = update.after.norm()
    return _ratio(torch.full_like(norm, CHANNELS * math.sqrt(update.after.numel())), norm)


def graft_factors(updates: Sequence[Update]) -> list[Tensor]:
    """Factors that give each step the norm that its gradient had, ``‖g‖/‖v‖``."""
    factors: dict[int, Tensor] = {}
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, update in enumerate(updates):
        alike.setdefault((update.after.device, update.after.dtype), []).append(index)
    for indices in alike.values():
        chosen = [updates[index] for index in indices]
        matrices = [update.known(update.before) for update in chosen]
        matrices += [update.known(update.after) for update in chosen]
        before, after = torch.stack(torch._foreach_norm(matrices)).chunk(2)
        factors |= dict(zip(indices, _ratio(before, after).unbind(), strict=True))
    return [factors[index] for index in range(len(updates))]


def unit_factor(update: Update) -> Tensor:
    """Factor that gives each ``m × n`` matrix Muon's norm, ``√min(m, n)·√max(1, m/n)``."""
    rows, columns = update.after.shape[-2:]
    target = math.sqrt(min(rows, columns) * max(1.0, rows / columns))
    norm = update.after.flatten(-2).norm(dim=-1)[..., None, None]
    return _ratio(torch.full_like(norm, target), norm)


def column_factors(update: Update) -> Tensor:
    """Factors that give each column, a token's vector, a root mean square of 1.

    A token that is not in the batch stays where it is: momentum would go on with the same long step.
    """
    norms = update.known(update.after).norm(dim=-2, keepdim=True)
    if update.moving is not None:
        norms = norms * update.moving
    norms = norms.where(norms > torch.finfo(norms.dtype).tiny ** 0.5, 0)
    return _ratio(torch.full_like(norms, math.sqrt(update.after.shape[-2])), norms)


def orthogonal_steps(
    rules: Sequence[Rule], updates: Sequence[Update], narrow: bool = False
) -> list[Update]:
    """The nearest orthogonal matrix in place of the steps with that rule; small equal ones together."""
    found: dict[int, Tensor] = {}
    alike: dict[Hashable, list[int]] = {}
    for index, (rule, update) in enumerate(zip(rules, updates, strict=True)):
        if rule != "orthogonal":
            continue
        after = update.after
        alone = index if after.numel() > MAX_ELEMENTS else None
        alike.setdefault((after.shape, after.dtype, after.device, alone), []).append(index)
    for indices in alike.values():
        steps = torch.stack([updates[index].known(updates[index].after) for index in indices])
        found |= dict(zip(indices, nearest_orthogonal(steps, narrow).unbind(), strict=True))
    return [
        replace(update, after=found[index]) if index in found else update
        for index, update in enumerate(updates)
    ]


def squared_step(updates: Sequence[Update]) -> Tensor:
    """``Σ lr²⟨v, u⟩`` over some layers: ``sᵀFs`` of the step s = lr·v in the damped curvature."""
    return sum((_step_size(update) for update in updates), start=torch.zeros((), device="cpu"))


def bounded_factor(total: Tensor, bound: float) -> Tensor:
    """``ν = min(1, √(bound / Σ lr²⟨v, u⟩))`` over all layers; 1 when the sum is not positive."""
    usable = total > 0
    safe = torch.where(usable, total, torch.ones_like(total))
    return torch.where(usable, (bound / safe).sqrt().clamp(max=1), torch.ones_like(total))


def _step_size(update: Update) -> Tensor:
    products = update.known(update.before) * update.after
    if len(update.rates) == 1:
        return products.sum() * update.rates[0] ** 2
    weight, bias = update.rates
    return products[..., :-1].sum() * weight**2 + products[..., -1].sum() * bias**2


def _ratio(target: Tensor, norm: Tensor) -> Tensor:
    """``target/norm``, and 0 where the norm is 0."""
    usable = norm > 0
    return torch.where(usable, target / torch.where(usable, norm, torch.ones_like(norm)), 0)
