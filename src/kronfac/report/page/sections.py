"""The first parts of the page: the result in numbers, the curves, the way to the target."""

from __future__ import annotations

from collections.abc import Sequence

from kronfac.report.draw import text
from kronfac.report.draw.charts import Chart, draw, legend
from kronfac.report.draw.curves import Curve, curve
from kronfac.report.draw.scale import Scale, accuracy, linear, log
from kronfac.report.draw.svg import Markup, escape, join, tag
from kronfac.report.page import tables
from kronfac.report.page.headline import change, contestants
from kronfac.report.read.summary import Chapter, Group, final, memory, step_seconds

Section = tuple[str, Markup]  # heading and content


def paragraph(sentence: str, class_: str | None = None) -> Markup:
    """A paragraph of text."""
    return tag("p", escape(text.glue(sentence)), class_=class_)


def tiles(chapter: Chapter) -> Markup:
    """The headline's numbers, large; better and worse differ in sign and word, not in colour alone."""
    hero, rival = contestants(chapter)
    if rival is None:
        return Markup("")
    found: list[tuple[str, str, float]] = []
    same = hero.target is not None and hero.target == rival.target
    if same and (steps := change(hero.steps_to_target, rival.steps_to_target)) is not None:
        found.append((_signed(steps), f"steps to {text.metric(hero.metric, hero.target)}", steps))
    if same and (time := change(hero.seconds_to_target, rival.seconds_to_target)) is not None:
        found.append((_signed(time), f"time to {text.metric(hero.metric, hero.target)}", time))
    found += _final_tile(hero, rival)
    for what, value in (("time of a step", step_seconds), ("peak memory", memory)):
        first, second = hero.spread(value), rival.spread(value)
        if first and second and (more := change(first.median, second.median)) is not None:
            found.append((_signed(more), what, more))
    cards = [
        tag(
            "li",
            tag("b", escape(value)),
            tag("span", escape(what)),
            class_="good" if worse < 0 else "bad" if worse > 0 else None,
        )
        for value, what, worse in found
    ]
    compared = f"{hero.label} compared with {rival.label}"
    caption = paragraph(f"{compared}:", "note")
    return (
        Markup(caption + tag("ul", *cards, class_="tiles", aria_label=compared))
        if cards
        else Markup("")
    )


def _final_tile(hero: Group, rival: Group) -> list[tuple[str, str, float]]:
    first, second = (group.spread(lambda run: final(run, run.metric)) for group in (hero, rival))
    if first is None or second is None:
        return []
    difference = first.median - second.median
    if hero.metric == "loss":
        return [
            (f"{_sign(difference)}{text.short(abs(difference))}", "final test loss", difference)
        ]
    points = round(100 * difference, 2)
    return [(f"{_sign(points)}{abs(points):g} pp", "final test accuracy", -points)]


def _signed(percent: int) -> str:
    return f"{_sign(percent)}{abs(percent)} %"


def _sign(value: float) -> str:
    return "−" if value < 0 else "+" if value > 0 else "±"


def progress(chapter: Chapter) -> Section:
    """Accuracy and loss over steps and over seconds."""
    groups = chapter.groups
    charts = []
    accuracies = _present([curve(g, "evals", "accuracy") for g in groups])
    if accuracies:
        values = _values(accuracies)
        targets = chapter.targets if chapter.metric == "accuracy" else []
        scale = accuracy([*values, *targets])
        charts.append(Chart("Test accuracy", accuracies, scale, "percent", targets, dots=True))
    losses = _present([curve(g, "evals", "loss") for g in groups])
    if losses:
        targets = chapter.targets if chapter.metric == "loss" else []
        scale = _loss_scale([*_values(losses), *targets])
        charts.append(Chart("Test loss", losses, scale, "", targets, dots=True))
    training = _present([curve(g, "steps", "loss") for g in groups])
    if training:
        charts.append(Chart("Training loss", training, _loss_scale(_values(training))))
    if chapter.metric == "loss":  # what it is about comes first
        charts.sort(key=lambda chart: chart.title == "Test accuracy")
    if not charts:
        return "Progress", paragraph("No step and no evaluation was recorded.")
    pairs = [
        tag("div", draw(chart, "steps", groups), draw(chart, "seconds", groups), class_="pair")
        for chart in charts
    ]
    thin = any(len(g.runs) > 1 for g in groups)
    said = "Bold lines are medians over the runs, thin lines are single runs. " if thin else ""
    said += "Seconds are those of training: evaluation is not counted."
    if any(chart.scale.kind == "accuracy" for chart in charts):
        said += " Equal distances between accuracies are equal factors of the error."
    return "Progress", join([toolbar(groups), *pairs, paragraph(said, "note")])


def toolbar(groups: Sequence[Group]) -> Markup:
    """Legend and choice of the axis."""
    buttons = [
        tag("button", escape(name), type="button", data_axes=axes, aria_pressed="false")
        for name, axes in (("Steps", "steps"), ("Seconds", "seconds"), ("Both", "both"))
    ]
    choice = tag("div", *buttons, class_="switch", role="group", aria_label="Horizontal axis")
    return tag("div", legend(groups), choice, class_="toolbar")


def _present(curves: Sequence[Curve]) -> list[Curve]:
    return [c for c in curves if c]


def _values(curves: Sequence[Curve]) -> list[float]:
    return [value for c in curves for value in c.values]


def _loss_scale(values: Sequence[float]) -> Scale:
    positive = [v for v in values if v > 0]
    wide = len(positive) == len(values) and max(values) > 8 * min(values)
    return log(values) if wide else linear(values)


def targets(chapter: Chapter) -> Section:
    """Table of the way to the target, and of the end."""
    parts = []
    if chapter.targets and chapter.evaluated:
        goals = " or ".join(text.metric(chapter.metric, t) for t in chapter.targets)
        said = (
            f"The first evaluation at {goals} or better, as the median over runs and the least … the "
            "most of them. A run that missed it counts as slower than all others."
        )
        parts += [paragraph(said), tables.to_target(chapter)]
    else:
        why = "no target was set" if chapter.evaluated else "no evaluation was recorded"
        parts.append(paragraph(f"There is no way to a target to show: {why}."))
    parts += [tag("h3", escape("Final values")), tables.finals(chapter)]
    return "Steps and time to the target", join(parts)
