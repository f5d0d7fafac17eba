"""Horizontal bars: time by phase, cost by layer, memory, and the map of layers on ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kronfac.report.draw import text
from kronfac.report.draw.charts import style
from kronfac.report.draw.svg import Markup, escape, svg, tag
from kronfac.report.read import phases
from kronfac.report.read.layers import LayerCost, balance, loads
from kronfac.report.read.summary import Group, median

_HEIGHT = 22
MOST_RANKS = 64  # columns of the map
MOST_LAYERS = 12  # bars


def phase_style(phase: str) -> str:
    """The colour of a phase."""
    known = phase if phase in phases.PHASES else "other"
    return f"--c:var(--phase-{known.replace('_', '-')})"


def phase_legend(names: Sequence[str]) -> Markup:
    """Colours of the phases and what they mean."""
    keys = [
        tag(
            "li",
            tag("i", class_="swatch", style=phase_style(name), aria_hidden="true"),
            escape(phases.label(name)),
            title=phases.MEANING.get(name),
        )
        for name in names
    ]
    return tag("ul", *keys, class_="swatches")


def stack(seconds: Mapping[str, float], longest: float, title: str) -> Markup:
    """One bar of phases; ``longest`` seconds fill the width."""
    parts, start = [], 0.0
    total = sum(seconds.values())
    for phase, amount in seconds.items():
        said = f"{phases.label(phase)}: {text.duration(amount)}, {text.percent(amount / total)}"
        width = 100 * amount / longest
        parts.append(
            tag(
                "rect",
                tag("title", escape(said)),
                x=f"{100 * start / longest:.3f}%",
                width=f"{width:.3f}%",
                height="100%",
                style=phase_style(phase),
            )
        )
        start += amount
    spoken = [f"{phases.label(p)} {text.duration(s)}" for p, s in seconds.items()]
    return svg(f"{title}: {', '.join(spoken)}", *parts, class_="bar", height=_HEIGHT)


def phase_bars(splits: Sequence[tuple[Group, Mapping[str, float]]]) -> Markup:
    """A row for each optimizer."""
    longest = max(sum(seconds.values()) for _, seconds in splits)
    rows = []
    for group, seconds in splits:
        total = text.duration(sum(seconds.values()))
        bar = stack(seconds, longest, f"A step of {group.label} takes {total}")
        rows.append(_row(group.label, bar, total, group))
    return tag("div", *rows, class_="bars")


def plain_bars(rows: Sequence[tuple[Group, float, str]], title: str) -> Markup:
    """A row for each optimizer: its number and the text beside it."""
    longest = max(value for _, value, _ in rows) or 1.0
    found = []
    for group, value, said in rows:
        rect = tag("rect", width=f"{100 * value / longest:.3f}%", height="100%", rx=2)
        bar = svg(f"{title} of {group.label}: {said}", rect, class_="bar", height=_HEIGHT)
        found.append(_row(group.label, bar, said, group))
    return tag("div", *found, class_="bars")


def strip(group: Group, seconds: Sequence[float], longest: float) -> Markup:
    """A dot for each run on a line of seconds, a tick at the median, misses counted at the end."""
    reached = [value for value in seconds if math.isfinite(value)]
    marks = [tag("line", x2="100%", y1=10, y2=10)]
    for value in reached:
        marks.append(tag("circle", cx=f"{88 * value / longest:.2f}%", cy=10, r=5.5))
    middle = median(seconds)
    if math.isfinite(middle):
        marks.append(tag("rect", x=f"{88 * middle / longest:.2f}%", y=1, width=2, height=18))
    missed = len(seconds) - len(reached)
    if missed:
        marks.append(tag("text", escape("✕" * min(missed, 5)), x="100%", y=15))
    said = ", ".join(text.duration(value) for value in sorted(reached))
    spoken = f"{group.label}: {said or 'no run reached it'}" + (
        f"; {missed} missed" if missed else ""
    )
    return svg(spoken, *marks, class_="strip", height=20, style=style(group))


def layer_bars(layers: Sequence[LayerCost], most: int = MOST_LAYERS) -> Markup:
    """The most expensive layers, by phase."""
    costly = sorted(layers, key=lambda layer: -layer.total)[:most]
    rows = []
    for layer in costly:
        spent = {phase: s for phase, s in layer.seconds.items() if s > 0}
        if spent:
            bar = stack(spent, costly[0].total, layer.name)
            rows.append(_row(layer.name, bar, text.duration(layer.total)))
    return tag("div", *rows, class_="bars names")


def _row(label: str, bar: Markup, said: str, group: Group | None = None) -> Markup:
    return tag(
        "div",
        tag("span", escape(label), class_="name"),
        bar,
        tag("span", escape(said), class_="amount"),
        class_="row",
        style=style(group) if group else None,
    )


def placement_map(layers: Sequence[LayerCost], world: int) -> Markup:
    """Layers (rows) × ranks (columns), coloured by cost, and the load of each rank below."""
    costs = [loads(layer, world) for layer in layers]
    most = max((amount for row in costs for amount in row.values()), default=1.0) or 1.0
    totals = balance(layers, world)
    shown = range(min(world, MOST_RANKS))
    ranks = [tag("th", escape(rank), scope="col") for rank in shown]
    head = tag("tr", tag("th", escape("layer"), scope="col"), *ranks)
    rows = [
        tag(
            "tr",
            tag("th", escape(layer.name), scope="row"),
            *(_cell(layer, row.get(rank), most, rank) for rank in shown),
        )
        for layer, row in zip(layers, costs, strict=True)
    ]
    mean = sum(totals) / world or 1.0
    foot = tag(
        "tr",
        tag("th", escape("load, mean = 1"), scope="row"),
        *(tag("td", escape(f"{totals[rank] / mean:.2f}")) for rank in shown),
        class_="load",
    )
    return tag("table", tag("thead", head), tag("tbody", *rows), tag("tfoot", foot), class_="map")


def _cell(layer: LayerCost, amount: float | None, most: float, rank: int) -> Markup:
    if amount is None:
        return tag("td")
    # A square root keeps cheap layers visible beside a huge one.
    strength = 12 + 88 * (amount / most) ** 0.5
    share = amount / layer.work if layer.work else 1.0
    part = "" if share > 0.999 else f", {text.percent(share)} of it"
    said = f"{layer.name} on rank {rank}{part}"
    return tag(
        "td",
        svg(said, tag("rect", width="100%", height="100%", rx=3), height=18),
        style=f"--strength:{strength:.0f}%",
    )
