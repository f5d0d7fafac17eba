"""What steers a step: damping, KL clip, momentum, learning rate."""

from __future__ import annotations

from collections.abc import Sequence

from kronfac.report import text
from kronfac.report.charts import Chart, draw
from kronfac.report.curves import Curve, curve, logged
from kronfac.report.scale import linear, log
from kronfac.report.sections import Section, paragraph
from kronfac.report.summary import Chapter
from kronfac.report.svg import Markup, escape, join, tag


def steering(chapter: Chapter) -> Section:
    """Learning rate, and for K-FAC damping, KL clip and momentum, over steps."""
    groups = chapter.groups
    facts, drawn = [], []
    for key, title in (
        ("damping", "Damping"),
        ("kl_clip", "Steps shortened by the KL clip"),
        ("momentum", "Momentum"),
        ("lr", "Learning rate"),
    ):
        curves = []
        for group in groups:
            values = [value for run in group.runs for value in logged(run, key)]
            if not values:
                continue
            if min(values) == max(values):
                shown = text.percent(values[0]) if key == "kl_clip" else text.short(values[0])
                facts.append(f"{title} of {group.label}: {shown} throughout.")
            else:
                curves.append(curve(group, "steps", key))
        if curves:
            drawn.append(draw(_steering_chart(key, title, curves), "steps", groups))
    ours = [run for run in chapter.runs if run.kind == "kfac"]
    if ours and not any(logged(run, "kl_clip") for run in ours):
        facts.append("No KL clip was in use.")
    listed = tag("ul", *(tag("li", escape(fact)) for fact in facts)) if facts else Markup("")
    grid = tag("div", *drawn, class_="pair fixed") if drawn else Markup("")
    if not facts and not drawn:
        return "Damping, KL clip and learning rate", paragraph("None of them was recorded.")
    return "Damping, KL clip and learning rate", join([grid, listed])


def _steering_chart(key: str, title: str, curves: Sequence[Curve]) -> Chart:
    values = [value for one in curves for value in one.values]
    if key == "kl_clip":
        return Chart(title, curves, linear([0.0, 1.0], percent=True), "percent")
    positive = min(values) > 0 and max(values) > 8 * min(values)
    if key == "damping" and positive:
        return Chart(title, curves, log(values))
    return Chart(title, curves, linear(values, zero=True))
