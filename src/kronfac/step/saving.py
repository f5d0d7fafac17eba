"""What a preconditioner saves, restores and counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kronfac.layers.shards import local
from kronfac.state import state_dict as checkpoint
from kronfac.state.layer_state import LayerState
from kronfac.statistics.screening import screen_all
from kronfac.step.lost_statistics import forget_lost

if TYPE_CHECKING:
    from kronfac.step.pipeline import Preconditioner

#: Names of parameters, and what is saved by such names.
Names = dict[nn.Parameter, str]
Entries = dict[str, dict[str, Any]]


def stats(preconditioner: Preconditioner) -> dict[str, Any]:
    """See :meth:`Preconditioner.stats`."""
    states = preconditioner.layers.values()
    screen_all(state.pending for state in states)
    counters = {name: int(value) for name, value in preconditioner.counters.items()}
    return {
        "steps": preconditioner.clock.step,
        **preconditioner.coordinator.stats(),
        "factor_updates": counters.get("factor_updates", 0),
        "refreshes": counters.get("refreshes", 0),
        "kl_clip_steps": counters.get("kl_clip_steps", 0),
        "kl_clip_active": counters.get("kl_clip_active", 0),
        "trust_region_steps": counters.get("trust_region_steps", 0),
        "trust_region_active": counters.get("trust_region_active", 0),
        "refresh_every": int(
            preconditioner.schedules.at("refresh_every", preconditioner.clock.step)
        ),
        "refresh_lengthened": counters.get("refresh_lengthened", 0),
        "refresh_shortened": counters.get("refresh_shortened", 0),
        "damping": float(preconditioner.schedules.at("damping", preconditioner.clock.step)),
        "damping_raised": counters.get("damping_raised", 0),
        "damping_lowered": counters.get("damping_lowered", 0),
        "damping_rejected": counters.get("damping_rejected", 0),
        **({} if preconditioner.quadratic is None else preconditioner.quadratic.coefficients),
        "dropped": {
            s.name: int(s.pending.dropped) for s in states if s.pending.dropped is not None
        },
        "failures": {s.name: s.failures for s in states},
        "without_solution": [
            s.name for s in states if s.solved_at is None and s.layer.weight.requires_grad
        ],
    }


def entries(preconditioner: Preconditioner, names: Names) -> Entries:
    """See :meth:`Preconditioner.entries`; of some parameters, if not all are named."""
    step = torch.tensor(preconditioner.clock.step, dtype=torch.int64, device="cpu")
    partial = torch.tensor(preconditioner.coordinator.is_partial, device="cpu")
    found: dict[str, dict[str, Any]] = {
        name: {"step": step} for p, name in names.items() if p.requires_grad
    }
    shared: dict[str, Any] = {"step": step, "partial": partial}
    last = -1 if preconditioner.clock.last_factor is None else preconditioner.clock.last_factor
    shared["last_factor"] = torch.tensor(last, dtype=torch.int64, device="cpu")
    random = preconditioner.observer.random_state()
    damping = preconditioner.schedules.adaptive("damping")
    if random is not None:
        shared["random"] = random
    if (seeds := preconditioner.random.entry()) is not None:
        shared["seeds"] = seeds
    if damping is not None:
        shared |= damping.entries()
    if (interval := preconditioner.adaptive_interval()) is not None:
        shared["interval"] = interval.entry()
    place = {state: index for index, state in enumerate(preconditioner.layers.values())}
    for (parameter, _), state in preconditioner.layers.items():
        if parameter not in names:
            continue
        entry = found.setdefault(names[parameter], {})
        entry |= checkpoint.layer_entry(state, place) | shared
    for parameter, update in (
        {} if preconditioner.quadratic is None else preconditioner.quadratic.last
    ).items():
        if parameter not in names:
            continue
        found.setdefault(names[parameter], {"step": step})["update"] = update
    return found


def load(preconditioner: Preconditioner, names: Names, entries: Entries) -> None:
    """See :meth:`Preconditioner.load_entries`."""
    preconditioner.capture.clear()
    preconditioner.clock.step, preconditioner.clock.last_factor = 0, None
    states, coordinator = list(preconditioner.layers.values()), preconditioner.coordinator
    solved = []
    for (parameter, _), state in preconditioner.layers.items():
        checkpoint.load_layer(state, entry := entries.get(names[parameter], {}))
        if checkpoint.was_solved(state, entry):
            solved.append(state)
    saved = saved_groups(preconditioner, names, entries)
    preconditioner.inputs.finish_loading(states, saved, coordinator)
    lacks = forget_lost(solved)
    preconditioner.rows.loaded(preconditioner.layers.values(), preconditioner.coordinator)
    damping = preconditioner.schedules.adaptive("damping")
    if damping is not None:
        damping.resume(entries.values())
    if (interval := preconditioner.adaptive_interval()) is not None:
        interval.resume(entries.values())
    if preconditioner.quadratic is not None:
        preconditioner.quadratic.resume({p: entries.get(name, {}) for p, name in names.items()})
    preconditioner.random.resume(
        next((entry["seeds"] for entry in entries.values() if "seeds" in entry), None)
    )
    for entry in entries.values():
        if "step" in entry:
            preconditioner.clock.step = int(entry["step"])
        if "last_factor" in entry:
            last = int(entry["last_factor"])
            preconditioner.clock.last_factor = None if last < 0 else last
        if "random" in entry:
            preconditioner.observer.set_random_state(entry["random"])
    if entries and coordinator.largest([float(lacks)])[0]:
        preconditioner.clock.last_factor = None  # the next step takes statistics


def resume(
    preconditioner: Preconditioner,
    plan: str,
    groups: list[dict[str, Any]],
    names: Names,
    entries: Entries,
) -> None:
    """See :meth:`Preconditioner.resume`."""

    def holds_all() -> bool:
        return all(
            checkpoint.holds_all(state, entries.get(names[parameter], {}))
            for (parameter, _), state in preconditioner.layers.items()
        )

    states, coordinator = list(preconditioner.layers.values()), preconditioner.coordinator
    saved = saved_groups(preconditioner, names, entries)
    preconditioner.inputs.begin_loading(states, saved, coordinator)
    coordinator.resume(plan, holds_all, states, groups)


def saved_groups(
    preconditioner: Preconditioner, names: Names, entries: Entries
) -> dict[LayerState, int | None]:
    """By layer, the number of those that share its input in a checkpoint, if that was settled."""
    return {
        state: checkpoint.saved_group(state, entries.get(names[parameter], {}))
        for (parameter, _), state in preconditioner.layers.items()
    }


def check(preconditioner: Preconditioner, names: Names, entries: Entries) -> None:
    """See :meth:`Preconditioner.check_entries`."""
    for (parameter, _), state in preconditioner.layers.items():
        checkpoint.check_layer(state, entries.get(names[parameter], {}))


def is_empty_step(preconditioner: Preconditioner, groups: Iterable[dict[str, Any]]) -> bool:
    """See :meth:`Preconditioner.is_empty_step`.

    Such a step comes before the first one, or with all learning rates at zero and no forward before it,
    all of which the host knows.
    """
    idle = all(_is_zero_on_host(group.get("lr")) for group in groups)
    if not preconditioner.layers or (preconditioner.clock.step and not idle):
        return False
    moves = any(not state.pending.empty for state in preconditioner.layers.values())
    moves |= bool(preconditioner.clock.step) and preconditioner.capture.forward_seen
    if not moves:
        grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        moves = any(bool(local(grad).any()) for grad in grads)
    # A shard may be zero, or empty, where others are not: no rank decides alone.
    return not preconditioner.coordinator.anywhere(moves)


def _is_zero_on_host(rate: Any) -> bool:
    known = not isinstance(rate, Tensor) or rate.device.type == "cpu"
    return rate is not None and known and float(rate) == 0
