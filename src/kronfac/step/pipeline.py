"""The six phases of a step on one model: the only place that knows every other room.

*reduce* statistics, *refresh* solutions, *share* them, *precondition* gradients, *rescale* and *spread*
them. What ranks do together is the coordinator's (:mod:`kronfac.distributed.coordinator`); in one process
that sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from kronfac.adaptive.interval import AdaptiveInterval, compare
from kronfac.capture.capture import Capture
from kronfac.capture.sampling import Observer
from kronfac.capture.unobserved import Unobserved
from kronfac.distributed.coordinator import Coordinator, Now, Solved
from kronfac.distributed.local import Local
from kronfac.distributed.reduce import Moment
from kronfac.distributed.workload import Intervals
from kronfac.layers import Layer
from kronfac.layers.attention import output_projections
from kronfac.layers.selection import Selection
from kronfac.layers.shards import sums_gradients
from kronfac.options.config import Options, Schedules, is_adaptive
from kronfac.options.errors import UnsolvableError
from kronfac.protocol.checks import check_block
from kronfac.protocol.identity import IdentityMethod
from kronfac.protocol.method import Method
from kronfac.rescale.quadratic import QuadraticModel
from kronfac.rescale.rules import no_matrix, rule_of
from kronfac.state.fold import fold_all
from kronfac.state.layer_state import Due, LayerState
from kronfac.state.timing import Phases
from kronfac.step import saving
from kronfac.step.clipping import clip_gradients
from kronfac.step.due import coming, take_due
from kronfac.step.gradient_statistics import (
    follow_gradients,
    look_at_gradients,
)
from kronfac.step.loss_scale import early_divisor, early_normalizer, normalizer_of
from kronfac.step.random_seeds import RandomSeeds
from kronfac.step.row_form import RowForm
from kronfac.step.sampled_rows import SampledRows
from kronfac.step.saving import Entries, Names
from kronfac.step.schedule import Clock, spread_offsets
from kronfac.step.settling import settle
from kronfac.step.shared_inputs import SharedInputs
from kronfac.step.transforms import Momentum
from kronfac.step.updates import Updates
from kronfac.step.validation import (
    check_curvature,
    check_lever,
    check_mean_curvature,
    check_plain_steps,
    check_relative,
    check_stagger,
)

#: Refreshes of one layer that may fail in a row before training stops.
MAX_FAILURES = 5

ParamGroups = list[dict[str, Any]]


class Preconditioner:
    """Watches a model and rewrites its gradients in place."""

    def __init__(
        self, model: nn.Module, method: Method, options: Options, schedules: Schedules
    ) -> None:
        check_lever(is_adaptive(schedules.get("damping")), options.rescale)
        check_relative(schedules.relative_damping, options.rescale)
        check_stagger(options.stagger, is_adaptive(schedules.get("refresh_every")))
        self.model = model
        self.method = method
        self.options = options
        self.schedules = schedules
        self.clock = Clock(schedules, options.early_refresh)
        #: What happens to gradients before and after they are preconditioned, in this order.
        self.transforms = (
            *((Momentum(schedules, options.nesterov),) if options.momentum else ()),
            *method.transforms(),
        )
        self.phases = Phases()
        self.capture = Capture(options, self.phases)
        self.observer = Observer(self.capture, options.fisher, method.needs_observe)
        self.quadratic = QuadraticModel() if options.rescale == "quadratic" else None
        self.layers: dict[tuple[nn.Parameter, str], LayerState] = {}
        self.reasons: dict[str, str] = {}
        self.counters: dict[str, int | Tensor] = {}
        self.random = RandomSeeds()
        self.rows = SampledRows(options.rows)
        self.inputs = SharedInputs(self.capture.inputs)
        self.detached = False
        #: Whether gradients are added up over ranks and not averaged.
        self._sums = False
        self.coordinator: Coordinator = Local(self.phases)
        self.row_form = RowForm(options, schedules, self.transforms, self.capture)
        self._updates = Updates(
            model, options, schedules, self.transforms, self.phases, self.row_form
        )
        self._unobserved = Unobserved(options, self.capture)

    # --- attaching ------------------------------------------------------------------------------

    def attach(self, groups: ParamGroups) -> None:
        """Watch every selected layer whose weight is trained and that is not watched yet."""
        if self.detached:
            return
        check_plain_steps(self.options.rescale, groups)
        trained = {p for group in groups for p in group["params"]}
        options, schedules = self.options, self.schedules
        all_lengths = options.rescale == "auto"
        selection = Selection(
            self.model, options.include, options.exclude, self._refusal, all_lengths
        )
        self.reasons = selection.reasons
        hosts = output_projections(self.model)
        watched: dict[nn.Module, list[LayerState]] = {}
        for layer, others in selection.layers.items():
            if layer.key in self.layers or layer.weight not in trained:
                continue
            method = self.method if layer.is_observed else IdentityMethod()
            rules = [one for one in self.transforms if layer.is_observed or one.everywhere]
            state = LayerState(layer, method, rules, options.narrow)
            if layer.is_observed:
                check_block(state.block)
            check_curvature(is_adaptive(self.schedules.get("damping")), [state])
            check_mean_curvature(schedules.relative_damping, [state])
            state.note = selection.notes.get(layer.name, "")
            state.compares = self.adaptive_interval() is not None
            self.layers[layer.key] = state
            if not layer.is_observed:
                continue
            self.row_form.watch(state, tied=bool(others))
            for module in (layer.module, *others):
                for host in hosts.get(module, [module]):
                    watched.setdefault(host, []).append(state)
        for state in self.layers.values():
            state.rule = rule_of(state.layer, options.rescale)
        self._updates.clear()
        for module, states in watched.items():
            self.capture.attach_module(module, states)
        if self.options.stagger:
            interval = int(self.schedules.at("refresh_every", self.clock.step))
            states = list(self.layers.values())
            costs = [state.block.cost.refresh_flops for state in states]
            for state, offset in zip(states, spread_offsets(costs, interval), strict=True):
                state.offset = offset
        self._share_out(groups)
        self._allow_rounding()

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
        self.coordinator.attach(list(self.layers.values()), groups, self._intervals)

    def _intervals(self) -> Intervals:
        at, step = self.schedules.at, self.clock.step
        return Intervals(int(at("refresh_every", step)), int(at("factor_every", step)))

    def detach(self) -> None:
        """Remove every hook and forget all layers, for good."""
        self.detached = True
        self.capture.detach()
        self.row_form.detach()
        self.layers.clear()
        self._updates.clear()

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
        # Whole gradients that nobody looks at need not be there at the same time as statistics.
        if looks := look_at_gradients(states):
            coordinator.collect(states)
        if taken:
            with self.phases("reduce"):
                try:
                    self._reduce(states)
                finally:
                    self.capture.clear()  # an error that is caught must not count a batch twice
        else:
            follow_gradients(states, self._decay, coordinator)
        due = take_due(self.clock, states, taken)
        if taken and not due:
            coordinator.reduce(states)
        solved = coordinator.refresh(due, self._now(due))
        self._take_all(due, coordinator.share(solved))
        self._judge(list(due))
        self._solve_again(states)
        self._updates.look_at_scales(states, coordinator, self.clock.step)
        seed = self.random.draw() if self._draws_at_steps else 0
        # A bound of the whole step needs all layers before it changes the first.
        at_once = looks or self.options.step_bound is not None
        for some in coordinator.portions(states, at_once):
            self._update(some, groups, seed)
        self._updates.keep_norms_of_shards(states, groups, self.coordinator)

    def _update(self, states: Sequence[LayerState], groups: ParamGroups, seed: int) -> None:
        """Precondition the gradients of some layers and set the length of their steps."""
        with self.phases("precondition"):
            step = self.clock.step
            updates = self._updates.precondition(states, groups, self.coordinator, step, seed)
        with self.phases("rescale"):
            self._updates.rescale(updates, groups, self.coordinator, self.model, self.count)

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
        saving.resume(self, plan, groups, names, entries)

    def advance(self) -> None:
        """Count a completed step."""
        self.clock.step += 1
        self.capture.begin_step(self.clock.factor_due() and not self.detached, self.clock.step)
        self._announce()

    def _allow_rounding(self) -> None:
        """Let statistics be rounded to bfloat16 where the damping is large enough to hide it."""
        allowed = self.schedules.hides_rounding(self.clock.step)
        for state in self.layers.values():
            state.narrow_rows = allowed

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
        self._sums = sums_gradients(self.model)
        self.coordinator.expect(self._coming, self._moment)
        if self.capture.due:
            self._allow_rounding()
            if self.coordinator.is_frugal:  # what arrives of statistics takes its place
                self._updates.forget_prepared()

    def _coming(self) -> Due:
        observes = self.capture.due and not self.detached
        return coming(self.clock, self.layers.values()) if observes else {}

    def _moment(self) -> Moment:
        known = partial(early_normalizer, self.options, self.capture, self._sums)
        divisor = partial(early_divisor, self.options, self.capture, self._sums)
        by_terms = self.options.loss_average == "token" and not self.options.sampled
        proportional = self._sums or not by_terms  # masks differ
        return Moment(self._decay, self.capture.passes, known, divisor, proportional)

    def _clip(self, groups: ParamGroups) -> None:
        bound = self.options.max_grad_norm
        if bound is None or self.detached:
            return
        with self.phases("clip"):
            trained = [p for group in groups for p in group["params"]]
            own = [p for p in trained if self.coordinator.steps(p)]
            add_up, weight = self.coordinator.add_up_parameters, self.coordinator.part_weight
            clip_gradients(own, bound, add_up, weight)

    def is_empty_step(self, groups: ParamGroups) -> bool:
        """Whether this is the zero-gradient step by which loaders make state appear."""
        return saving.is_empty_step(self, groups)

    def allocate(self, groups: ParamGroups) -> None:
        """Make every tensor at its final shape without giving it a meaning."""
        if self.quadratic is not None:
            self.quadratic.allocate([p for group in groups for p in group["params"]])
        if self._draws_at_steps or any(state.block.draws for state in self.layers.values()):
            self.random.allocate()
        for state in self.layers.values():
            state.allocate()
            self.observer.allocate(state.layer.weight.device)

    def _reduce(self, states: Sequence[LayerState]) -> None:
        """Fold what was observed since the last step into the running averages."""
        self._sums = sums_gradients(self.model)
        known = partial(normalizer_of, self.options, self.capture, self.coordinator, self._sums)
        self.capture.take_in_inputs()
        self.coordinator.land(known)
        self.inputs.settle(states, self.coordinator)
        if self.coordinator.sees_all:
            self._unobserved.report(states)
        if self.method.needs_observe:
            self._unobserved.check_outputs(self.method.name, self.capture.passes)
        self.rows.fix(states, self.coordinator)
        self.inputs.fix(states, self.coordinator)
        self.coordinator.before_fold(states, self.capture.passes)
        normalizer = known()
        self.coordinator.settle_broadcast(states, normalizer)
        settle(states, self.coordinator, self.clock.step)
        fold_all(states, self._decay, normalizer, 1 / self.coordinator.observers)
        self.clock.mark_factor()
        self.count("factor_updates")

    def _solve_again(self, states: Iterable[LayerState]) -> None:
        """Solve the parts of every step, where their layers are worked on; nothing travels."""
        due = {state: parts for state in states if (parts := state.block.due_parts("step"))}
        at = self._now(due)
        for state, parts in due.items():
            if not state.is_worker or state.solution is None:
                continue
            if state.solved_at is None or not state.layer.weight.requires_grad:
                continue
            with self.phases("refresh", state.name):
                names = {name for part in parts for name in state.block.parts[part].statistics}
                means = {name: state.running[name].mean_on_device() for name in sorted(names)}
                known = {name: mean for name, mean in means.items() if mean is not None}
                counts = state.counts_of(known)
                given = at.given(state, known, previous=state.solution, counts=counts)
                solved = state.block.refresh(given, parts)
                if solved is not None:
                    state.use(solved)

    @property
    def _decay(self) -> float:
        """Weight of the old statistics at this step."""
        return float(self.schedules.at("decay", self.clock.step))

    @property
    def _draws_at_steps(self) -> bool:
        """Whether a rule that changes gradients draws random numbers."""
        return any(transform.draws for transform in self.transforms)

    def adaptive_interval(self) -> AdaptiveInterval | None:
        """The refresh interval, if it adapts itself."""
        interval: AdaptiveInterval | None = self.schedules.adaptive("refresh_every")
        return interval

    def _now(self, due: Due) -> Now:
        """What all layers that are solved at this step have in common."""
        step = self.clock.step
        draws = any(state.block.draws for state in due)
        seed = self.random.draw() if draws else 0
        damping = float(self.schedules.at("damping", step))
        return Now(step, damping, seed, self.schedules.relative_damping)

    def _take_all(self, due: Due, solved: Iterable[Solved]) -> None:
        found = set()
        for state, solution in solved:
            self._take(state, due[state], solution)
            found.add(state)
        if not self.coordinator.sees_all:
            self._unobserved.report_unseen(state for state in due if state not in found)

    def _judge(self, due: Sequence[LayerState]) -> None:
        """Adapt the interval to what has changed since the last refreshes, alike on all ranks."""
        interval = self.adaptive_interval()
        if interval is None or not due or not interval.due(self.clock.step):
            return
        votes = self.coordinator.total(compare(due, interval.rule.tolerance))
        if (verdict := interval.judge(votes.tolist(), self.clock.step)) != "kept":
            self.count(f"refresh_{verdict}")

    def _take(
        self, state: LayerState, parts: Sequence[str], solution: dict[str, Tensor] | None
    ) -> None:
        """Use what was solved from now on; without it, the last good solution stays."""
        step = self.clock.step
        for part in parts:
            for name in state.block.parts[part].statistics:
                state.running[name].fresh = False
        if solution is None:
            state.failures += 1
            state.failures_in_a_row += 1
            if state.failures_in_a_row >= MAX_FAILURES:
                raise UnsolvableError(
                    f"the curvature of layer {state.name!r} could not be solved {MAX_FAILURES} times "
                    "in a row; raise damping, or name the layer in exclude."
                )
        else:
            state.use(solution)
            state.solved_at, state.failures_in_a_row = step, 0
            self.count("refreshes")
        whole = set(parts) & set(state.block.due_parts("refresh"))
        if not whole and state.last_refresh is not None:
            return
        if state.last_refresh is None and self.options.stagger and state.offset:
            interval = int(self.schedules.at("refresh_every", step))
            state.last_refresh = step + state.offset - interval
        elif self.clock.refresh_on_grid(state.last_refresh):
            state.last_refresh = step

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
        self._updates.clear()  # owners may have changed
        self.row_form.resume()
        self.capture.begin_step(self.clock.factor_due() and not self.detached, self.clock.step)
        self.coordinator.restart()
        self._announce()
