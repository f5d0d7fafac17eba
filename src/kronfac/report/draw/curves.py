"""Lines over steps and seconds: one for each run, and their median."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kronfac.report.read.read import Record, Run, number
from kronfac.report.read.summary import Group, median

Axis = Literal["steps", "seconds"]
_MOST_POINTS = 160


class Point(NamedTuple):
    """A value after so many steps and seconds of training."""

    step: float
    seconds: float | None
    value: float

    def at(self, axis: Axis) -> float | None:
        """Where it lies along an axis."""
        return self.step if axis == "steps" else self.seconds


@dataclass(frozen=True)
class Curve:
    """A group's line: the median over its runs, and each run alone."""

    group: Group
    median: tuple[Point, ...]
    runs: tuple[tuple[Point, ...], ...]

    def __bool__(self) -> bool:
        return any(self.runs)

    @property
    def values(self) -> list[float]:
        """All values, for the axis."""
        return [p.value for run in (*self.runs, self.median) for p in run]

    def along(self, axis: Axis) -> list[float]:
        """All places along an axis."""
        found = [p.at(axis) for run in (*self.runs, self.median) for p in run]
        return [place for place in found if place is not None]


def curve(group: Group, source: Literal["steps", "evals"], key: str) -> Curve:
    """The line of a field of the step or eval events."""
    raw = [_points(getattr(run, source), key) for run in group.runs]
    middle = _median(raw)
    return Curve(group, tuple(thin(middle)), tuple(tuple(thin(points)) for points in raw))


def _points(records: Sequence[Record], key: str) -> list[Point]:
    return [
        Point(record["step"], record["seconds"], value)
        for record in records
        if (value := number(record.get(key))) is not None
    ]


def _median(runs: Sequence[list[Point]]) -> list[Point]:
    """Median of values and of seconds at each step that more than half of the runs got to.

    Runs that log at other steps are interpolated. Where half of the runs or more have ended, a
    median of the rest would jump, so the line ends.
    """
    runs = [points for points in runs if points]
    found = []
    for step in sorted({point.step for points in runs for point in points}):
        there = [at for points in runs if (at := _interpolate(points, step)) is not None]
        if 2 * len(there) > len(runs):
            seconds = [point.seconds for point in there if point.seconds is not None]
            clock = median(seconds) if len(seconds) == len(there) else None
            found.append(Point(step, clock, median([point.value for point in there])))
    return found


def _interpolate(points: Sequence[Point], step: float) -> Point | None:
    index = bisect_left(points, step, key=lambda point: point.step)
    if index < len(points) and points[index].step == step:
        return points[index]
    if index in (0, len(points)):
        return None
    left, right = points[index - 1], points[index]
    share = (step - left.step) / (right.step - left.step)
    seconds = None
    if left.seconds is not None and right.seconds is not None:
        seconds = left.seconds + share * (right.seconds - left.seconds)
    return Point(step, seconds, left.value + share * (right.value - left.value))


def thin(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most so many points: means of neighbours, the first and last as they are."""
    if len(points) <= most:
        return list(points)
    inner, buckets = points[1:-1], most - 2
    found = [points[0]]
    for i in range(buckets):
        part = inner[i * len(inner) // buckets : (i + 1) * len(inner) // buckets]
        clocks = [p.seconds for p in part if p.seconds is not None]
        seconds = sum(clocks) / len(clocks) if len(clocks) == len(part) else None
        step = sum(p.step for p in part) / len(part)
        found.append(Point(step, seconds, sum(p.value for p in part) / len(part)))
    return [*found, points[-1]]


def logged(run: Run, key: str) -> list[float]:
    """All values of a field of the step events."""
    return [v for step in run.steps if (v := number(step.get(key))) is not None]
