"""What a step costs: time by phase and layer, work by rank, memory."""

from __future__ import annotations

from kronfac.report.draw import bars, text
from kronfac.report.draw.svg import Markup, escape, join, tag
from kronfac.report.page import tables
from kronfac.report.page.sections import Section, paragraph
from kronfac.report.read import layers, phases
from kronfac.report.read.read import number
from kronfac.report.read.summary import Chapter, Group, memory


def time(chapter: Chapter) -> Section:
    """Where the time of a step goes."""
    heading = "Where the time of a step goes"
    splits = [(g, seconds) for g in chapter.groups if (seconds := phases.split(g))]
    if not splits:
        return heading, paragraph("No phase was timed.")
    used = {name for _, seconds in splits for name in seconds}
    names = [n for n in phases.PHASES if n in used] + sorted(used - set(phases.PHASES))
    details = tag(
        "details",
        tag("summary", escape("As a table")),
        tables.phase_table(splits, names),
    )
    said = "The mean step of a whole run, so that work done now and then counts with its share."
    return heading, join(
        [paragraph(said), bars.phase_legend(names), bars.phase_bars(splits), details]
    )


def layer_costs(chapter: Chapter) -> Section | None:
    """What each layer costs K-FAC."""
    parts: list[Markup] = []
    for group in chapter.groups:
        found = layers.layers(group)
        if found:
            parts += _layers_of(group, found, many=len(_with_layers(chapter)) > 1)
    return ("Layers", join(parts)) if parts else None


def _with_layers(chapter: Chapter) -> list[Group]:
    return [group for group in chapter.groups if layers.layers(group)]


def _layers_of(group: Group, found: list[layers.LayerCost], many: bool) -> list[Markup]:
    parts = [tag("h3", escape(group.label))] if many else []
    weights = sum(layer.parameters or 0 for layer in found)
    whole = number(group.runs[0].start.get("parameters"))
    said = f"{text.count(len(found), 'layer')} with {weights:,} parameters"
    said += f" of {whole:,.0f}" if whole is not None and whole >= weights else ""
    said += f" {'is' if len(found) == 1 else 'are'} preconditioned"
    held = sum(layer.bytes or 0 for layer in found)
    said += f", with {text.size(held)} of statistics and solutions." if held else "."
    parts.append(paragraph(said))
    if any(layer.total for layer in found):
        names = [p for p in phases.PHASES if any(layer.seconds.get(p) for layer in found)]
        more = "Seconds of a whole run" + (" on rank 0" if group.world > 1 else "")
        if len(found) > bars.MOST_LAYERS:
            more += f", of the {bars.MOST_LAYERS} most expensive layers"
        parts += [paragraph(f"{more}:", "note"), bars.phase_legend(names), bars.layer_bars(found)]
    timed = any(layer.total for layer in found)
    summary = tag("summary", escape("All layers"))
    listed = tables.layer_table(found, group.world)
    parts.append(tag("details", summary, listed, open=not timed))
    left = layers.skipped(group)
    if left:
        rows = [[escape(name), escape(why)] for name, why in left]
        listed = tables.table(["parameter", "why"], rows, "Not preconditioned")
        said = f"{text.count(len(left), 'parameter')} not preconditioned"
        parts.append(tag("details", tag("summary", escape(said)), listed))
    return parts


def placement(chapter: Chapter) -> Section | None:
    """Which rank works on which layer."""
    parts: list[Markup] = []
    for group in _with_layers(chapter):
        found, scheme = layers.layers(group), layers.scheme(group)
        if group.world == 1:
            parts.append(
                paragraph(f"{group.label}: one rank, which solves all {len(found)} layers.")
            )
            continue
        said = f"{group.label} on {group.world} ranks"
        said += f", scheme “{scheme}”." if scheme else "."
        said += _shared_out(found, group.world)
        grid = bars.placement_map(found, group.world)
        parts += [paragraph(said), tables.box(grid, f"Layers of {group.label} on ranks")]
    return ("Placement", join(parts)) if parts else None


def _shared_out(found: list[layers.LayerCost], world: int) -> str:
    if all(layer.ranks == "all" for layer in found):
        said = " Every rank solves every layer."
    else:
        totals = layers.balance(found, world)
        worst = max(totals) / (sum(totals) / world or 1.0)
        said = f" The busiest rank has {worst:.2f} times the mean load."
    said += " A stronger colour is more work."
    return said + (f" The first {bars.MOST_RANKS} ranks:" if world > bars.MOST_RANKS else "")


def memory_use(chapter: Chapter) -> Section:
    """Peak memory of each optimizer."""
    rows = []
    for group in chapter.groups:
        found = group.spread(memory)
        if found:
            held = sum(layer.bytes or 0 for layer in layers.layers(group))
            said = text.size(found.median) + (f" (K-FAC state {text.size(held)})" if held else "")
            rows.append((group, found.median, said))
    if not rows:
        return "Memory", paragraph("No memory was recorded.")
    said = (
        "Peak of the process on rank 0 during a run, median over runs: model, data and PyTorch itself "
        "included."
    )
    return "Memory", join([paragraph(said), bars.plain_bars(rows, "Peak memory")])
