"""Line charts.

The drawing is an SVG that stretches with the page, while labels are text of the page beside it, so
that they keep their size on a phone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kronfac.report.draw import text
from kronfac.report.draw.curves import Axis, Curve, Point
from kronfac.report.draw.scale import Scale, along
from kronfac.report.draw.svg import Markup, escape, join, path, svg, tag
from kronfac.report.read.summary import Group

_SIDE = 1000.0


@dataclass(frozen=True)
class Chart:
    """What a line chart shows."""

    title: str
    curves: Sequence[Curve]
    scale: Scale
    unit: str = ""  # "percent" for accuracies
    targets: Sequence[float] = ()
    dots: bool = False


def style(group: Group) -> str:
    """Colour of an optimizer's kind, with a shade and dashes for further groups of that kind."""
    colour = f"var(--{group.kind})"
    if group.hue is not None:
        colour = f"light-dark(hsl({group.hue} 67% 30%), hsl({group.hue} 100% 80%))"
    if group.variant:
        shade = 22 * ((group.variant + 1) // 2 % 4)
        colour = f"color-mix(in oklab, {colour}, var(--text) {shade}%)"
    return f"--c:{colour};--dash:{('none', '7 4', '2 4', '10 3 2 3')[group.variant % 4]}"


def draw(chart: Chart, axis: Axis, series: Sequence[Group]) -> Markup:
    """One chart over one axis. ``series`` fixes the number by which a group is hidden and shown."""
    curves = [c for c in chart.curves if c.along(axis)]
    if not curves:
        return Markup("")
    across = along([place for c in curves for place in c.along(axis)])
    unit = "steps" if axis == "steps" else "seconds of training"
    plot = tag(
        "div",
        _y_labels(chart.scale),
        tag(
            "div",
            svg(
                _spoken(chart, curves, unit),
                *_grid(chart.scale, across),
                *_target_lines(chart),
                *(_lines(chart, c, axis, across, series.index(c.group)) for c in reversed(curves)),
                box=f"0 0 {_SIDE:.0f} {_SIDE:.0f}",
            ),
            *_target_labels(chart),
            class_="area",
        ),
        _x_labels(across),
        _data(chart, curves, axis, across, series),
        class_="plot",
        tabindex=0,
        role="group",
        aria_label=f"{chart.title} over {unit}; arrow keys read values",
    )
    caption = tag("figcaption", tag("b", escape(chart.title)), escape(f" over {unit}"))
    return tag("figure", caption, plot, class_="chart", data_axis=axis)


def _spoken(chart: Chart, curves: Sequence[Curve], unit: str) -> str:
    ends = [
        f"{c.group.label} ends at {_value(chart, c.median[-1].value)}" for c in curves if c.median
    ]
    return f"{chart.title} over {unit}. {'; '.join(ends)}."


def _value(chart: Chart, value: float) -> str:
    return text.percent(value) if chart.unit == "percent" else text.short(value)


def _up(scale: Scale, value: float) -> float:
    return _SIDE * (1 - scale.place(value))


def _grid(scale: Scale, across: Scale) -> list[Markup]:
    rows = "".join(f"M0 {_up(scale, v):.1f}H1000" for v, _ in scale.ticks)
    columns = "".join(f"M{_SIDE * across.place(v):.1f} 0V1000" for v, _ in across.ticks)
    return [tag("path", class_="grid", d=rows + columns)]


def _target_lines(chart: Chart) -> list[Markup]:
    return [
        tag("path", class_="target", d=f"M0 {_up(chart.scale, t):.1f}H1000") for t in chart.targets
    ]


def _target_labels(chart: Chart) -> list[Markup]:
    return [
        tag(
            "span",
            escape(f"target {_value(chart, t)}"),
            class_="target-label",
            style=f"bottom:{100 * chart.scale.place(t):.2f}%",
        )
        for t in chart.targets
    ]


def _lines(chart: Chart, curve: Curve, axis: Axis, across: Scale, number: int) -> Markup:
    def line(points: Sequence[Point], class_: str) -> Markup:
        places = _places(points, axis, across, chart.scale)
        return tag("path", class_=class_, d=path(places)) if places else Markup("")

    thin = [line(run, "run") for run in curve.runs] if len(curve.runs) > 1 else []
    parts = [*thin, line(curve.median, "median")]
    if chart.dots and len(curve.median) <= 60:
        places = _places(curve.median, axis, across, chart.scale)
        dots = "".join(path([place]) for place in places)
        parts.append(tag("path", class_="dots", d=dots) if dots else Markup(""))
    return tag("g", *parts, style=style(curve.group), data_series=number)


def _places(
    points: Sequence[Point], axis: Axis, across: Scale, scale: Scale
) -> list[tuple[float, float]]:
    return [
        (_SIDE * across.place(x), _up(scale, point.value))
        for point in points
        if (x := point.at(axis)) is not None
    ]


def _y_labels(scale: Scale) -> Markup:
    labels = [
        tag("span", escape(label), style=f"bottom:{100 * scale.place(v):.2f}%")
        for v, label in scale.ticks
    ]
    return tag("div", *labels, class_="y", aria_hidden="true")


def _x_labels(across: Scale) -> Markup:
    labels = [
        tag("span", escape(label), style=f"left:{100 * across.place(v):.2f}%")
        for v, label in across.ticks
    ]
    return tag("div", *labels, class_="x", aria_hidden="true")


def _data(
    chart: Chart, curves: Sequence[Curve], axis: Axis, across: Scale, series: Sequence[Group]
) -> Markup:
    """What the script reads to show values: place (0 to 1), height (0 to 1), and their text."""
    found = []
    for curve in curves:
        points = [
            [
                round(across.place(x), 4),
                round(chart.scale.place(p.value), 4),
                f"{round(x):,}" if axis == "steps" else text.duration(x),
                _value(chart, p.value),
            ]
            for p in curve.median
            if (x := p.at(axis)) is not None
        ]
        found.append({"series": series.index(curve.group), "points": points})
    payload = json.dumps({"axis": axis, "curves": found}, separators=(",", ":"))
    # "<" could close the element; JSON may spell it as an escape.
    safe = Markup(payload.replace("<", "\\u003c"))
    return tag("script", safe, type="application/json", class_="values")


def legend(groups: Sequence[Group]) -> Markup:
    """Buttons that hide and show each optimizer; without the script a plain legend."""
    keys = [
        tag(
            "button",
            svg(
                "",
                tag("path", class_="median", d="M1 6H23"),
                width=24,
                height=12,
                aria_hidden="true",
            ),
            escape(group.label),
            type="button",
            class_="key",
            style=style(group),
            data_toggle=number,
            aria_pressed="true",
        )
        for number, group in enumerate(groups)
    ]
    return tag("div", join(keys), class_="legend", role="group", aria_label="Optimizers")
