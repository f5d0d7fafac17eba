"""The six phases of a step on one model: the only place that knows every other room.

*reduce* statistics, *refresh* solutions, *share* them, *precondition* gradients, *rescale* and *spread*
them. What ranks do together is the coordinator's (:mod:`kronfac.distributed.coordinator`); in one process
that sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.adaptive.interval import AdaptiveInterval, compare
from kronfac.capture.capture import Capture
from kronfac.capture.sampling import Observer
from kronfac.capture.unobserved import Unobserved
from kronfac.distributed.coordinator import Coordinator, Solved
from kronfac.distributed.local import Local
from kronfac.distributed.reduce import Moment
from kronfac.layers import Layer
from kronfac.layers.attention import output_projections
from kronfac.layers.selection import Selection
from kronfac.options.config import Options, Schedules
from kronfac.options.errors import UnsolvableError
from kronfac.protocol.method import Method
from kronfac.rescale.factors import (
    Update,
    kl_clip_factor,
    kl_clip_sum,
    orthogonal_steps,
    own_factors,
)
from kronfac.rescale.quadratic import QuadraticModel
from kronfac.rescale.rules import no_matrix, reads_sequences, rule_of
from kronfac.state import state_dict as checkpoint
from kronfac.state.fold import fold
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases
from kronfac.statistics.pending import Normalizer
from kronfac.step import saving
from kronfac.step.batching import Batches
from kronfac.step.clipping import clip_gradients
from kronfac.step.saving import Entries, Names
from kronfac.step.schedule import Clock, spread_offsets
from kronfac.step.transforms import Momentum
from kronfac.step.validation import check_curvature, check_lever, check_plain_steps, check_stagger

#: Refreshes of one layer that may fail in a row before training stops.
MAX_FAILURES = 5

ParamGroups = list[dict[str, Any]]


class Preconditioner:
    """Watches a model and rewrites its gradients in place."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        options: Options,
        schedules: Schedules,
    ) -> None:
        check_lever(schedules.get("damping"), options.rescale)
        check_stagger(options.stagger, schedules.get("refresh_every"))
        self.model = model
        self.method = method
        self.options = options
        self.schedules = schedules
        self.clock = Clock(schedules, options.early_refresh)
        #: What happens to gradients before they are preconditioned, in this order.
        self.transforms = (
            *((Momentum(schedules, options.nesterov),) if options.momentum else ()),
            *method.transforms(),
        )
        self.phases = Phases()
        self.capture = Capture(options, self.phases)
        self.observer = Observer(self.capture, options.fisher)
        self.quadratic = QuadraticModel() if options.rescale == "quadratic" else None
        self.layers: dict[tuple[nn.Parameter, str], LayerState] = {}
        self.reasons: dict[str, str] = {}
        self.counters: dict[str, int | Tensor] = {}
        self.detached = False
        self.coordinator: Coordinator = Local(self.phases)
        self._batches = Batches(self.phases)
        self._unobserved = Unobserved(options, self.capture)

    # --- attaching ------------------------------------------------------------------------------

    def attach(self, groups: ParamGroups) -> None:
        """Watch every selected layer whose weight is trained and that is not watched yet."""
        if self.detached:
            return
        check_plain_steps(self.options.rescale, groups)
        trained = {p for group in groups for p in group["params"]}
        options = self.options
        selection = Selection(self.model, options.include, options.exclude, self._refusal)
        self.reasons = selection.reasons
        hosts = output_projections(self.model)
        watched: dict[nn.Module, list[LayerState]] = {}
        for layer, others in selection.layers.items():
            if layer.key in self.layers or layer.weight not in trained:
                continue
            state = LayerState(layer, self.method, self.transforms)
            check_curvature(self.schedules.get("damping"), [state])
            state.note = selection.notes.get(layer.name, "")
            state.compares = self.adaptive_interval() is not None
            self.layers[layer.key] = state
            for module in (layer.module, *others):
                for host in hosts.get(module, [module]):
                    watched.setdefault(host, []).append(state)
        sequences = reads_sequences(self.model)
        for state in self.layers.values():
            state.rule = rule_of(state.layer, options.rescale, sequences)
        self._batches.clear()
        for module, states in watched.items():
            self.capture.attach_module(module, states)
        if self.options.stagger:
            interval = int(self.schedules.at("refresh_every", self.clock.step))
            states = list(self.layers.values())
            costs = [state.block.cost.refresh_flops for state in states]
            for state, offset in zip(states, spread_offsets(costs, interval), strict=True):
                state.offset = offset
        self._share_out(groups)

    def _refusal(self, layer: Layer) -> str | None:
        """Say why a layer is left to the base optimizer, or nothing."""
        lengths = self.options.rescale in ("unit", "orthogonal")
        return (no_matrix(layer) if lengths else None) or self.method.refusal(layer)

    def join(self, coordinator: Coordinator, groups: ParamGroups) -> None:
        """Share the work out over ranks from now on."""
        self.coordinator = coordinator
        self.capture.listener = coordinator.observed
        self._share_out(groups)
        self._announce()

    def _share_out(self, groups: ParamGroups) -> None:
        self.coordinator.attach(list(self.layers.values()), groups, self._interval)

    def _interval(self) -> int:
        return int(self.schedules.at("refresh_every", self.clock.step))

    def detach(self) -> None:
        """Remove every hook and forget all layers, for good."""
        self.detached = True
        self.capture.detach()
        self.layers.clear()
        self._batches.clear()

    def watched(self) -> list[Layer]:
        """Every layer that is watched."""
        return [state.layer for state in self.layers.values()]

    # --- the step -------------------------------------------------------------------------------

    def run(self, groups: ParamGroups) -> None:
        """Carry out the phases that are due; gradients are preconditioned when it returns."""
        coordinator, states = self.coordinator, list(self.layers.values())
        coordinator.agree(states)
        coordinator.reduce_gradients()
        self._clip(groups)
        taken = self.capture.due
        if taken:
            with self.phases("reduce"):
                try:
                    self._reduce(states)
                finally:
                    self.capture.clear()  # an error that is caught must not count a batch twice
        damping = float(self.schedules.at("damping", self.clock.step))
        due = self._due(states)
        if taken and not due:
            coordinator.reduce(states)
        solved = coordinator.refresh(due, damping)
        self._take_all(due, coordinator.share(solved))
        self._judge(due)
        with self.phases("precondition"):
            updates = self._precondition(groups)
        with self.phases("rescale"):
            self._rescale(updates)
        coordinator.spread([state for state in states if _is_preconditioned(state)])

    def consolidate(self) -> None:
        """Add up what ranks have observed since the last refresh."""
        self.coordinator.consolidate(list(self.layers.values()))
        self._announce()

    def resume(
        self,
        plan: str,
        groups: ParamGroups,
        names: dict[nn.Parameter, str],
        entries: dict[str, dict[str, Any]],
    ) -> None:
        """Take up what ranks had agreed on when state was saved, where that is possible."""

        def holds_all() -> bool:
            return all(
                checkpoint.holds_all(state, entries.get(names[parameter], {}))
                for (parameter, _), state in self.layers.items()
            )

        self.coordinator.resume(plan, holds_all, list(self.layers.values()), groups)

    def advance(self) -> None:
        """Count a completed step."""
        self.clock.step += 1
        self.capture.begin_step(self.clock.factor_due() and not self.detached)
        self._announce()

    def reschedule(self) -> None:
        """Take a changed interval into account, from the next forward on."""
        compares = self.adaptive_interval() is not None
        for state in self.layers.values():
            if state.compares and not compares:
                state.forget_history()
            state.compares = compares
        if not self.capture.forward_seen and not self.detached:
            self.capture.due = self.clock.factor_due()
            self._announce()

    def _announce(self) -> None:
        """Tell which layers will be refreshed at the coming step, so that statistics may leave early."""
        self.coordinator.expect(self._coming, self._moment)

    def _coming(self) -> list[LayerState]:
        if not self.capture.due or self.detached:
            return []
        return [state for state in self.layers.values() if self._may_refresh(state)]

    def _moment(self) -> Moment:
        decay = float(self.schedules.at("decay", self.clock.step))
        return Moment(decay, self.capture.passes, self._early_normaliser)

    def _early_normaliser(self) -> Normalizer | None:
        counts = self.options.loss_average == "token"
        if counts and any(seen.terms is None for seen in self.capture.passes):
            return None
        return self._normaliser()

    def _normaliser(self) -> Normalizer:
        options = self.options
        return Normalizer(self.capture.passes, options.loss_average, options.sampled)

    def _clip(self, groups: ParamGroups) -> None:
        bound = self.options.max_grad_norm
        if bound is None or self.detached:
            return
        with self.phases("clip"):
            trained = [p for group in groups for p in group["params"]]
            own = [p for p in trained if self.coordinator.steps(p)]
            clip_gradients(own, bound, self.coordinator.add_up_parameters)

    def is_empty_step(self, groups: ParamGroups) -> bool:
        """Whether this is the zero-gradient step by which loaders make state appear."""
        return saving.is_empty_step(self, groups)

    def allocate(self, groups: ParamGroups) -> None:
        """Make every tensor at its final shape without giving it a meaning."""
        if self.quadratic is not None:
            self.quadratic.allocate([p for group in groups for p in group["params"]])
        for state in self.layers.values():
            state.allocate()
            self.observer.allocate(state.layer.weight.device)

    def _reduce(self, states: Sequence[LayerState]) -> None:
        """Fold what was observed since the last step into the running averages."""
        if self.coordinator.sees_all:
            self._unobserved.report(states)
        self.coordinator.before_fold(states, self.capture.passes)
        normalizer = self._normaliser()
        self.coordinator.settle_broadcast(states, normalizer)
        decay = float(self.schedules.at("decay", self.clock.step))
        for state in states:
            self._fold(state, normalizer, decay)
            state.has_new_statistics = True
        self.clock.mark_factor()
        self.count("factor_updates")

    def _fold(self, state: LayerState, normalizer: Normalizer, decay: float) -> None:
        pending = state.pending
        pending.settle(state.solution)
        if state.has_gradient and self.coordinator.observes_gradient(state):
            gradient = state.view.gradient()
            pending.add_gradient(state.block.observe_gradient(gradient, state.solution))
        for name in state.running:
            fold(state, name, decay, normalizer)

    def adaptive_interval(self) -> AdaptiveInterval | None:
        """The refresh interval, if it adapts itself."""
        interval = self.schedules.get("refresh_every")
        return interval if isinstance(interval, AdaptiveInterval) else None

    def _may_refresh(self, state: LayerState) -> bool:
        return state.layer.weight.requires_grad and self.clock.refresh_due(state.last_refresh)

    def _due(self, states: Iterable[LayerState]) -> list[LayerState]:
        """The layers that are solved again at this step."""
        due = [
            state
            for state in states
            # A layer that could not be solved yet waits for something new.
            if self._may_refresh(state)
            and (state.last_refresh is not None or state.has_new_statistics)
        ]
        for state in due:
            state.has_new_statistics = False
        return due

    def _take_all(self, due: Sequence[LayerState], solved: Iterable[Solved]) -> None:
        found = set()
        for state, solution in solved:
            self._take(state, solution)
            found.add(state)
        if not self.coordinator.sees_all:
            self._unobserved.report_unseen(state for state in due if state not in found)

    def _judge(self, due: Sequence[LayerState]) -> None:
        """Adapt the interval to what has changed since the last refreshes, alike on all ranks."""
        interval = self.adaptive_interval()
        if interval is None or not due or not interval.due(self.clock.step):
            return
        votes = self.coordinator.total(compare(due, interval.rule.tolerance))
        verdict = interval.judge(votes.tolist(), self.clock.step)
        if verdict != "kept":
            self.count(f"refresh_{verdict}")

    def _take(self, state: LayerState, solution: dict[str, Tensor] | None) -> None:
        """Use a new solution from now on; without one, the last good one stays."""
        step = self.clock.step
        for running in state.running.values():
            running.fresh = False
        if solution is None:
            state.failures += 1
            state.failures_in_a_row += 1
            if state.failures_in_a_row >= MAX_FAILURES:
                raise UnsolvableError(
                    f"the curvature of layer {state.name!r} could not be solved {MAX_FAILURES} times "
                    "in a row; raise damping, or name the layer in exclude."
                )
        else:
            state.solution = solution if state.is_worker else None
            state.solved_at, state.failures_in_a_row = step, 0
            self.count("refreshes")
        if state.last_refresh is None and self.options.stagger and state.offset:
            interval = int(self.schedules.at("refresh_every", step))
            state.last_refresh = step + state.offset - interval
        elif self.clock.refresh_on_grid(state.last_refresh):
            state.last_refresh = step

    def _precondition(self, groups: ParamGroups) -> list[tuple[LayerState, Update]]:
        """Take momentum, then apply each layer's solution; without one the gradient stays raw."""
        damping = float(self.schedules.at("damping", self.clock.step))
        rates: dict[nn.Parameter, float | Tensor] = {}
        if self.options.rescale == "kl-clip":
            rates = {p: group["lr"] for group in groups for p in group["params"]}
        gradients = {}
        for state in self.layers.values():
            if not state.has_gradient:
                continue
            if state.layer.stale():
                state.reset()
            if not state.is_worker:
                continue
            with self.phases.part("precondition", state.name):
                before = self._transformed(state, state.view.gradient())
            if state.solved_at is not None and state.solution is not None:
                gradients[state] = before
        updates = []
        found = self._batches.precondition(gradients, self.layers.values(), damping)
        for state, after in found.items():
            assert state.solution is not None
            own = tuple(rates.get(p, 0.0) for p in state.layer.parameters)
            raw = state.block.raw_columns(state.solution)
            moving = None
            if state.rule == "columns" and self.transforms:
                moving = (state.view.gradient() != 0).any(-2, keepdim=True)
            updates.append((state, Update(gradients[state], after, own, raw, moving)))
        return updates

    def _transformed(self, state: LayerState, gradient: Tensor) -> Tensor:
        """What the rules before preconditioning make of a gradient."""
        for transform in self.transforms:
            gradient = transform(gradient, state.buffers, state.solution, self.clock.step)
        return gradient

    def _rescale(self, updates: list[tuple[LayerState, Update]]) -> None:
        """Set the length of the steps and write them into the gradients, in place."""
        rules = [state.rule for state, _ in updates]
        steps = orthogonal_steps(rules, [update for _, update in updates])
        if self.options.rescale == "kl-clip":
            factors: list[float | Tensor] = [self._kl_clip(steps)] * len(steps)
        else:
            factors = own_factors(rules, steps)
        for (state, _), step, length in zip(updates, steps, factors, strict=True):
            if step.raw is None and isinstance(length, Tensor) and length.dim() == 0:
                for target, value in state.view.places(step.after):
                    torch.mul(value, length, out=target)
            else:
                state.view.write(step.times(length))

    def _kl_clip(self, steps: Sequence[Update]) -> Tensor:
        """The factor of all layers on all ranks."""
        total = kl_clip_sum(steps)
        total = self.coordinator.add_up_layers(total, self.model)
        factor = kl_clip_factor(total, self.options.kl_clip)
        self.count("kl_clip_steps")
        self.count("kl_clip_active", (factor < 1).to(torch.int64))
        return factor

    def count(self, name: str, amount: int | Tensor = 1) -> None:
        """Add to a counter that :meth:`stats` shows."""
        self.counters[name] = self.counters.get(name, 0) + amount

    # --- looking and saving: see step/saving.py --------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters as plain numbers (reads them from the device)."""
        return saving.stats(self)

    def entries(self, names: Names) -> Entries:
        """What is saved, by parameter name; every trainable parameter has at least the step."""
        return saving.entries(self, names)

    def check_entries(self, names: Names, entries: Entries) -> None:
        """Raise if saved tensors do not fit, before anything is changed."""
        saving.check(self, names, entries)

    def load_entries(self, names: Names, entries: Entries) -> None:
        """Restore what :meth:`entries` returned; layers that it does not know start again."""
        saving.load(self, names, entries)
        self.capture.begin_step(self.clock.factor_due() and not self.detached)
        self.coordinator.restart()
        self._announce()


def _is_preconditioned(state: LayerState) -> bool:
    return state.solved_at is not None and state.layer.weight.requires_grad
