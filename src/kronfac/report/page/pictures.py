"""PNGs of the curves and of the time of a step, for documents; needs matplotlib."""

from __future__ import annotations

import colorsys
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from kronfac.report.draw import text
from kronfac.report.draw.curves import Axis, Curve, Point, curve
from kronfac.report.page.page import GENERATOR
from kronfac.report.read import phases
from kronfac.report.read.summary import Chapter, Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The light colours of style.css.
COLOURS = {
    "kfac": "#cc380d",
    "sgd": "#242d45",
    "adamw": "#42a18a",
    "adam": "#42a18a",
    "muon": "#ab72fd",
    "soap": "#cd8a00",
}
PHASE_COLOURS = {
    "data": "#802f26",
    "forward_backward": "#c3c9d2",
    "optimizer": "#6b6f74",
    "other": "#e3e7ec",
    "observe": "#d59f23",
    "reduce": "#164d6b",
    "refresh": "#e1510b",
    "share": "#386dde",
    "precondition": "#63bf8a",
    "spread": "#6f3aa4",
    "rescale": "#e660b7",
}
_DASHES = ("-", "--", ":", "-.")


def available() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(chapters: Sequence[Chapter]) -> dict[str, bytes]:
    """Files and their content; none without matplotlib."""
    if not available():
        return {}
    files = {}
    for chapter, ending in zip(chapters, _endings(chapters), strict=True):
        for name, figure in (("curves", curves(chapter)), ("phases", phase_bars(chapter))):
            if figure is not None:
                files[f"{name}{ending}.png"] = _png(figure)
    return files


def _endings(chapters: Sequence[Chapter]) -> list[str]:
    """What the names of a chapter's files end with, each once."""
    if len(chapters) == 1:
        return [""]
    found: list[str] = []
    for chapter in chapters:
        ending = "-" + re.sub(r"[^A-Za-z0-9_-]+", "-", chapter.title)[:80].strip("-")
        found.append(f"{ending}-{len(found)}" if ending in found else ending)
    return found


def _figure(width: float, height: float) -> Figure:
    # A Figure without pyplot has the Agg canvas and leaves no global state behind.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=140, metadata={"Software": GENERATOR})
    return stream.getvalue()


def curves(chapter: Chapter) -> Figure | None:
    """Test error (or loss) over steps and over seconds, with the target."""
    key, found = _what(chapter)
    if not found:
        return None
    figure = _figure(9, 3.8)
    left, right = figure.subplots(1, 2, sharey=True)
    panels: tuple[tuple[Axes, Axis], ...] = ((left, "steps"), (right, "seconds"))
    for axes, axis in panels:
        for one in found:
            _line(axes, one, axis, error=key == "error")
        for target in chapter.targets if key != "training loss" else []:
            height = 100 * (1 - target) if key == "error" else target
            axes.axhline(height, color="#222222", linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
            if axes is left:
                _say_target(axes, text.metric(chapter.metric, target), height)
        axes.set_xlabel("steps" if axis == "steps" else "seconds of training")
        _tidy(axes)
    left.set_ylabel("test error, %" if key == "error" else key)
    _logarithmic(left, [h for line in left.lines for h in line.get_ydata()])
    right.legend(frameon=False, loc="upper right")
    return figure


def _what(chapter: Chapter) -> tuple[str, list[Curve]]:
    """The first of these that was recorded."""
    kinds: tuple[tuple[str, Literal["steps", "evals"], str], ...] = (
        ("error", "evals", "accuracy"),
        ("test loss", "evals", "loss"),
        ("training loss", "steps", "loss"),
    )
    for key, source, field in kinds:
        if chapter.metric == "loss" and key == "error":
            continue
        found = [curve(group, source, field) for group in chapter.groups]
        if any(found):
            return key, [one for one in found if one]
    return "", []


def _line(axes: Axes, one: Curve, axis: Axis, error: bool) -> None:
    colour, dash = _look(one.group)

    def plot(points: Sequence[Point], **options: Any) -> None:
        places = [(x, p.value) for p in points if (x := p.at(axis)) is not None]
        heights = [max(100 * (1 - v), 1e-3) if error else v for _, v in places]
        axes.plot([x for x, _ in places], heights, color=colour, linestyle=dash, **options)

    if len(one.runs) > 1:
        for points in one.runs:
            plot(points, linewidth=0.8, alpha=0.35, zorder=2)
    plot(one.median, linewidth=2.2, label=one.group.label, zorder=3 + (one.group.kind == "kfac"))


def _look(group: Group) -> tuple[str, str]:
    dashes = _DASHES[group.variant % len(_DASHES)]
    if group.hue is None:
        return COLOURS[group.kind], dashes
    red, green, blue = colorsys.hls_to_rgb(group.hue / 360, 0.3, 0.67)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}", dashes


def _say_target(axes: Axes, goal: str, height: float) -> None:
    axes.annotate(
        f"target {goal}", (0, height), xycoords=("axes fraction", "data"), ha="left", va="bottom",
        xytext=(5, 2), textcoords="offset points", fontsize=9, color="#222222",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1.5}, zorder=5,
    )  # fmt: skip


def _tidy(axes: Axes) -> None:
    axes.grid(color="#e6e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0)
    axes.tick_params(color="#9aa1ad", labelcolor="#333333")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9aa1ad")


def _logarithmic(axes: Axes, heights: Sequence[Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = [float(h) for h in heights]
    if min(values) <= 0 or max(values) < 4 * min(values):
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def phase_bars(chapter: Chapter) -> Figure | None:
    """Time of a mean step by phase, a bar for each optimizer."""
    splits = [(g, seconds) for g in chapter.groups if (seconds := phases.split(g))]
    if not splits:
        return None
    figure = _figure(9, 0.9 + 0.5 * len(splits))
    axes = figure.subplots()
    said: set[str] = set()
    for row, (_, seconds) in enumerate(splits):
        start = 0.0
        for name, amount in seconds.items():
            label = None if name in said else phases.label(name)
            colour = PHASE_COLOURS.get(name, PHASE_COLOURS["other"])
            axes.barh(row, 1e3 * amount, left=start, color=colour, label=label, height=0.62,
                      edgecolor="white", linewidth=0.8)  # fmt: skip
            start += 1e3 * amount
            said.add(name)
    axes.set_yticks(range(len(splits)), [group.label for group, _ in splits])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a mean step")
    _tidy(axes)
    axes.grid(visible=False, axis="y")
    figure.legend(frameon=False, loc="outside right center", fontsize=9)
    return figure
