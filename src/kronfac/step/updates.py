"""From gradients to updates: rules before preconditioning, solutions, and the length of steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.distributed.coordinator import Coordinator
from kronfac.layers.stacks import Place, places, stacked_gradients, write
from kronfac.options.config import Options, Schedules
from kronfac.protocol.transform import LayerStep, Transform
from kronfac.rescale.factors import (
    Update,
    bounded_factor,
    make_orthogonal,
    own_factors,
    squared_step,
)
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases
from kronfac.step.batching import Batches, Group
from kronfac.step.input_sizes import take_input_sizes
from kronfac.step.kept_norms import has_norms, keep_norms, keep_norms_of_shards, plain_rates
from kronfac.step.lengths import lengths
from kronfac.step.row_form import RowForm
from kronfac.step.scale_free import forget_scales, mark_scale_free
from kronfac.step.slice_norms import gradient_squares, take_norms

ParamGroups = list[dict[str, Any]]
#: Learning rates of parameters.
Rates = dict[nn.Parameter, float | Tensor]
#: What is left of a parameter's step, so that the base's own momentum makes no longer one of it.
Shares = dict[nn.Parameter, float]
#: Layers that are worked on together, and what their gradients were and have become.
GroupUpdate = tuple[Group, Update]


class Updates:
    """Rewrites the gradients of one model."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        schedules: Schedules,
        transforms: Sequence[Transform],
        phases: Phases,
        row_form: RowForm,
    ) -> None:
        self.options = options
        self._has_norms = has_norms(model)
        self.schedules = schedules
        self.transforms = transforms
        self.phases = phases
        self.row_form = row_form
        self._batches = Batches(phases)

    def clear(self) -> None:
        """Forget which layers go together, after some have come or gone."""
        self._batches.clear()

    def forget_prepared(self) -> None:
        """Let go of what blocks prepare of their solutions, until it is needed again."""
        self._batches.forget_prepared()

    def look_at_scales(
        self, states: Sequence[LayerState], coordinator: Coordinator, step: int
    ) -> None:
        """See which weights have a scale without effect, and how large inputs are."""
        if self._knows_scales:
            mark_scale_free(states, coordinator, step)
        else:
            forget_scales(states, step)
        if self.options.rescale == "auto" and self.options.momentum > 0:
            take_input_sizes(states, step)

    @property
    def _knows_scales(self) -> bool:
        """Whether some weights may have none, and are treated in another way."""
        return self.options.rescale == "auto" and self.options.momentum > 0 and self._has_norms

    def keep_norms_of_shards(
        self, states: Sequence[LayerState], groups: ParamGroups, coordinator: Coordinator
    ) -> None:
        """Let weights that are sharded keep their norms; whole ones do already."""
        if self._knows_scales:
            keep_norms_of_shards(states, plain_rates(groups), coordinator)

    def precondition(
        self,
        states: Sequence[LayerState],
        groups: ParamGroups,
        coordinator: Coordinator,
        step: int,
        seed: int = 0,
    ) -> list[GroupUpdate]:
        """Apply the rules and each layer's solution; without one the gradient stays raw."""
        rates: Rates = {}
        if self.transforms or self.options.step_bound is not None:
            rates = {p: group["lr"] for group in groups for p in group["params"] if "lr" in group}
        shares = base_shares(groups) if self.options.rescale == "auto" else {}
        chosen = self._groups(states, rates, shares)
        self.row_form.settle()
        names = [state.name for group in chosen for state in group.states]
        with self.phases.part("precondition", *names):
            damping = self._damping(chosen, step)
            before = [stacked_gradients([state.view for state in group.states]) for group in chosen]
            squares = gradient_squares(chosen, before, coordinator) if self.transforms else {}
            moments = [
                [
                    self._moment(state, step, damping, rates, seed, squares.get(state))
                    for state in group.states
                ]
                for group in chosen
            ]
            before = self._transformed(before, moments)
        updates, product = [], partial(self._batches.precondition, damping=damping)
        for group, at in zip(chosen, moments, strict=True):
            stack = before.pop(0)  # not one of them stays longer than it is looked at
            if group.is_solved:
                after = self.row_form.precondition(group, stack, step, product, damping)
                after = self._after(group, after, stack, at)
                update = self._update(group, stack, after, rates)
                update.share = shares.get(group.states[0].layer.weight, 1.0)
                updates.append((group, update))
        self.row_form.clear()
        return updates

    def _groups(self, states: Sequence[LayerState], rates: Rates, shares: Shares) -> list[Group]:
        """Which of the layers that have a gradient and are worked on here go together."""
        bounded, present = self.options.step_bound is not None, {}
        for state in states:
            if not state.has_gradient:
                continue
            state.renew_if_stale()
            if state.is_worker:
                own = _key(_own_rates(state, rates)) if bounded else None
                present[state] = (own, shares.get(state.layer.weight, 1.0))
        found = self._batches.groups(present, states)
        return found if self.transforms else [group for group in found if group.is_solved]

    def _damping(self, groups: Sequence[Group], step: int) -> dict[LayerState, float | Tensor]:
        value = float(self.schedules.at("damping", step))
        relative = self.schedules.relative_damping
        states = [state for group in groups for state in group.states]
        return {state: state.damping(value, relative) for state in states}

    @staticmethod
    def _moment(
        state: LayerState,
        step: int,
        damping: Mapping[LayerState, float | Tensor],
        rates: Rates,
        seed: int,
        square: Tensor | None,
    ) -> LayerStep:
        rate = rates.get(state.layer.weight, 0.0)
        solution, own = state.solution_in_use, seed ^ state.number
        known = state.buffers, state.block, solution
        return LayerStep(step, *known, damping[state], rate, own, square)

    def _transformed(
        self, before: list[Tensor], moments: Sequence[Sequence[LayerStep]]
    ) -> list[Tensor]:
        """What the rules before preconditioning make of gradients, all layers at once."""
        if not self.transforms or not before:
            return before
        given = [one for stack in before for one in stack.unbind()]
        flat = [one for own in moments for one in own]
        found = list(given)
        for transform in self.transforms:
            here = [index for index, at in enumerate(flat) if transform.applies_to(at)]
            own = [found[index] for index in here], [flat[index] for index in here]
            for index, changed in zip(here, transform.apply_all(*own), strict=True):
                found[index] = changed
        if all(new is old for new, old in zip(found, given, strict=True)):
            return before
        rest = iter(found)
        return [torch.stack([next(rest) for _ in own]) for own in moments]

    def _after(
        self, group: Group, after: Tensor, before: Tensor, moments: Sequence[LayerStep]
    ) -> Tensor:
        """What the rules after preconditioning make of updates."""
        rules = [one for one in self.transforms if type(one).after is not Transform.after]
        if not rules:
            return after
        found = []
        for state, update, gradient, at in zip(group.states, after, before, moments, strict=True):
            # Where solutions of a batch live now: products may depend on how memory is aligned.
            here = replace(at, solution=state.solution)
            for transform in rules:
                if transform.applies_to(here):
                    update = transform.after(update, gradient, here)
            found.append(update)
        return torch.stack(found)

    def _update(self, group: Group, before: Tensor, after: Tensor, rates: Rates) -> Update:
        first, moving = group.states[0], None
        if first.rule == "columns" and self.transforms:
            own = [(state.view.gradient() != 0).any(-2, keepdim=True) for state in group.states]
            moving = torch.stack(own)
        elif not first.has_curvature and len(first.layer.matrix_shape) > 2 and self.transforms:
            own = [
                (one.view.gradient() != 0).any(-1).any(-1)[..., None, None] for one in group.states
            ]
            moving = torch.stack(own)
        raw = group.batch.raw_columns(group.states)
        if first.rule == "orthogonal" and raw is None:
            before = after  # nobody looks at it
        piece = first.view.slice
        return Update(before, after, _own_rates(first, rates), raw, moving, slice=piece)

    def rescale(
        self,
        updates: Sequence[GroupUpdate],
        groups: ParamGroups,
        coordinator: Coordinator,
        model: nn.Module,
        count: Callable[..., None],
    ) -> None:
        """Set the length of the steps and write them into the gradients, in place."""
        rules = [group.states[0].rule for group, _ in updates]
        steps = [update for _, update in updates]
        make_orthogonal(rules, steps, self.options.narrow)
        if (bound := self.options.step_bound) is not None:
            total = coordinator.add_up_layers(squared_step(steps), model)
            factor = bounded_factor(total, bound)
            name = "kl_clip" if self.options.rescale == "kl-clip" else "trust_region"
            count(f"{name}_steps")
            count(f"{name}_active", (factor < 1).to(torch.int64))
            factors: Iterable[float | Tensor] = [factor] * len(steps)
        else:
            chosen = [group for group, _ in updates]
            norms = take_norms(chosen, steps, coordinator, self.options.rescale == "auto")
            factors = own_factors(rules, steps, self._agreements(chosen, norms))
        found: list[Place] = []
        for (group, _), step, length in zip(updates, steps, factors, strict=True):
            views = [state.view for state in group.states]
            found += places(views, step.times(length * step.share))
        write(found)
        if self._knows_scales:
            keep_norms((one for group, _ in updates for one in group.states), plain_rates(groups))

    def _agreements(
        self, groups: Sequence[Group], norms: Mapping[LayerState, Tensor]
    ) -> list[Tensor | None]:
        """Length of each layer's step as a multiple of Muon's, ``[k]``, if that depends on gradients."""
        found: list[Tensor | None] = [None] * len(groups)
        if self.options.rescale != "auto":
            return found
        alike: dict[Hashable, list[int]] = {}
        for index, group in enumerate(groups):
            layer = group.states[0].layer
            alike.setdefault((layer.weight.device, layer.factor_dtype), []).append(index)
        for indices in alike.values():
            states = [state for index in indices for state in groups[index].states]
            known = [norms.get(state) for state in states]
            multiples = lengths([state.buffers for state in states], known)
            if multiples is not None:
                sizes = [len(groups[index].states) for index in indices]
                own = multiples.split(sizes)
                for index, values in zip(indices, own, strict=True):
                    found[index] = values
        return found


def base_shares(groups: ParamGroups) -> Shares:
    """``(1 - μ)/(1 - dampening)`` where the base, an SGD, has a momentum μ of its own.

    It adds up steps of a fixed length, to ``1/(1 - μ)`` times that length. A learning rate would mean
    something else with it.
    """
    shares: Shares = {}
    for group in groups:
        own, dampening = group.get("momentum", 0.0), group.get("dampening", 1.0)
        if own > 0 and dampening < 1:
            shares |= dict.fromkeys(group["params"], (1 - own) / (1 - dampening))
    return shares


def _own_rates(state: LayerState, rates: Rates) -> tuple[float | Tensor, ...]:
    return tuple(rates.get(p, 0.0) for p in state.layer.parameters)


def _key(rates: Iterable[float | Tensor]) -> Hashable:
    """Layers have the same rates if these are equal numbers or the same tensors."""
    return tuple(id(rate) if isinstance(rate, Tensor) else float(rate) for rate in rates)
