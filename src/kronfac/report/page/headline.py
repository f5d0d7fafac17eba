"""The result of a comparison in plain sentences, whoever won."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kronfac.report.draw import text
from kronfac.report.read.summary import Chapter, Group, best, final, last_loss

_MEANINGLESS = 1e5  # times as much: a number of some other kind


def headline(chapter: Chapter) -> str:
    """The result: K-FAC, or else the fastest, against SGD or else the best of the others."""
    if not chapter.evaluated:
        return _without_evaluation(chapter)
    hero, rival = contestants(chapter)
    if hero.target is None:
        return _without_target(hero, rival)
    if rival is None or rival.target != hero.target:
        return _alone(hero)
    return _against(hero, rival)


def remarks(chapter: Chapter) -> list[str]:
    """What the headline must not hide: another winner, other tasks, runs that failed or have no end."""
    found = [*_winner(chapter)]
    if chapter.apart:
        found.append(
            "Runs with another model, data set, batch or metric are chapters of their own."
        )
    for status, said in (("failed", "failed"), ("stopped", "stopped early")):
        found += [
            f"{group.count(status)} of {len(group.runs)} {group.label} runs {said}."
            for group in chapter.groups
            if group.count(status)
        ]
    unfinished = sum(group.count("unfinished") for group in chapter.groups)
    if unfinished:
        found.append(
            f"{text.count(unfinished, 'run')} did not say how it ended (killed, or still running)."
            if unfinished == 1
            else f"{unfinished} runs did not say how they ended (killed, or still running)."
        )
    return found


def contestants(chapter: Chapter) -> tuple[Group, Group | None]:
    """Who the headline is about, and against whom."""
    kfac = [group for group in chapter.groups if group.kind == "kfac"]
    hero = min(kfac or chapter.groups, key=_standing)
    others = [group for group in chapter.groups if group.kind != hero.kind]
    sgd = [group for group in others if group.kind == "sgd"]
    return hero, min(sgd or others, key=_standing, default=None)


def _standing(group: Group) -> tuple[float, float, float]:
    """Smaller is better: time to target, then steps, then the final value."""
    value = group.spread(lambda run: final(run, run.metric))
    sign = 1.0 if group.metric == "loss" else -1.0
    last = math.inf if value is None else sign * value.median
    return group.seconds_to_target, group.steps_to_target, last


def _against(hero: Group, rival: Group) -> str:
    goal, medians = text.metric(hero.metric, hero.target), _medians([hero, rival])
    if math.isfinite(hero.steps_to_target) and math.isfinite(rival.steps_to_target):
        return _both_reached(hero, rival, goal)
    if math.isfinite(hero.steps_to_target):
        return (
            f"{hero.label} reached {goal} in {_cost(hero)}; {rival.label} did not reach it in "
            f"{_length(rival)} ({_best(rival)}; {medians})."
        )
    if math.isfinite(rival.steps_to_target):
        return (
            f"{hero.label} did not reach {goal} in {_length(hero)} ({_best(hero)}); {rival.label} "
            f"reached it in {_cost(rival)} ({medians})."
        )
    return (
        f"Neither {hero.label} ({_best(hero)}) nor {rival.label} ({_best(rival)}) reached {goal} "
        f"({medians})."
    )


def _both_reached(hero: Group, rival: Group, goal: str) -> str:
    steps = change(hero.steps_to_target, rival.steps_to_target)
    time = change(hero.seconds_to_target, rival.seconds_to_target)
    parts = []
    for percent, fewer, more, equal in (
        (steps, "fewer steps", "more steps", "as many steps"),
        (time, "less time", "more time", "as much time"),
    ):
        if percent is not None:
            amount = f"{abs(percent)} % {fewer if percent < 0 else more}"
            parts.append((amount, "than") if percent else (equal, "as"))
    known = [percent for percent in (steps, time) if percent is not None]
    if not known:
        return f"{hero.label} reached {goal} in {_cost(hero)}, {rival.label} in {_cost(rival)}."
    link = " but " if min(known) < 0 < max(known) else " and "
    joined = link.join(
        said if (said, word) != parts[-1] and word == parts[-1][1] else f"{said} {word}"
        for said, word in parts
    )
    medians = _medians([hero, rival])
    if min(known) >= 0 and max(known) > 0:
        return f"{hero.label} needed {joined} {rival.label} to reach {goal} ({medians})."
    return f"{hero.label} reached {goal} in {joined} {rival.label} ({medians})."


def change(value: float | None, other: float | None) -> int | None:
    """Whole percent by which a value is above another; ``None`` if that is undefined."""
    if value is None or not other or not math.isfinite(value) or not math.isfinite(other):
        return None
    ratio = value / other
    return round(100 * (ratio - 1)) if 0 <= ratio < _MEANINGLESS else None


def _alone(hero: Group) -> str:
    goal = text.metric(hero.metric, hero.target)
    if math.isfinite(hero.steps_to_target):
        return f"{hero.label} reached {goal} in {_cost(hero)} ({_medians([hero])})."
    return (
        f"{hero.label} did not reach {goal} in {_length(hero)} ({_best(hero)}; {_medians([hero])})."
    )


def _without_target(hero: Group, rival: Group | None) -> str:
    said = " and ".join(f"{g.label} at {_final(g)}" for g in (hero, rival) if g is not None)
    groups = [g for g in (hero, rival) if g is not None]
    return f"No target was set; {said} after {_length(hero)} ({_medians(groups)})."


def _without_evaluation(chapter: Chapter) -> str:
    losses = []
    for group in chapter.groups:
        found = group.spread(last_loss)
        losses += [] if found is None else [f"{group.label} {text.short(found.median)}"]
    if not losses:
        return "No step was recorded, so there is nothing to compare yet."
    return f"No evaluation was recorded; the last training loss: {', '.join(losses)}."


def _winner(chapter: Chapter) -> list[str]:
    hero, rival = contestants(chapter)
    finite = [g for g in chapter.groups if math.isfinite(g.seconds_to_target)]
    if len(chapter.groups) < 3 or not finite:
        return []
    first = min(finite, key=lambda group: group.seconds_to_target)
    if first is hero:
        return [f"{hero.label} was the fastest of all {len(chapter.groups)}."]
    if first is rival:
        return []
    return [f"The fastest was {first.label}: {_cost(first)}."]


def _cost(group: Group) -> str:
    steps, seconds = group.steps_to_target, group.seconds_to_target
    return text.steps(steps) + (f" and {text.duration(seconds)}" if math.isfinite(seconds) else "")


def _length(group: Group) -> str:
    return text.steps(max(run.last_step for run in group.runs))


def _best(group: Group) -> str:
    found = group.spread(best)
    return "no evaluation" if found is None else f"best {text.metric(group.metric, found.median)}"


def _final(group: Group) -> str:
    found = group.spread(lambda run: final(run, run.metric))
    return "an unknown value" if found is None else text.metric(group.metric, found.median)


def _medians(groups: Sequence[Group]) -> str:
    """``"median of 3 seeds"``, how many of each if they differ, and who reached it only sometimes."""
    counts = [len(group.runs) for group in groups]
    seeds = all(len({run.seed for run in group.runs}) == len(group.runs) for group in groups)
    unit = "seeds" if seeds else "runs"
    said = f"medians of {' and '.join(map(str, counts))} {unit}"
    if len(set(counts)) == 1:
        each = " each" if len(groups) > 1 else ""
        said = f"median of {counts[0]} {unit}" if counts[0] > 1 else f"one run{each}"
    for group in groups:
        if 0 < group.num_reached < len(group.runs):
            said += f"; {group.label} reached it in {group.num_reached} of {len(group.runs)}"
    return said
