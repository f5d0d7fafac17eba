"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from kronfac.report.draw import text
from kronfac.report.draw.svg import Markup, escape, join, tag
from kronfac.report.page import costs, notices, sections
from kronfac.report.page.headline import headline, remarks
from kronfac.report.page.hyperparameters import hyperparameters
from kronfac.report.read.read import Run
from kronfac.report.read.summary import Chapter

GENERATOR = "kronfac report"


def render(
    chapters: Sequence[Chapter],
    empty: Sequence[Path] = (),
    title: str | None = None,
    remark: str = "",
) -> str:
    """All of the page; ``remark`` is a sentence for its end."""
    runs = [run for chapter in chapters for run in chapter.runs]
    named = title or ", ".join(dict.fromkeys(chapter.recipe for chapter in chapters))
    several = len(chapters) > 1
    bodies = [
        _chapter(chapter, number, several, empty if number == 0 else ())
        for number, chapter in enumerate(chapters)
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=GENERATOR),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", escape(f"{named} – kronfac report")),
        tag("style", _asset("style.css")),
    )
    body = tag(
        "body",
        _top(named, runs),
        tag("main", *bodies),
        tag("footer", *map(sections.paragraph, filter(None, (_footer(runs), remark)))),
        tag("script", _asset("script.js")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _asset(name: str) -> Markup:
    return Markup(resources.files("kronfac.report").joinpath(name).read_text(encoding="utf-8"))


def _top(named: str, runs: Sequence[Run]) -> Markup:
    optimizers = len({run.optimizer for run in runs})
    counts = [text.count(len(runs), "run"), text.count(optimizers, "optimizer")]
    times = [run.last_time for run in runs if run.last_time]
    counts += [f"{datetime.fromtimestamp(max(times), UTC):%Y-%m-%d}"] if times else []
    toggle = tag(
        "button",
        escape("◐"),
        type="button",
        id="theme",
        aria_label="Light or dark",
        title="Light or dark",
        hidden=True,
    )
    return tag(
        "header",
        tag("p", escape(" · ".join(["kronfac", *counts])), class_="over"),
        tag("h1", escape(named)),
        toggle,
    )


def _footer(runs: Sequence[Run]) -> str:
    machines: dict[str, None] = {}
    for run in runs:
        known = run.environment
        parts = [
            f"{key} {known[key]}" for key in ("torch", "python", "cpu", "cores") if known.get(key)
        ]
        if parts:
            machines[", ".join(parts)] = None
    return " · ".join(["Written by kronfac report.", *list(machines)[:3]])


def _chapter(chapter: Chapter, number: int, several: bool, empty: Sequence[Path]) -> Markup:
    found = [
        sections.progress(chapter),
        sections.targets(chapter),
        costs.time(chapter),
        costs.layer_costs(chapter),
        costs.placement(chapter),
        costs.memory_use(chapter),
        hyperparameters(chapter),
        notices.trouble(chapter, empty),
        notices.origins(chapter),
    ]
    parts = [_lead(chapter, several)]
    for index, section in enumerate(s for s in found if s is not None):
        heading, content = section
        name = f"part-{number}-{index}"
        title = tag("h3" if several else "h2", escape(heading), id=name)
        parts.append(tag("section", title, content, aria_labelledby=name))
    return tag("article", join(parts))


def _lead(chapter: Chapter, several: bool) -> Markup:
    parts = [tag("h2", escape(chapter.title))] if several else []
    parts.append(sections.paragraph(headline(chapter), "lead"))
    said = remarks(chapter)
    if said:
        parts.append(sections.paragraph(" ".join(said), "remarks"))
    parts.append(sections.tiles(chapter))
    return tag("div", *parts, class_="hero")
