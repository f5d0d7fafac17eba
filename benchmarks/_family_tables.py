"""The family's tables, as the Markdown of docs/methods.md, and its picture."""

import math
import statistics
from pathlib import Path
from typing import Any

from _family import LONGEST, OTHERS, SKIPPED, STEPS, TARGETS, Row, everyone, find, title
from _family_cost import counts, intervals
from _family_lines import line_cells

#: In the docs, which show it.
PICTURE = Path(__file__).parents[1] / "docs" / "family.png"
PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
LABELS = {"digits": "digits", "cifar10": "CIFAR-10", "text": "text"}
QUALITY = {task: f"{LABELS[task]}, {STEPS[task]} steps" for task in STEPS}
COSTS = {"resnet20": "ResNet-20, batch 128", "transformer": "transformer, 32 × 64 tokens"}
NEVER = "never"


def tables(rows: list[Row]) -> list[str]:
    """Everything that the page quotes."""
    found = [quality_table(task, rows) for task in STEPS]
    found += [cost_table(model, rows) for model in COSTS]
    headers = ["chosen among", "", "rate", "a third of it", "this rate", "three times it"]
    return [*found, promise_table(rows), markdown(headers, line_cells(rows))]


def fill(page: str, rows: list[Row]) -> str:
    """The page with today's tables in the place of those that begin with the same cell."""
    lines = page.splitlines()
    for one in tables(rows):
        first = one.split("|")[1]
        start = next(n for n, line in enumerate(lines) if line.startswith(f"|{first}|"))
        end = next((n for n in range(start, len(lines)) if lines[n][:1] != "|"), len(lines))
        lines[start:end] = one.splitlines()
    return "\n".join(lines) + "\n"


def markdown(headers: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    rule = ["---"] * len(headers)
    return "\n".join("| " + " | ".join(one) + " |" for one in (headers, rule, *lines))


# --- quality -------------------------------------------------------------------------------------


def quality_table(task: str, rows: list[Row]) -> str:
    """Rate, final quality, and steps and seconds to the target; seconds are steps times their cost."""
    target = TARGETS[task]
    reach = f"{target:.0%}".replace("%", " %") if task != "text" else f"a loss of {target}"
    what = "loss" if task == "text" else "accuracy"
    headers = [QUALITY[task], "rate", what, f"steps to {reach}", "seconds to it", "seconds in all"]
    return markdown(headers, [quality_cells(task, name, rows) for name in everyone()])


def quality_cells(task: str, name: str, rows: list[Row]) -> list[str]:
    """One optimizer's line."""
    if (task, name) in SKIPPED:
        return [title(name), "", SKIPPED[task, name], "", "", ""]
    found = find(rows, stage="train", task=task, optimizer=name)
    if not found:
        probes = find(rows, stage="probe", task=task, optimizer=name)
        slow = any(row["cpu_ms"] * STEPS[task] > 1e3 * LONGEST for row in probes)
        return [title(name), "", "too slow" if slow else "not run", "", "", ""]
    whole = seconds(task, name, STEPS[task], rows)
    step = hit(found)
    to_target = None if step is None else seconds(task, name, step, rows)
    return [
        title(name),
        f"{found[0]['rate']:g}",
        quality_text(task, final(task, found)),
        NEVER if step is None else str(step),
        NEVER if step is None else _seconds(to_target),
        _seconds(whole),
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def final(task: str, found: list[Row]) -> float | None:
    """The median of seeds, those that failed being worst."""
    worst = math.inf if task == "text" else 0.0
    value = statistics.median(worst if row["final"] is None else row["final"] for row in found)
    return None if value == worst else value


def quality_text(task: str, value: float | None) -> str:
    """How a quality is shown."""
    if value is None:
        return "failed"
    return f"{value:.2f}" if task == "text" else f"{100 * value:.1f} %"


def hit(found: list[Row]) -> int | None:
    """Steps to the target: the median of seeds."""
    steps = statistics.median(row.get("steps") or math.inf for row in found)
    return math.ceil(steps) if math.isfinite(steps) else None


def seconds(task: str, name: str, steps: int, rows: list[Row]) -> float | None:
    """What the first steps cost: how many there are of each kind, times that of an idle machine."""
    costs = find(rows, stage="cost", task=task)
    if not costs:
        return None
    sgd = statistics.median(row["sgd_ms"] for row in costs) / 1e3
    if name == "sgd":
        return sgd * steps
    own = [row for row in costs if row["optimizer"] == name]
    if not own:
        return None
    over = own[0]["over"]
    return sgd * sum(number * (1 + over[kind]) for kind, number in counts(name, steps).items())


# --- cost ----------------------------------------------------------------------------------------


def cost_table(model: str, rows: list[Row]) -> str:
    """Overhead of a mean step at a method's own intervals, state, and bytes on the wire."""
    headers = [COSTS[model], "statistics / refresh", "over SGD", "state", "sent a step"]
    lines = []
    for name in everyone():
        for row in find(rows, stage="cost", task=model, optimizer=name)[:1]:
            every = "" if name in OTHERS else " / ".join(map(str, intervals(name)))
            sent = f"{row['sent'] / 1e3:.1f} kB" if "sent" in row else ""
            state = f"{row['state'] / 1e6:.2f} MB"
            lines.append([title(name), every, _percent(row["overhead"]), state, sent])
    return markdown(headers, lines)


def _percent(value: float) -> str:
    return f"{100 * value:+.0f} %".replace("-", "\N{MINUS SIGN}")


def promise_table(rows: list[Row]) -> str:
    """What is promised of costs, beside what was measured."""
    lines = []
    for what, check in PROMISES.items():
        cells = []
        for model in COSTS:
            by_name = {r["optimizer"]: r for r in find(rows, stage="cost", task=model)}
            try:
                cells.append(check(by_name))
            except KeyError:  # one of them was not measured
                cells.append("")
        lines.append([what, *cells])
    return markdown(["promised", "ResNet-20", "transformer"], lines)


def _over(name: str) -> Any:
    return lambda found: _percent(found[name]["overhead"])


def _beside(name: str, other: str) -> Any:
    def check(found: dict[str, Row]) -> str:
        return _percent((1 + found[name]["overhead"]) / (1 + found[other]["overhead"]) - 1)

    return check


def _wire(name: str) -> Any:
    def check(found: dict[str, Row]) -> str:
        row = found[name]
        return f"{row['sent'] / 1e3:.1f} kB for {row['expected'] / 1e3:.1f} kB"

    return check


#: By what a line says: its cell, from the rows of one model.
PROMISES: dict[str, Any] = {
    "Eva: at most +15 % over SGD": _over("eva"),
    "MKOR: at most +15 % over SGD": _over("mkor"),
    "AdaFisher: at most +15 % over SGD": _over("adafisher"),
    "EKFAC, gradient: at most +25 % over K-FAC": _beside("ekfac-gradient", "kfac"),
    "SINGD, diagonal: at most +20 % over AdamW": _beside("singd-diagonal", "adamw"),
    "SINGD, diagonal: state at most 1.05 of AdamW's": lambda found: (
        f"{found['singd-diagonal']['state'] / found['adamw']['state']:.2f}"
    ),
    "SINGD: no decomposition": lambda found: str(found["singd"]["decompositions"]),
    "Jorge: no decomposition": lambda found: str(found["jorge"]["decompositions"]),
    "Eva: sends vectors only": _wire("eva"),
    "MKOR: sends vectors only": _wire("mkor"),
    "AdaFisher: sends vectors only": _wire("adafisher"),
    "CG-FAC: keeps rows, N(d_in + d_out) numbers a layer": lambda found: (
        f"{found['cgfac']['kept'] / 1e6:.2f} MB for {found['cgfac']['rows'] / 1e6:.2f} MB"
    ),
}


# --- picture -------------------------------------------------------------------------------------

Point = tuple[float, float, str]
#: Where the name of a point may be, in points from it, with its alignment.
PLACES = (
    *((4, 3, "left"), (4, -9, "left"), (-4, 3, "right"), (-4, -9, "right")),
    *((0, 8, "center"), (0, -14, "center"), (6, -3, "left"), (-6, -3, "right")),
    *((4, 12, "left"), (4, -18, "left"), (-4, 12, "right"), (-4, -18, "right")),
)


def draw(rows: list[Row], path: Path = PICTURE) -> None:
    """Quality against seconds of training on each task, and state against the time of a step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13, 10), layout="constrained")
    for axis, task in zip(axes.flat, STEPS, strict=False):
        what = "test loss" if task == "text" else "test error, %"
        labels = {"xlabel": f"seconds of {STEPS[task]} steps", "ylabel": what}
        scatter(axis, quality_points(task, rows), title=LABELS[task], **labels)
    found = find(rows, stage="cost", task="transformer")
    points = [(1 + r["overhead"], r["state"] / 1e6, title(r["optimizer"])) for r in found]
    labels = {"xlabel": "time of a step, SGD = 1", "ylabel": "MB of state"}
    scatter(axes.flat[3], points, title="memory on the transformer", **labels)
    figure.savefig(path, dpi=110)


def quality_points(task: str, rows: list[Row]) -> list[Point]:
    """Seconds of training, loss or percent of errors, and name."""
    points = []
    for name in everyone():
        found = find(rows, stage="train", task=task, optimizer=name)
        value = final(task, found) if found else None
        whole = seconds(task, name, STEPS[task], rows)
        if value is not None and whole is not None:
            points.append((whole, value if task == "text" else 100 - 100 * value, title(name)))
    return points


def scatter(axis: Any, points: list[Point], **labels: str) -> None:
    """Points with names; those on the front, which no other beats in both, are filled and joined."""
    axis.set(**labels)
    if not points:
        axis.set_visible(False)
        return
    best = front(points)
    for x, y, name in points:
        color = "#cc380d" if name == "K-FAC" else "#194e80"
        filled = color if (x, y, name) in best else "white"
        axis.scatter(x, y, s=22, color=filled, edgecolor=color, zorder=2)
    axis.plot(*zip(*((x, y) for x, y, _ in best), strict=True), color="#999", lw=0.8, zorder=1)
    axis.set(xscale="log", yscale="log")
    axis.margins(0.12)
    axis.grid(alpha=0.25)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter("{x:g}")
        side.set_minor_formatter("{x:g}")
        side.set_tick_params(which="both", labelsize=7)
    name_points(axis, points)


def name_points(axis: Any, points: list[Point]) -> None:
    """Write each name where it covers neither points nor other names, if there is such a place."""
    axis.figure.canvas.draw()
    taken = []
    for x, y, _ in points:
        left, low = axis.transData.transform((x, y)) - 3
        taken.append((left, low, left + 6, low + 6))
    for x, y, name in sorted(points):
        for number, (dx, dy, side) in enumerate(PLACES):
            text = axis.annotate(
                name, (x, y), (dx, dy), textcoords="offset points", fontsize=7, ha=side
            )
            box = text.get_window_extent().extents
            if number + 1 == len(PLACES) or not any(_overlap(box, one) for one in taken):
                taken.append(tuple(box))
                break
            text.remove()


def _overlap(one: Any, other: Any) -> bool:
    across = one[0] < other[2] and other[0] < one[2]
    return bool(across and one[1] < other[3] and other[1] < one[3])


def front(points: list[Point]) -> list[Point]:
    """Points below which there is none to the left."""
    found: list[Point] = []
    for point in sorted(points):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found
