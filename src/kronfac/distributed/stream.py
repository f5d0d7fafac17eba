"""Statistics that leave for their keepers while the model still runs, so that no rank holds all of them.

Where parameters are sharded for lack of memory, a statistic leaves as soon as a pass has shown all of it,
in one of a fixed cycle of messages, and its memory is free at once. About two messages are under way. The
keeper adds up what arrives. Sums add, so nothing depends on when and in how many pieces they have left:
what is observed later leaves with the next cycle, once for each micro-batch, or at the step.

Messages follow one order on all ranks. One that is not complete leaves as it is when two later ones are:
a layer may be unused, or used again. How all of this ends at the step is in ``landing``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kronfac.distributed.comm.buckets import Bucket
from kronfac.distributed.comm.collectives import Collectives
from kronfac.distributed.layout import Layout
from kronfac.distributed.reduce import Moment
from kronfac.distributed.stream_plan import Learned, StreamPlan, make_plan
from kronfac.state.layer_state import LayerState
from kronfac.statistics.forward_pass import Pass

#: Messages under way, and full messages that wait for an earlier one.
IN_FLIGHT = 2
SLACK = 2
#: Seconds that a pass waits for others to take a message. They may be busy elsewhere, and need this rank.
PATIENCE = 10.0


@dataclass
class Marks:
    """Which statistics of the messages of a cycle are complete."""

    keys: set[str] = field(default_factory=set)
    full: set[int] = field(default_factory=set)

    def add(self, key: str, number: int, message: Sequence[str]) -> None:
        """Note that a statistic of a message is complete."""
        self.keys.add(key)
        if all(one in self.keys for one in message):
            self.full.add(number)


class Stream:
    """The messages of one step, and what has arrived of them."""

    def __init__(self, layout: Layout, collectives: Collectives) -> None:
        self.layout = layout
        self.collectives = collectives
        self.learned = Learned()
        #: Whether ranks do not know yet that they have the same plan.
        self.off = False
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.plan: StreamPlan | None = None
        self.moment: Moment | None = None
        #: How many messages have left, and which of the cycle is next.
        self.launched = self._next = 0
        self._flying: deque[tuple[int, Bucket]] = deque()
        #: What has arrived here, by statistic, from which message of each side on.
        self.arrived: dict[str, Tensor] = {}
        self.void = {"input": 0, "output": 0}
        #: By side, a layer of which something has left, and when it was cleared last.
        self._generations: dict[str, tuple[LayerState, int]] = {}
        self._now, self._again = Marks(), Marks()
        #: When each statistic was complete for the first time.
        self.sequence: dict[str, int] = {}
        #: Number of its calls when a statistic last left.
        self._left_at: dict[str, int] = {}
        self._impatient = self.blocking = self.holds_outputs = False
        self._forget_outputs()

    def _forget_outputs(self) -> None:
        #: What has stood for N.
        self.divisor: float | Tensor | None = None
        #: By statistic, the passes of which something has left before the step.
        self.covered: dict[str, set[Pass]] = {}

    def begin(self, moment: Moment) -> StreamPlan:
        """The plan of this step."""
        self.moment = moment
        if self.plan is None:
            for state in self.layout.units:
                state.renew_if_stale()
            known = self.learned.proportional
            holds = not (moment.proportional if known is None else known)
            self.plan = make_plan(self.layout, self.learned, holds)
        return self.plan

    # --- while the model runs -------------------------------------------------------------------

    def observed(self, state: LayerState, source: str, moment: Moment) -> None:
        """Take note of a call that has been observed, and send off what is complete."""
        if self.off:
            return
        plan = self.begin(moment)
        while self._flying and self._flying[0][1].done:
            self._land_next()
        self.notice_cleared()
        if source == "output" and moment.divisor() is None:
            return
        for name, running in state.running.items():
            key = self.layout.key(state, name)
            if running.statistic.source == source and key in plan.slots:
                self._mark(plan, key, state.pending.versions[source])
        self._advance(plan)

    def _mark(self, plan: StreamPlan, key: str, version: int) -> None:
        if version - self._left_at.get(key, 0) < self.learned.calls.get(key, 1):
            return
        self.sequence.setdefault(key, len(self.sequence) + 1)
        if plan.leaves_early(key):
            number = plan.where[key]
            marks = self._now if number >= self._next else self._again
            marks.add(key, number, plan.messages[number])

    def _advance(self, plan: StreamPlan) -> None:
        while True:
            if self._next == len(plan.cycle) or len(self._again.full) >= SLACK:
                if not self._again.keys:
                    return
                while self._next < len(plan.cycle):
                    self.launch(plan)
                self._begin_cycle()
            elif self._next in self._now.full or len(self._now.full) >= SLACK:
                self.launch(plan)
            else:
                return

    def _begin_cycle(self) -> None:
        self._next, self._now, self._again = 0, self._again, Marks()

    def notice_cleared(self) -> None:
        """Give up what has left and was cleared since: outputs by ``zero_grad``, all by a failed step."""
        for source, (state, generation) in list(self._generations.items()):
            if state.pending.generations[source] == generation:
                continue
            assert self.plan is not None
            del self._generations[source]
            slots, self.void[source] = self.plan.slots, self.launched
            for held in (self.arrived, self._left_at):
                for key in [key for key in held if slots[key].source == source]:
                    del held[key]
            if source == "output":
                self._forget_outputs()

    # --- messages -------------------------------------------------------------------------------

    def launch(self, plan: StreamPlan, empty: bool = False) -> None:
        """Send off the next message of the cycle, as it is, or zeros."""
        if self._next == len(plan.cycle):
            self._begin_cycle()
        number, self._next = self._next, self._next + 1
        self._now.full.discard(number)
        self.send(plan, plan.cycle[number], (lambda _: None) if empty else self.take)

    def send(
        self, plan: StreamPlan, keys: Sequence[str], content: Callable[[str], Tensor | None]
    ) -> None:
        """Send off a message."""
        while len(self._flying) >= IN_FLIGHT and self._is_patient():
            self._land_next()
        items = [plan.slots[key].item for key in keys]
        wire = self.layout.settings.wire_dtype
        bucket = Bucket(items, self.collectives, wire, rings=True)
        with torch.profiler.record_function("kronfac.reduce.send"):
            for key in keys:
                bucket.flat.put(key, content(key))
            bucket.launch()
        self._flying.append((self.launched, bucket))
        self.launched += 1

    def take(self, key: str) -> Tensor | None:
        """What this rank has observed of a statistic, which it forgets."""
        assert self.plan is not None
        slot = self.plan.slots[key]
        state, name, source, pending = slot.state, slot.name, slot.source, slot.state.pending
        if slot.is_lent or name not in pending.sums:
            return None
        if source == "input":
            self._note_left(key, state, source)
            return pending.leave(name, 1.0)
        assert self.moment is not None
        divisor = self.moment.divisor() if self.divisor is None else self.divisor
        # Micro-batches of different sizes may have other proportions on other ranks: not more than the
        # first of them can be in vain.
        sizes = {one.samples for one in self.moment.passes}
        if divisor is None or self.holds_outputs or (len(sizes) > 1 and not self.blocking):
            return None
        self.divisor = divisor
        self._note_left(key, state, source)
        value = pending.leave(name, divisor)
        if not self.blocking:
            self.covered.setdefault(key, set()).update(pending.finite)
        return value

    def _note_left(self, key: str, state: LayerState, source: str) -> None:
        self._left_at[key] = state.pending.versions[source]
        self._generations.setdefault(source, (state, state.pending.generations[source]))

    def _is_patient(self) -> bool:
        """Wait until the oldest message has arrived; false if that takes too long.

        A device waits for it in its own time. The host must not: if a rank has left out the layers of
        several messages, it sends them later, and may wait for this one in the meantime.
        """
        oldest = self._flying[0][1]
        if self.blocking or oldest.flat.tensor.device.type != "cpu":
            return True
        until = time.monotonic() + PATIENCE
        while not oldest.done:
            if self._impatient or time.monotonic() > until:
                self._impatient = True
                return False
            time.sleep(1e-4)
        return True

    def land_all(self) -> None:
        """Wait for all messages under way."""
        while self._flying:
            self._land_next()

    def _land_next(self) -> None:
        assert self.plan is not None
        number, bucket = self._flying.popleft()
        bucket.wait()
        for key, total in bucket.sums().items():
            if number < self.void[self.plan.slots[key].source]:
                continue
            if key in self.arrived:
                self.arrived[key].add_(total)
            else:
                self.arrived[key] = total
