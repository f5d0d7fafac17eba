"""Tables of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from kronfac.report.draw import bars, text
from kronfac.report.draw.charts import style
from kronfac.report.draw.svg import Markup, escape, tag
from kronfac.report.read import phases
from kronfac.report.read.layers import LayerCost
from kronfac.report.read.read import Run
from kronfac.report.read.summary import (
    Chapter,
    Group,
    Spread,
    best,
    final,
    last_loss,
    step_seconds,
    throughput,
)

# Heading, the number of a run, and how it is shown.
_Column = tuple[str, Callable[[Run], float | None], Callable[[float], str]]


def table(
    head: Sequence[str], rows: Sequence[Sequence[Markup]], label: str, class_: str = ""
) -> Markup:
    """A table in a box of its own, which scrolls when the page is narrow."""
    cells = [tag("th", escape(name), scope="col") for name in head]
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", c) for c in row[1:])) for row in rows
    ]
    whole = tag(
        "table", tag("thead", tag("tr", *cells)), tag("tbody", *body), class_=class_ or None
    )
    return box(whole, label)


def box(content: Markup, label: str) -> Markup:
    """A region that scrolls sideways by itself, by keyboard too."""
    return tag("div", content, class_="box", role="region", aria_label=label, tabindex=0)


def named(group: Group) -> Markup:
    """An optimizer's name with its colour."""
    dot = tag("i", class_="dot", style=style(group), aria_hidden="true")
    return Markup(dot + escape(group.label))


def to_target(chapter: Chapter) -> Markup:
    """Seconds and steps to the target, the fastest first; misses stay in the table."""
    groups = [g for g in chapter.groups if g.target is not None]
    groups.sort(key=lambda g: (g.seconds_to_target, g.steps_to_target, -g.num_reached))
    several = len(chapter.targets) > 1
    times = [reached.seconds for group in groups for reached in group.reached]
    longest = max((t for t in times if math.isfinite(t)), default=1.0) or 1.0
    rows = []
    for group in groups:
        target = [escape(text.metric(group.metric, group.target))] if several else []
        steps = [reached.step for reached in group.reached]
        seconds = [reached.seconds for reached in group.reached]
        rows.append(
            [
                named(group),
                *target,
                _reached(group),
                _cell(Spread.of(steps), lambda v: f"{v:,.0f}"),
                _cell(Spread.of(seconds), text.duration),
                bars.strip(group, seconds, longest),
            ]
        )
    head = [
        "optimizer",
        *(["target"] if several else []),
        "reached",
        "steps",
        "time",
        "time of each run",
    ]
    return table(head, rows, "Steps and time to the target", "strips")


def _reached(group: Group) -> Markup:
    said = f"{group.num_reached} of {len(group.runs)}"
    notes = [
        f"{group.count(status)} {status}"
        for status in ("failed", "stopped", "unfinished")
        if group.count(status)
    ]
    extra = tag("small", escape(", ".join(notes))) if notes else Markup("")
    class_ = None if group.num_reached == len(group.runs) else "short"
    return Markup(tag("span", escape(said), class_=class_) + extra)


def _cell(found: Spread | None, show: Callable[[float], str]) -> Markup:
    """Median in front, the spread in small print."""
    if found is None:
        return escape("–")

    def said(value: float) -> str:
        return text.MISSED if math.isinf(value) else show(value)

    miss = "miss" if math.isinf(found.median) else None
    front = tag("span", escape(said(found.median)), class_=miss)
    if len(found.values) == 1 or found.low == found.high:
        return front
    return Markup(front + tag("small", escape(text.between(said(found.low), said(found.high)))))


def finals(chapter: Chapter) -> Markup:
    """What every optimizer ended with."""
    columns = _final_columns(chapter)
    rows = []
    for group in chapter.groups:
        cells = [_cell(group.spread(value), show) for _, value, show in columns]
        rows.append([named(group), *cells])
    # A column that no run has anything for says nothing.
    empty = escape("–")
    kept = [0, *(i for i in range(1, len(columns) + 1) if any(row[i] != empty for row in rows))]
    head = ["optimizer", *(name for name, _, _ in columns)]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows], "Final values")


def _final_columns(chapter: Chapter) -> list[_Column]:
    accurate: list[_Column] = [
        ("test accuracy", lambda run: final(run, "accuracy"), text.percent),
        ("best", best, text.percent),
    ]
    return [
        *(accurate if chapter.metric == "accuracy" else []),
        ("test loss", lambda run: final(run, "loss"), text.short),
        *([] if chapter.metric == "accuracy" else [("best", best, text.short)]),
        ("training loss", last_loss, text.short),
        ("steps", lambda run: float(run.last_step), lambda v: f"{v:,.0f}"),
        ("training time", lambda run: run.seconds, text.duration),
        ("per step", step_seconds, text.duration),
        ("samples/s", throughput, lambda v: f"{v:,.0f}"),
    ]


def phase_table(
    splits: Sequence[tuple[Group, Mapping[str, float]]], names: Sequence[str]
) -> Markup:
    """Milliseconds of each phase."""
    rows = []
    for group, seconds in splits:
        cells = [escape(text.duration(seconds[n]) if n in seconds else "–") for n in names]
        rows.append([named(group), *cells, escape(text.duration(sum(seconds.values())))])
    head = ["optimizer", *map(phases.label, names), "whole step"]
    return table(head, rows, "Time of a mean step by phase")


def layer_table(layers: Sequence[LayerCost], world: int) -> Markup:
    """Every preconditioned layer."""
    spent = [p for p in phases.PHASES if any(p in layer.seconds for layer in layers)]
    head = ["layer", "kind", "shape", "parameters", "memory", *(["ranks"] if world > 1 else [])]
    rows = []
    for layer in layers:
        count = "–" if layer.parameters is None else f"{layer.parameters:,}"
        rows.append(
            [
                escape(layer.name),
                escape(layer.kind),
                escape(" × ".join(map(str, layer.shape)) or "–"),
                escape(count),
                escape(text.size(layer.bytes)),
                *([escape(layer.ranks)] if world > 1 else []),
                *(escape(text.duration(layer.seconds.get(p))) for p in spent),
            ]
        )
    return table([*head, *map(phases.label, spent)], rows, "Preconditioned layers", "wide")


def pairs(values: Mapping[str, object], label: str) -> Markup:
    """Keys and values."""
    rows = [[escape(key), tag("code", escape(value))] for key, value in values.items()]
    return table(["key", "value"], rows, label, "pairs")
