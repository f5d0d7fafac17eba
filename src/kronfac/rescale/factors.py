"""How long a preconditioned step may be. Everything stays on the device."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.layers.slices import Slice
from kronfac.linalg.orthogonal import nearest_orthogonal_all
from kronfac.options.config import Rule

#: Elements that are made orthogonal at once: 128 MB in single precision.
MAX_AT_ONCE = 2**25
#: Norms scale whole channels: their steps are this much shorter than those of matrices.
CHANNELS = 0.1


@dataclass
class Update:
    """Steps of layers of one kind: ``before`` and ``after`` preconditioning, ``[k, *b, d_out, d_in]``.

    ``rates`` are the learning rates of the matrices' columns: one number, or two when the bias, the
    last column, is in a parameter group with a rate of its own. ``raw`` marks columns that keep their
    gradient whatever the others do, ``moving`` those that have one at this step, if that matters; both
    are ``[k, 1, d_in]``, or ``moving`` is ``[k, b, 1, 1]`` and marks matrices. ``share`` is what the
    base's own momentum leaves of the length. Where a ``slice`` of the matrices is here, ``norms`` are
    those of the whole ones ``"before"`` and ``"after"``, ``[k]``, as far as the rule looks at them.
    """

    before: Tensor
    after: Tensor
    rates: tuple[float | Tensor, ...]
    raw: Tensor | None = None
    moving: Tensor | None = None
    share: float = 1.0
    slice: Slice | None = None
    norms: Mapping[str, Tensor] | None = None
    #: Whether ``after`` is memory of its own, to be written to.
    owned: bool = False

    def take(self, after: Tensor) -> None:
        """Use other steps from now on, in memory of their own, and forget what nobody looks at."""
        self.after, self.owned = after, True
        if self.raw is None:
            self.before = after

    def times(self, factor: float | Tensor) -> Tensor:
        """The steps at another length."""
        if self.owned:
            scaled = self.after.mul_(factor)
        else:
            one = isinstance(factor, float) and factor == 1
            scaled = self.after if one else self.after * factor
        return scaled if self.raw is None else torch.where(self.raw, self.before, scaled)

    def known(self, matrices: Tensor) -> Tensor:
        """``before`` or ``after`` without the raw columns."""
        return matrices if self.raw is None else matrices.masked_fill(self.raw, 0)

    def of_layers(self, values: Tensor) -> Tensor:
        """Numbers ``[k]``, one of each layer, in a shape that goes with the matrices."""
        return values.reshape(-1, *[1] * (self.after.dim() - 1))


def own_factors(
    rules: Sequence[Rule], updates: Sequence[Update], agreements: Sequence[Tensor | None]
) -> list[float | Tensor]:
    """Factors of the rules that look at each layer alone, times what each layer's gradients agree."""
    pairs = zip(rules, updates, strict=True)
    sliced = {i: _slice_factor(r, u) for i, (r, u) in enumerate(pairs) if u.norms is not None}
    rules = ["solved" if index in sliced else rule for index, rule in enumerate(rules)]
    found: dict[int, float | Tensor] = dict(enumerate(graft_factors(rules, updates)))
    found |= sliced
    sized = [index for index, rule in enumerate(rules) if rule in _TARGETS]
    for indices in _alike(updates, sized):
        own = [rules[index] for index in indices], [updates[index] for index in indices]
        factors = _norm_factors(*own, [agreements[index] for index in indices])
        found |= dict(zip(indices, factors, strict=True))
    for index, (rule, agreement) in enumerate(zip(rules, agreements, strict=True)):
        if rule == "columns":
            found[index] = column_factors(updates[index])
        if agreement is not None and rule not in _TARGETS:
            found[index] = updates[index].of_layers(agreement) * found[index]
    return [found[index] for index in range(len(updates))]


def _alike(updates: Sequence[Update], indices: Iterable[int]) -> Iterable[list[int]]:
    """Those of some updates that are in one place, and in one precision."""
    alike: dict[Hashable, list[int]] = {}
    for index in indices:
        after = updates[index].after
        alike.setdefault((after.device, after.dtype), []).append(index)
    return alike.values()


def _channels(update: Update) -> float:
    """A root mean square of :data:`CHANNELS` for the weights and biases of a norm."""
    return CHANNELS * math.sqrt(update.after[0].numel())


def _unit(update: Update) -> float:
    """Muon's norm of an ``m × n`` matrix, ``√min(m, n)·√max(1, m/n)``."""
    shape = tuple(update.after.shape)
    rows, columns = (update.slice.whole_shape(shape) if update.slice else shape)[-2:]
    return math.sqrt(min(rows, columns) * max(1.0, rows / columns))


#: Rules by which steps get a norm that depends on their shape: of each matrix, or of a norm's channels.
_TARGETS = {"unit": _unit, "orthogonal": _unit, "channels": _channels}


def _norm_factors(
    rules: Sequence[Rule], updates: Sequence[Update], agreements: Sequence[Tensor | None]
) -> list[Tensor]:
    """Factors that give steps these norms; all of them in a few operations."""
    parts: list[Tensor] = []
    weights: list[Tensor] = []
    shapes = []
    for rule, update, agreement in zip(rules, updates, agreements, strict=True):
        *batch, _, _ = update.after.shape
        if rule == "channels":
            batch[1:] = [1] * len(batch[1:])
        shapes.append((*batch, 1, 1))
        parts += (update.after if rule == "channels" else update.after.flatten(0, -3)).unbind()
        if agreement is not None:
            blocks = math.prod(batch[1:])
            weights.append(agreement if blocks == 1 else agreement.repeat_interleave(blocks))
    norms = torch.stack(torch._foreach_norm(parts))
    inverse = _ratio(torch.ones_like(norms), norms)
    if weights:
        inverse = inverse * torch.cat(weights)
    found = inverse.split([math.prod(shape) for shape in shapes])
    targets = [_TARGETS[rule](update) for rule, update in zip(rules, updates, strict=True)]
    torch._foreach_mul_(found, targets)
    shaped = [one.view(shape) for one, shape in zip(found, shapes, strict=True)]
    still = [
        one.moving if rule == "orthogonal" else None
        for rule, one in zip(rules, updates, strict=True)
    ]
    return [one if own is None else one * own for one, own in zip(shaped, still, strict=True)]


def graft_factors(rules: Sequence[Rule], updates: Sequence[Update]) -> list[float | Tensor]:
    """Factors that give each grafted step the norm that its gradient had, ``‖g‖/‖v‖``; else 1."""
    factors: dict[int, float | Tensor] = {}
    grafted = [index for index, rule in enumerate(rules) if rule == "graft"]
    for indices in _alike(updates, grafted):
        chosen = [updates[index] for index in indices]
        matrices = [one for update in chosen for one in update.known(update.before).unbind()]
        matrices += [one for update in chosen for one in update.known(update.after).unbind()]
        before, after = torch.stack(torch._foreach_norm(matrices)).chunk(2)
        found = _ratio(before, after).split([len(update.after) for update in chosen])
        for index, values in zip(indices, found, strict=True):
            factors[index] = updates[index].of_layers(values)
    return [factors.get(index, 1.0) for index in range(len(updates))]


#: Of which matrices rules look at the norms.
NORMS: Mapping[Rule, tuple[str, ...]] = {"graft": ("before", "after"), "unit": ("after",)}


def _slice_factor(rule: Rule, update: Update) -> Tensor:
    """The factor of a rule for matrices of which slices are here, from the norms of the whole ones."""
    assert update.norms is not None
    after = update.norms["after"]
    if rule == "graft":
        return update.of_layers(_ratio(update.norms["before"], after))
    return update.of_layers(_ratio(torch.full_like(after, _TARGETS[rule](update)), after))


def column_factors(update: Update) -> Tensor:
    """Factors that give each column, a token's vector, a root mean square of 1.

    A token that is not in the batch stays where it is: momentum would go on with the same long step.
    """
    norms = update.known(update.after).norm(dim=-2, keepdim=True)
    if update.moving is not None:
        norms = norms * update.moving
    norms = norms.where(norms > torch.finfo(norms.dtype).tiny ** 0.5, 0)
    return _ratio(torch.full_like(norms, math.sqrt(update.after.shape[-2])), norms)


def make_orthogonal(rules: Sequence[Rule], updates: Sequence[Update], narrow: bool = False) -> None:
    """Put the nearest orthogonal matrices in place of the steps with that rule, some at a time."""
    for indices in _alike(updates, [i for i, rule in enumerate(rules) if rule == "orthogonal"]):
        for some in _portions(indices, [updates[index].after.numel() for index in indices]):
            stacks = [updates[index].known(updates[index].after) for index in some]
            for index, after in zip(some, nearest_orthogonal_all(stacks, narrow), strict=True):
                updates[index].take(after)


def _portions(indices: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Those that are worked on together: what they take while they are is bounded."""
    portion: list[int] = []
    total = 0
    for index, size in zip(indices, sizes, strict=True):
        if portion and total + size > MAX_AT_ONCE:
            yield portion
            portion, total = [], 0
        portion.append(index)
        total += size
    if portion:
        yield portion


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
    # A slice that several ranks hold is added up as often.
    counts = 1.0 if update.slice is None else update.slice.weight
    if len(update.rates) == 1:
        return products.sum() * update.rates[0] ** 2 * counts
    weight, bias = update.rates
    return (products[..., :-1].sum() * weight**2 + products[..., -1].sum() * bias**2) * counts


def _ratio(target: Tensor, norm: Tensor) -> Tensor:
    """``target/norm``, and 0 where the norm is 0."""
    usable = norm > 0
    return torch.where(usable, target / torch.where(usable, norm, torch.ones_like(norm)), 0)
