"""Runs by optimizer, and the numbers of a group: targets reached, medians, spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kronfac.report.read.read import Record, Run, flatten, number

NAMES = {
    "kfac": "K-FAC",
    "sgd": "SGD",
    "adamw": "AdamW",
    "adam": "Adam",
    "muon": "Muon",
    "soap": "SOAP",
}
_ORDER = ("kfac", "sgd", "adamw", "adam", "muon", "soap")
# Keys that do not change what is trained, or that are meant to differ within a group.
_ASIDE = {
    "seed", "seeds", "out", "command", "changes", "data_dir", "resume", "log_every", "loggers",
    "description", "source", "file", "comparison", "optimizers", "workers",
}  # fmt: skip

# What a task is called by.
_TASK = ("metric", "model", "data", "batch")


@dataclass(frozen=True)
class Spread:
    """Median, least and most of a number over the runs of a group.

    ``inf`` stands for a run that did not get there, so that a miss moves the median up instead of
    being left out.
    """

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Spread of what is known, ``None`` if nothing is."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(median(known), min(known), max(known), tuple(known))


@dataclass(frozen=True)
class Reached:
    """Where a run first met its target at an evaluation; ``inf`` if it never did."""

    step: float = math.inf
    seconds: float = math.inf


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    label: str
    kind: str
    runs: tuple[Run, ...]
    variant: int = 0  # how many groups of the same kind come before it
    other: int = 0  # how many kinds without a colour of their own come before it

    @property
    def hue(self) -> int | None:
        """The colour of a kind that has none of its own, in degrees: far from those before it."""
        return None if self.kind in NAMES else round(210 + 137.5 * self.other) % 360

    @property
    def metric(self) -> str:
        """What is aimed at: ``"accuracy"`` or ``"loss"``."""
        return self.runs[0].metric

    @property
    def target(self) -> float | None:
        """Value to reach."""
        return self.runs[0].target

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.runs[0].world

    @property
    def reached(self) -> list[Reached]:
        """When each run met the target."""
        return [reached(run) for run in self.runs]

    @property
    def num_reached(self) -> int:
        """Runs that met it."""
        return sum(math.isfinite(r.step) for r in self.reached)

    @property
    def steps_to_target(self) -> float:
        """Median over runs; ``inf`` if half of them or more missed it."""
        return median([r.step for r in self.reached])

    @property
    def seconds_to_target(self) -> float:
        """Median over runs; ``inf`` if half of them or more missed it."""
        return median([r.seconds for r in self.reached])

    def count(self, status: str) -> int:
        """Runs that ended like this."""
        return sum(run.status == status for run in self.runs)

    def spread(self, value: Callable[[Run], float | None]) -> Spread | None:
        """Spread of a number over the runs that have it."""
        return Spread.of([value(run) for run in self.runs])


@dataclass(frozen=True)
class Chapter:
    """Groups that may be compared: one recipe, metric, model, data set and batch."""

    recipe: str
    metric: str
    groups: tuple[Group, ...]
    apart: str = ""  # what tells it from other chapters of the recipe

    @property
    def title(self) -> str:
        """The recipe, and what is special here."""
        return f"{self.recipe} ({self.apart})" if self.apart else self.recipe

    @property
    def runs(self) -> list[Run]:
        """All runs."""
        return [run for group in self.groups for run in group.runs]

    @property
    def targets(self) -> list[float]:
        """The different targets, usually one."""
        return sorted({g.target for g in self.groups if g.target is not None})

    @property
    def evaluated(self) -> bool:
        """Whether any run was evaluated."""
        return any(run.evals for run in self.runs)


def median(values: Sequence[float]) -> float:
    """Median in which ``inf`` counts as a value: one miss among two runs is no success."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return high if math.isinf(high) else (low + high) / 2


def reached(run: Run) -> Reached:
    """First evaluation that met the target; between evaluations nothing is guessed."""
    if run.target is None:
        return Reached()
    for record in run.evals:
        value = number(record.get(run.metric))
        if value is None:
            continue
        if value <= run.target if run.metric == "loss" else value >= run.target:
            seconds = record["seconds"]
            return Reached(record["step"], math.inf if seconds is None else seconds)
    return Reached()


def final(run: Run, key: str) -> float | None:
    """The last value of an evaluation, else what the end of the run says."""
    for record in reversed(run.evals):
        if (value := number(record.get(key))) is not None:
            return value
    return number((run.finish or {}).get(key))


def best(run: Run) -> float | None:
    """The best value of the metric at any evaluation."""
    values = [v for e in run.evals if (v := number(e.get(run.metric))) is not None]
    if not values:
        return None
    return min(values) if run.metric == "loss" else max(values)


def last_loss(run: Run) -> float | None:
    """The last training loss that is a number."""
    found = (number(step.get("loss")) for step in reversed(run.steps))
    return next((loss for loss in found if loss is not None), None)


def memory(run: Run) -> float | None:
    """Peak bytes of rank 0."""
    return max((m for s in run.steps if (m := number(s.get("memory"))) is not None), default=None)


def throughput(run: Run) -> float | None:
    """Samples per second: the median over logged steps."""
    rates = [r for s in run.steps if (r := number(s.get("samples_per_second"))) is not None]
    return statistics.median(rates) if rates else None


def step_seconds(run: Run) -> float | None:
    """Mean seconds of a training step."""
    if not run.last_step or run.seconds is None:
        return None
    return run.seconds / run.last_step


def name(optimizer: str, run: Run | None = None) -> str:
    """What people call an optimizer."""
    if run is not None and run.method is not None and optimizer == run.method.lower():
        return NAMES.get(optimizer, run.method)
    return NAMES.get(optimizer.lower(), optimizer)


def chapters(runs: Sequence[Run]) -> list[Chapter]:
    """Sort runs into what may be compared, and there by optimizer and settings."""
    by_recipe: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        by_recipe.setdefault(run.recipe, {}).setdefault(repr(task(run)), []).append(run)
    found = []
    for recipe, parts in sorted(by_recipe.items()):
        members = [parts[key] for key in sorted(parts)]
        for runs_, apart in zip(members, _told_apart([task(m[0]) for m in members]), strict=True):
            found.append(Chapter(recipe, runs_[0].metric, tuple(_groups(runs_)), apart))
    return found


def task(run: Run) -> Record:
    """What was to be learned: runs of another task need other steps and seconds, whoever trains them."""
    known = settings(run)
    batch = _sizes(known.get("train.batch", known.get("batch")))
    first = {"metric": run.metric, "model": known.get("model.name"), "data": known.get("data.name")}
    options = {key: known[key] for key in sorted(known) if key.startswith(("model.", "data."))}
    return {**first, "batch": batch, **options}


def _sizes(batch: Any) -> Any:
    """A number as it is; of a schedule ``64, 128 from epoch 2``, if it can be read."""
    try:
        (_, first), *others = batch
        return ", ".join([f"{first}", *(f"{size} from epoch {at:g}" for at, size in others)])
    except (TypeError, ValueError):
        return batch


def _told_apart(tasks: Sequence[Record]) -> list[str]:
    """For each task what tells it from the others: names and batch, then options if need be."""
    names = [key for key in _TASK if len({repr(one[key]) for one in tasks}) > 1]
    said = [[f"{key} {_known(one[key])}" for key in names] for one in tasks]
    for key in dict.fromkeys(key for one in tasks for key in one if key not in _TASK):
        more = [
            [*words, f"{key.partition('.')[2]} {_plain(one[key])}"] if key in one else words
            for words, one in zip(said, tasks, strict=True)
        ]
        if len(set(map(tuple, more))) > len(set(map(tuple, said))):
            said = more
    return [", ".join(words) for words in said]


def _known(value: Any) -> str:
    return "unknown" if value is None else _plain(value)


def _groups(runs: Sequence[Run]) -> list[Group]:
    by_name: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        same_name = by_name.setdefault((run.kind, run.optimizer), {})
        same_name.setdefault(_fingerprint(run), []).append(run)
    groups: list[Group] = []
    for kind, optimizer in sorted(by_name, key=lambda key: (_rank(key[0]), key)):
        variants = list(by_name[kind, optimizer].values())
        for members, suffix in zip(variants, _differences([v[0] for v in variants]), strict=True):
            before = sum(group.kind == kind for group in groups)
            label = name(optimizer, members[0]) + suffix
            ordered = sorted(members, key=lambda run: (len(run.seed), run.seed, run.name))
            others = {group.kind for group in groups if group.kind not in NAMES} - {kind}
            groups.append(Group(label, kind, tuple(ordered), before, len(others)))
    return groups


def _rank(kind: str) -> int:
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def settings(run: Run) -> Record:
    """What was trained and how, by dotted key; what may differ within a group is left out."""
    flat = {key.removeprefix("settings."): value for key, value in flatten(run.config).items()}
    started = {"world": run.world, "batch": run.start.get("batch"), "target": run.target}
    named = {key.rsplit(".", 1)[-1] for key in flat}
    flat |= {key: value for key, value in started.items() if key not in named}
    return {key: value for key, value in flat.items() if key.rsplit(".", 1)[-1] not in _ASIDE}


def _fingerprint(run: Run) -> str:
    return repr(sorted(settings(run).items(), key=lambda item: item[0]))


def _differences(runs: Sequence[Run]) -> list[str]:
    """For each run, in brackets, the settings that tell it from the others."""
    if len(runs) == 1:
        return [""]
    all_settings = [settings(run) for run in runs]
    keys: dict[str, str] = {}  # short name to key; a value stored twice is said once
    for key in dict.fromkeys(k for s in all_settings for k in s):
        values = [repr(s.get(key)) for s in all_settings]
        if len(set(values)) > 1:
            keys.setdefault(key.rsplit(".", 1)[-1], key)
    shown = list(keys.items())[:3]
    return [
        " (" + ", ".join(f"{short} {_plain(s.get(key))}" for short, key in shown) + ")"
        for s in all_settings
    ]


def _plain(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
