"""How statistics that have left during the passes of a step arrive at it, alike on all ranks.

Ranks agree on how many messages have left, and whether there is more. They catch up with the one that has
sent most, send the rest, and add up counts. Each keeper then holds the sum and the count of all
ranks, as if it had observed them itself.

What has left of outputs was multiplied as if N were that of the first pass. What is missing is the same
factor on all ranks, unless their micro-batches have other proportions than before, or some rank has
cleared its gradients alone. What had left is then dropped, and later steps keep outputs until the step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kronfac.distributed.reduce import Moment
from kronfac.distributed.stream import Stream
from kronfac.distributed.stream_plan import StreamPlan
from kronfac.state.input_group import InputGroup, groups_of
from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.normalizer import Normalizer
from kronfac.statistics.running import new_count


@dataclass(frozen=True)
class Agreement:
    """What ranks know of each other at the step."""

    #: Messages that have left on some rank.
    launched: int
    #: What outputs that have left are multiplied by; ``None`` if that differs between ranks.
    ratio: float | None
    #: Whether what has left of outputs cannot be used.
    drops: bool
    #: Messages of which some rank has something that has not left.
    wanted: list[int]
    #: Layers that some rank has seen apart.
    parted: list[InputGroup]


def land(
    stream: Stream, moment: Moment, normalizer: Normalizer, observers: int = 1
) -> dict[str, int]:
    """Let everything arrive that has left, send the rest, and leave it with its keepers.

    As many ranks as there are ``observers`` have sent the same, which counts once. Returns the ranks of
    keepers, by statistic.
    """
    plan = stream.begin(moment)
    stream.notice_cleared()
    stream.blocking = True
    samples = normalizer.scale(1)
    found = _agree(stream, plan, samples)
    if found.drops:
        stream.void["output"], stream.holds_outputs = found.launched, True
    stream.divisor = samples / (found.ratio or 1.0)
    _catch_up(stream, plan, found.launched)
    stream.holds_outputs = False
    wanted = set(found.wanted) | _part(stream, plan, found.parted)
    for number in sorted(wanted):
        stream.send(plan, plan.messages[number], stream.take)
    stream.land_all()
    _leave_with_keepers(stream, plan, normalizer, found, observers)
    if wanted or stream.learned.order is None:
        _learn(stream, plan)
    if found.ratio is not None or found.drops:
        stream.learned.proportional = found.ratio is not None
    stream.reset()
    return {key: slot.item.root for key, slot in plan.slots.items() if slot.item.root is not None}


def abandon(stream: Stream, moment: Moment | None) -> None:
    """Give up what is under way, after state was loaded, and see whether ranks have the same plan."""
    world = stream.layout.world
    if moment is None:
        return
    plan = stream.begin(moment)
    target = int(world.largest([float(stream.launched)]).item())
    stream.blocking = True
    while stream.launched < target:
        stream.launch(plan, empty=True)
    stream.land_all()
    stream.reset()
    digest = float(stream.begin(moment).digest)
    most, least = world.largest([digest, -digest]).tolist()
    stream.reset()
    stream.off = most != -least


def _agree(stream: Stream, plan: StreamPlan, samples: float | Tensor) -> Agreement:
    world, groups = stream.layout.world, groups_of(stream.layout.units)
    sent = stream.divisor is not None
    ratio = _ratio(stream, samples)
    void = float(stream.void["output"])
    numbers = [float(stream.launched), float(sent), void, -void]
    numbers += [float(_has_content(plan, keys)) for keys in plan.messages]
    numbers += [float(bool(group.sightings)) for group in groups]
    ratios = torch.full((2,), -math.inf) if ratio is None else torch.stack([ratio, -ratio])
    pieces = [torch.tensor(numbers, dtype=torch.float64), ratios]
    here = torch.cat([one.to(world.device, torch.float64) for one in pieces])
    launched, sent_any, most, least, *flags, high, low = world.total(
        here, dist.ReduceOp.MAX
    ).tolist()
    common = high == -low if high > -math.inf else True
    split = len(plan.messages)
    return Agreement(
        int(launched),
        (high if high > -math.inf else 1.0) if common else None,
        bool(sent_any) and not (common and most == -least),
        [number for number, flag in enumerate(flags[:split]) if flag],
        [group for group, flag in zip(groups, flags[split:], strict=True) if flag],
    )


def _ratio(stream: Stream, samples: float | Tensor) -> Tensor | None:
    """N as a multiple of what has stood for it, or would have; ``None`` if there were no passes."""
    assert stream.moment is not None
    if not stream.moment.passes:
        return None
    divisor = stream.moment.divisor() if stream.divisor is None else stream.divisor
    divided = next((state.pending.divided for state in stream.layout.units), None)
    if divisor is None:
        return None
    found = torch.as_tensor(samples, dtype=torch.float64) / divisor
    return found if divided is None else found / divided.to(found.device)


def _has_content(plan: StreamPlan, keys: Sequence[str]) -> bool:
    slots = [plan.slots[key] for key in keys]
    return any(one.name in one.state.pending.sums for one in slots if not one.is_lent)


def _catch_up(stream: Stream, plan: StreamPlan, target: int) -> None:
    while stream.launched < target:
        stream.launch(plan)
    stream.land_all()
    if stream.holds_outputs:
        for key in [key for key in stream.arrived if plan.slots[key].source == "output"]:
            del stream.arrived[key]


def _part(stream: Stream, plan: StreamPlan, groups: Sequence[InputGroup]) -> set[int]:
    """Let layers go on alone; each begins with what they had in common. Returns what they send then."""
    layout, wanted = stream.layout, set()
    for group in groups:
        members = list(group.members)
        for name in group.statistics:
            keys = [layout.own_key(state, name) for state in members]
            common = stream.arrived.get(keys[0])
            if common is not None:
                stream.arrived |= {key: common.clone() for key in keys[1:]}
            wanted |= {plan.where[key] for key in keys if key in plan.where}
        group.dissolve()
    if groups:
        layout.use(layout.placed)
    return wanted


def _leave_with_keepers(
    stream: Stream, plan: StreamPlan, normalizer: Normalizer, found: Agreement, observers: int
) -> None:
    """Give keepers the sums and counts of all ranks, as if they had observed them."""
    world, counts = stream.layout.world, []
    for key, slot in plan.slots.items():
        without: Collection[Pass] = stream.covered.get(key, ()) if found.drops else ()
        own = None if slot.is_lent else slot.state.pending.count(slot.name, normalizer, without)
        here = new_count(0.0, world.device) if own is None else own.to(world.device)
        counts.append(here.reshape(1))
    if not counts:
        return
    total = world.total(torch.cat(counts)) / observers
    for index, (key, slot) in enumerate(plan.slots.items()):
        value = stream.arrived.pop(key, None)
        if value is None or slot.is_lent:
            continue
        if slot.source == "output" and found.ratio not in (None, 1.0):
            value.mul_(found.ratio ** slot.state.block.statistics[slot.name].degree)
        if observers > 1:
            value.div_(observers)
        slot.state.pending.landed[slot.name] = (value, total[index].to(value.device))


def _learn(stream: Stream, plan: StreamPlan) -> None:
    """Take note of the order in which statistics are complete, and of how often they are observed."""
    world, keys = stream.layout.world, list(plan.slots)
    seen = [float(key in stream.sequence) for key in keys]
    here = [float(stream.sequence.get(key, 0)) for key in keys]
    total = world.total([*here, *seen]).tolist()
    mean = {
        key: total[index] / total[index + len(keys)]
        for index, key in enumerate(keys)
        if total[index + len(keys)]
    }
    stream.learned.order = sorted(mean, key=lambda key: (mean[key], keys.index(key)))
    calls = world.largest([float(_calls(plan, key)) for key in keys]).tolist()
    stream.learned.calls = {
        key: int(calls[index]) for index, key in enumerate(keys) if calls[index]
    }


def _calls(plan: StreamPlan, key: str) -> int:
    """How often a statistic was observed in each pass; 0 if it was not."""
    slot = plan.slots[key]
    pending = slot.state.pending
    passes = pending.whole if slot.source == "input" else pending.finite
    version = pending.versions[slot.source]
    return max(1, version // max(1, len(passes))) if version else 0
