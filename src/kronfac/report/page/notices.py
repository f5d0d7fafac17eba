"""What went wrong, and with which settings and where the runs were made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kronfac.report.draw import text
from kronfac.report.draw.svg import Markup, escape, join, tag
from kronfac.report.page import tables
from kronfac.report.page.sections import Section, paragraph
from kronfac.report.read.read import Run, flatten
from kronfac.report.read.summary import Chapter, settings


def trouble(chapter: Chapter, empty: Sequence[Path] = ()) -> Section:
    """Failures first, then warnings, each message once for a run."""
    entries: list[tuple[str, str, str]] = []  # kind, run, sentence
    for run in chapter.runs:
        entries += _of_run(run)
    entries += [("failure", path.name, "prepared, but it has no events") for path in empty]
    if not entries:
        return "Failures and warnings", paragraph("None.")
    entries.sort(key=lambda entry: ("failure", "warning", "note").index(entry[0]))
    items = [
        tag(
            "li",
            tag("span", escape(kind), class_=f"badge {kind}"),
            escape(" "),
            tag("b", escape(run)),
            escape(f": {said}"),
        )
        for kind, run, said in entries
    ]
    return "Failures and warnings", tag("ul", *items, class_="notices")


def _of_run(run: Run) -> list[tuple[str, str, str]]:
    times: dict[tuple[str, str], list[int | None]] = {}
    for notice in run.notices:
        times.setdefault((notice.event, notice.message), []).append(notice.step)
    found = []
    for (event, message), steps in times.items():
        where = f"step {steps[0]}: " if steps[0] is not None else ""
        again = f" ({len(steps)} times)" if len(steps) > 1 else ""
        found.append((event, run.name, f"{where}{message}{again}"))
    if run.status == "failed" and not any(event == "failure" for event, _, _ in found):
        found.append(("failure", run.name, f"failed at step {run.last_step} and did not say why"))
    if run.status == "unfinished":
        said = f"no end was recorded after step {run.last_step}; killed, or still running"
        found.append(("warning", run.name, said))
    if run.status == "stopped":
        found.append(("note", run.name, f"stopped at step {run.last_step}"))
    found += [("note", run.name, f"resumed from step {step}") for step in run.resumed]
    if run.broken_lines:
        lines = text.count(run.broken_lines, "line")
        found.append(("note", run.name, f"{lines} of events could not be read and was left out"))
    return found + [("warning", run.name, said) for said in _counted(run)]


def _counted(run: Run) -> list[str]:
    """Sentences for what K-FAC counted: dropped statistics, failed solutions."""
    stats = (run.finish or {}).get("stats")
    if not isinstance(stats, dict):
        return []
    said = []
    for key, what in (
        ("dropped", "statistics that were not finite were dropped"),
        ("failures", "solutions could not be found"),
    ):
        by_layer = stats.get(key)
        if isinstance(by_layer, dict):
            said += [f"{layer}: {n} {what}" for layer, n in by_layer.items() if n]
    without = stats.get("without_solution")
    if isinstance(without, list) and without:
        said.append(f"no solution, so the raw gradient was used: {', '.join(map(str, without))}")
    return said


def origins(chapter: Chapter) -> Section:
    """Settings that differ between optimizers, then everything about each run."""
    parts = [*_differences(chapter)]
    parts += [_run_details(run) for run in chapter.runs]
    return "Settings and environment", join(parts)


def _differences(chapter: Chapter) -> list[Markup]:
    columns = [_aligned(group.runs[0]) for group in chapter.groups]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = []
    for key in keys:
        values = [_shown(column.get(key)) for column in columns]
        if len(set(values)) > 1:
            rows.append([escape(key), *map(escape, values)])
    if len(columns) < 2 or not rows:
        return []
    head = ["setting", *(group.label for group in chapter.groups)]
    label = "Settings that differ"
    return [
        paragraph("What differs between the optimizers:"),
        tables.table(head, rows, label, "wide"),
    ]


def _aligned(run: Run) -> dict[str, Any]:
    """Settings, the optimizer's own without prefix; its name is in the head of the table."""
    found = {key.removeprefix("optimizer."): value for key, value in settings(run).items()}
    return {key: found[key] for key in found if key not in ("optimizer", "name", "kind")}


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _run_details(run: Run) -> Markup:
    facts = [run.status, text.steps(run.last_step)]
    facts += [text.duration(run.seconds)] if run.seconds is not None else []
    heading = tag(
        "summary", tag("b", escape(run.name)), escape(text.glue(" – " + ", ".join(facts)))
    )
    parts = [heading]
    for title, values in (("Settings", run.config), ("Environment", run.environment)):
        flat = {key: _shown(value) for key, value in flatten(values).items()}
        if flat:
            parts += [tag("h4", escape(title)), tables.pairs(flat, f"{title} of {run.name}")]
    if len(parts) == 1:
        parts.append(paragraph("Neither settings nor environment were recorded."))
    if run.summary:
        shown = tag("pre", escape(run.summary))
        parts += [tag("h4", escape("Optimizer")), tables.box(shown, f"Optimizer of {run.name}")]
    return tag("details", *parts)
