"""Progress for people: redrawn lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from kronfac.runs import output
from kronfac.runs.events import Event
from kronfac.runs.timetable import Timetable
from kronfac.train.recipe.recipe import TrainPart
from kronfac.train.run.result import Result

#: Phases that are not K-FAC's own.
_OTHERS = ("data", "forward_backward", "optimizer")
#: Seconds between plain lines, apart from evaluations.
_EVERY = 20.0
_SHORTEST_BAR = 4
#: More batch sizes than these are not all named.
_MOST_SIZES = 4


class Progress:
    """What is known of a run so far, from its events."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.start: Event = {}
        self.step: Event = {}
        self.tested: Event = {}
        self.target: Event = {}

    def __call__(self, event: Event) -> None:
        """Process one event and show it; a closed output does not end the run."""
        try:
            self._take(event)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # that is `kronfac train | head`
                output.complain(f"{output.unwritable(error)}; the run goes on without progress.")
            output.silence(self.stream)
            self.stream = io.StringIO()

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            self.start, self.step, self.tested, self.target = event, {}, {}, {}
            self.say(self._title())
        elif kind == "step":
            self.step = event
        elif kind == "eval":
            self.tested = event
        elif kind == "target":
            self.target = event
        elif kind == "warning":
            self.say(f"warning: {event['message']}")
        elif kind == "finish":
            self.say(self._end(event))
        self.show(kind)

    def show(self, kind: str) -> None:
        """Update the display after an event of this kind."""

    def say(self, line: str) -> None:
        """Print a line that stays."""
        print(line, file=self.stream, flush=True)

    # --- sentences ------------------------------------------------------------------------------

    def _title(self) -> str:
        start = self.start
        ranks = f", {start['world']} ranks" if start["world"] > 1 else ""
        resumed = "" if start["resumed"] is None else f", resumed at step {start['resumed']}"
        return (
            f"{start['recipe']} with {start['optimizer']}, seed {start['seed']}: "
            f"{start['parameters']:,} parameters, {start['steps']:,} steps of "
            f"{self._sizes()} samples{ranks}{resumed}"
        )

    @property
    def _times(self) -> Timetable:
        return Timetable(self.start["train_samples"], self.start["batch"])

    def _sizes(self) -> str:
        """``64``, ``64, 128``, or ``64, 128, ..., 4,096``."""
        sizes = [f"{size:,}" for size in self._times.sizes(self.start["steps"])]
        if len(sizes) > _MOST_SIZES:
            sizes[2:-1] = ["..."]
        return ", ".join(sizes)

    def _end(self, event: Event) -> str:
        words = {"done": "done", "stopped": "stopped; a checkpoint is saved", "failed": "failed"}
        return f"{words[event['status']]}: {outcome(event, self.start, self.target)}"

    @property
    def now(self) -> Event:
        """The newest event with a step: tests may come between steps that are logged."""
        return max(self.step, self.tested or self.step, key=lambda event: int(event["step"]))

    def where(self, brief: bool = False) -> str:
        """Progress, the batch if it changes, loss and accuracy."""
        now, steps = self.now, self.start["steps"]
        text = f"step {now['step']:,}/{steps:,}  epoch {now['epoch']:.2f}"
        text += "" if brief else f"/{self.start['epochs']:.2f}"
        if len((times := self._times).sizes(steps)) > 1:
            text += f"  batch {times.batch(now['step'] - 1):,}"
        loss = self.step["loss"]
        text += f"  loss {loss:.4f}" if loss is not None else "  loss not finite"
        if self.tested and self.start["metric"] == "accuracy":
            text += f"  test {self.tested['accuracy']:.2%}"
        elif self.tested:
            text += f"  test loss {self.tested['loss']:.4f}"
        return text

    def speed(self, brief: bool = False) -> str:
        """Speed, remaining time, and the shares of K-FAC and of waiting for data."""
        unit = "texts" if self.start.get("samples") == "text" else "images"
        rate = self.step["samples_per_second"]
        steps = self.now["step"], self.start["steps"]
        done, whole = (self._times.samples(count) for count in steps)
        left = (whole - done) / max(rate, 1e-9)
        text = f"{rate:,.0f} {unit}/s  {clock(left)} left"
        phases = self.step["phases"]
        share, waited = kfac_share(phases), data_share(phases)
        found = (text, share.partition(" (")[0]) if brief else (text, share, waited)
        return "  ".join(filter(None, found))


def warnings_only(event: Event) -> None:
    """No progress: only warnings, on standard error."""
    if event["event"] == "warning":
        output.complain(f"warning: {event['message']}")


class Lines(Progress):
    """One line for each evaluation, and one every so often."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._last = time.monotonic()

    def show(self, kind: str) -> None:
        """Print where training is, if it is time."""
        late = kind == "step" and time.monotonic() - self._last > _EVERY
        if self.step and (kind == "eval" or late):
            self._last = time.monotonic()
            self.say(f"{self.where()}  {self.speed()}")


class Screen(Progress):
    """Two lines that are drawn again with every event."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._drawn = 0

    def say(self, line: str) -> None:
        """Print a line above those that are drawn."""
        self._erase()
        super().say(line)

    def show(self, kind: str) -> None:
        """Draw both lines."""
        if kind in ("step", "eval") and self.step:
            width = shutil.get_terminal_size().columns - 1
            self._erase()
            lines = [self._first(width)[:width], self._second(width)[:width]]
            self.stream.write("".join(f"{line}\n" for line in lines))
            self.stream.flush()
            self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            self.stream.write(f"\x1b[{self._drawn}A\x1b[J")  # up, and clear to the end
            self._drawn = 0

    def _first(self, width: int) -> str:
        line = self.where()
        return line if len(line) <= width else self.where(brief=True)

    def _second(self, width: int) -> str:
        """Bar and speed: where there is little room, first the bar is short, then the speed."""
        for speed in (self.speed(), self.speed(brief=True)):
            room = width - len(speed) - len("[]  ")
            if room >= _SHORTEST_BAR:
                break
        return f"{self._bar(max(_SHORTEST_BAR, min(16, room)))}  {speed}"

    def _bar(self, width: int) -> str:
        full = int(width * self.now["step"] / self.start["steps"])
        return "[" + "#" * full + "." * (width - full) + "]"


def make(stream: TextIO | None = None) -> Progress:
    """The kind of progress that a stream can show."""
    stream = sys.stdout if stream is None else stream
    able = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return Screen(stream) if able else Lines(stream)


def outcome(end: Event, start: Event, target: Event) -> str:
    """How long a run was, how good, and when it reached its target, from these events."""
    parts = [f"{end['step']:,} steps in {end['seconds']:.1f} s"]
    if end["accuracy"] is not None and start["metric"] == "accuracy":
        parts.append(f"test accuracy {end['accuracy']:.2%}")
    elif end["loss"] is not None:
        parts.append(f"test loss {end['loss']:.4f}")
    wanted = start.get("target")
    if target:
        goal = f"{wanted:.2%}" if start["metric"] == "accuracy" else f"loss {wanted:g}"
        when = f"at step {target['step']:,}, after {target['seconds']:.1f} s"
        parts.append(f"target {goal} reached {when}")
    elif wanted is not None and end["status"] == "done":
        parts.append("target not reached")
    return ", ".join(parts)


def finished(result: Result, train: TrainPart) -> str:
    """The line of a run that was finished before."""
    metric = result.metric if train.target_loss is None else "loss"
    wanted = train.target_loss if metric == "loss" else train.target
    start: Event = {"target": wanted, "metric": metric}
    names = ("status", "step", "seconds", "accuracy", "loss")
    end = {name: getattr(result, name) for name in names}
    target = {} if result.target is None else asdict(result.target)
    return f"finished already: {outcome(end, start, target)}"


def kfac_share(phases: Mapping[str, Any]) -> str:
    """``K-FAC 18 % (precondition 9, refresh 6)`` of the time of steps; empty for other optimizers."""
    total = sum(phases.values())
    own = {name: spent for name, spent in phases.items() if name not in _OTHERS}
    if not own or not total:
        return ""
    largest = sorted(own, key=lambda name: -own[name])[:2]
    parts = ", ".join(f"{name} {100 * own[name] / total:.0f}" for name in largest)
    return f"K-FAC {100 * sum(own.values()) / total:.0f} % ({parts})"


def data_share(phases: Mapping[str, Any]) -> str:
    """``data 7 %`` of the time of steps was waiting for data; empty if it is less than 5 %."""
    share = 100 * phases.get("data", 0.0) / (sum(phases.values()) or 1.0)
    return f"data {share:.0f} %" if share >= 5 else ""


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
