"""Hyperparameters over steps: damping, KL clip, momentum, learning rate, batch."""

from __future__ import annotations

from collections.abc import Sequence

from kronfac.report.draw import text
from kronfac.report.draw.charts import Chart, draw
from kronfac.report.draw.curves import Curve, curve, logged
from kronfac.report.draw.scale import linear, log
from kronfac.report.draw.svg import Markup, escape, join, tag
from kronfac.report.page.sections import Section, paragraph
from kronfac.report.read.read import Run
from kronfac.report.read.summary import Chapter, Group

_HEADING = "Damping, KL clip and learning rate"
_SHOWN = {
    "damping": "Damping",
    "kl_clip": "Steps shortened by the KL clip",
    "momentum": "Momentum",
    "lr": "Learning rate",
    "batch": "Batch",
}


def hyperparameters(chapter: Chapter) -> Section:
    """A chart for each hyperparameter that changes, a sentence for each that does not."""
    facts, charts = [], []
    for key, title in _SHOWN.items():
        moving = []
        for group in chapter.groups:
            values = _values(group, key)
            if values and min(values) < max(values):
                moving.append(curve(group, "steps", key))
            elif values and key != "batch":  # one batch is among the settings
                shown = text.percent(values[0]) if key == "kl_clip" else text.short(values[0])
                facts.append(f"{title} of {group.label}: {shown} throughout.")
        if moving:
            charts.append(draw(_chart(key, title, moving), "steps", chapter.groups))
    kfac = [run for run in chapter.runs if run.kind == "kfac"]
    if kfac and not any(clips(run) for run in kfac):
        facts.append("No KL clip was in use.")
    if not facts and not charts:
        return _HEADING, paragraph("None of them was recorded.")
    grid = tag("div", *charts, class_="pair fixed") if charts else Markup("")
    listed = tag("ul", *(tag("li", escape(fact)) for fact in facts)) if facts else Markup("")
    return _HEADING, join([grid, listed])


def _values(group: Group, key: str) -> list[float]:
    runs = [run for run in group.runs if key != "kl_clip" or clips(run)]
    return [value for run in runs for value in logged(run, key)]


def clips(run: Run) -> bool:
    """Whether a KL clip was in use: its share is logged, and its counter, if any, has counted."""
    stats = (run.finish or {}).get("stats")
    counted = stats.get("kl_clip_steps") if isinstance(stats, dict) else None
    shares = logged(run, "kl_clip")
    return any(shares) or (bool(shares) and counted != 0)


def _chart(key: str, title: str, curves: Sequence[Curve]) -> Chart:
    values = [value for one in curves for value in one.values]
    if key == "kl_clip":
        return Chart(title, curves, linear([0.0, 1.0], percent=True), "percent")
    positive = min(values) > 0 and max(values) > 8 * min(values)
    if key in ("damping", "batch") and positive:
        return Chart(title, curves, log(values))
    return Chart(title, curves, linear(values, zero=True))
