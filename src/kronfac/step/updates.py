"""From gradients to updates: rules before preconditioning, solutions, and the length of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.distributed.coordinator import Coordinator
from kronfac.options.config import Options, Schedules
from kronfac.protocol.transform import LayerStep, Transform
from kronfac.rescale.factors import (
    Update,
    bounded_factor,
    orthogonal_steps,
    own_factors,
    squared_step,
)
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases
from kronfac.step.batching import Batches
from kronfac.step.transforms import coherence

ParamGroups = list[dict[str, Any]]
#: Length of a step on which all recent gradients agree, as a multiple of Muon's.
AGREED = 1.5
#: A layer, and what its gradient was and has become.
LayerUpdate = tuple[LayerState, Update]


class Updates:
    """Rewrites the gradients of one model."""

    def __init__(
        self,
        options: Options,
        schedules: Schedules,
        transforms: Sequence[Transform],
        phases: Phases,
    ) -> None:
        self.options = options
        self.schedules = schedules
        self.transforms = transforms
        self.phases = phases
        self._batches = Batches(phases)

    def clear(self) -> None:
        """Forget which layers go together, after some have come or gone."""
        self._batches.clear()

    def precondition(
        self, states: Sequence[LayerState], groups: ParamGroups, step: int, seed: int = 0
    ) -> list[LayerUpdate]:
        """Apply the rules and each layer's solution; without one the gradient stays raw."""
        value = float(self.schedules.at("damping", step))
        relative = self.schedules.relative_damping
        damping: dict[LayerState, float | Tensor] = {}
        rates: dict[nn.Parameter, float | Tensor] = {}
        if self.transforms or self.options.step_bound is not None:
            rates = {p: group["lr"] for group in groups for p in group["params"] if "lr" in group}
        gradients, moments = {}, {}
        for state in states:
            if not state.has_gradient:
                continue
            state.renew_if_stale()
            if not state.is_worker:
                continue
            with self.phases.part("precondition", state.name):
                rate = rates.get(state.layer.weight, 0.0)
                own = damping[state] = state.damping(value, relative)
                at = moments[state] = LayerStep(
                    step,
                    state.buffers,
                    state.block,
                    state.solution_in_use,
                    own,
                    rate,
                    seed ^ state.number,
                )
                before = self._transformed(state.view.gradient(), at)
            if state.solved_at is not None and state.solution is not None:
                gradients[state] = before
        found = self._batches.precondition(gradients, states, damping)
        updates = []
        for state, update in found.items():
            # Where solutions of a batch live now: products may depend on how memory is aligned.
            at = replace(moments[state], solution=state.solution)
            for transform in self.transforms:
                update = transform.after(update, gradients[state], at)
            updates.append((state, self._update(state, gradients[state], update, rates)))
        return updates

    def _transformed(self, gradient: Tensor, at: LayerStep) -> Tensor:
        """What the rules before preconditioning make of a gradient."""
        for transform in self.transforms:
            gradient = transform(gradient, at)
        return gradient

    def _update(
        self,
        state: LayerState,
        before: Tensor,
        after: Tensor,
        rates: dict[nn.Parameter, float | Tensor],
    ) -> Update:
        assert state.solution is not None
        own = tuple(rates.get(p, 0.0) for p in state.layer.parameters)
        raw = state.block.raw_columns(state.solution)
        moving = None
        if state.rule == "columns" and self.transforms:
            moving = (state.view.gradient() != 0).any(-2, keepdim=True)
        return Update(before, after, own, raw, moving)

    def rescale(
        self,
        updates: Sequence[LayerUpdate],
        coordinator: Coordinator,
        model: nn.Module,
        count: Callable[..., None],
    ) -> None:
        """Set the length of the steps and write them into the gradients, in place."""
        rules = [state.rule for state, _ in updates]
        steps = orthogonal_steps(rules, [update for _, update in updates], self.options.narrow)
        if (bound := self.options.step_bound) is not None:
            total = coordinator.add_up_layers(squared_step(steps), model)
            factor = bounded_factor(total, bound)
            name = "kl_clip" if self.options.rescale == "kl-clip" else "trust_region"
            count(f"{name}_steps")
            count(f"{name}_active", (factor < 1).to(torch.int64))
            factors: Iterable[float | Tensor] = [factor] * len(steps)
        else:
            factors = own_factors(rules, steps)
        if self.options.rescale == "auto":
            agreements = [coherence(state.buffers) for state, _ in updates]
            factors = [
                factor if agreement is None else factor * (AGREED * agreement)
                for factor, agreement in zip(factors, agreements, strict=True)
            ]
        for (state, _), step, length in zip(updates, steps, factors, strict=True):
            if step.raw is None and isinstance(length, Tensor) and length.dim() == 0:
                for target, value in state.view.places(step.after):
                    torch.mul(value, length, out=target)
            else:
                state.view.write(step.times(length))
