"""The suite's tables, from its runs."""

import json
from collections.abc import Sequence
from statistics import mean
from typing import Any

from suite.optimizers import ENTRIES
from suite.tasks import CHOSEN, FURTHER_CHOSEN, FURTHER_REPORTED, REPORTED, TASKS, Task

Rows = Sequence[dict[str, Any]]
ORDER = ["K-FAC", "SGD", "AdamW", "Muon", "SOAP", "Newton-Muon", "SOAP, polar"]
DEFAULT = 0.1


#: Tasks by what became of them.
PARTS = {
    "chosen on": CHOSEN,
    "only reported": REPORTED,
    "later, chosen on": FURTHER_CHOSEN,
    "later, only reported": FURTHER_REPORTED,
}

#: In place of a value that was not measured; `None` is one of a run that diverged.
MISSING = -1.0


def shown(value: float | None) -> str:
    if value is None:
        return "diverged"
    if value == MISSING:
        return "–"
    return f"{value:.1f}" if value >= 20 else f"{value:.2f}" if value >= 1 else f"{value:.2g}"


def better(task: Task, first: float | None, second: float | None) -> bool:
    if MISSING in (first, second):
        return second == MISSING and first != MISSING
    if first is None or second is None:
        return second is None and first is not None
    return first > second if task.higher else first < second


def values(
    rows: Rows, task: Task, optimizer: str, schedule: str = "decay"
) -> dict[float, float | None]:
    """By rate, the value of the first seed."""
    return {
        row["rate"]: row["value"]
        for row in rows
        if (row["task"], row["optimizer"], row["schedule"]) == (task.name, optimizer, schedule)
        and row["seed"] == 0
        and row["options"] == "{}"
    }


def best_of(task: Task, found: dict[float, float | None]) -> float | None:
    best: float | None = MISSING
    for value in found.values():
        if best == MISSING or better(task, value, best):
            best = value
    return best


def best_rate(task: Task, found: dict[float, float | None]) -> float:
    """The rate of the best value."""
    sign = 1 if task.higher else -1
    return max(found, key=lambda rate: _score(found[rate], sign))


def _score(value: float | None, sign: int) -> float:
    return float("-inf") if value is None else sign * value


def mean_of_seeds(rows: Rows, task: Task, optimizer: str, rate: float) -> float | None:
    """Of all seeds at a rate, under the schedule; ``None`` if one diverged."""
    found = [
        row["value"]
        for row in rows
        if (row["task"], row["optimizer"], row["rate"]) == (task.name, optimizer, rate)
        and row["schedule"] == "decay"
        and row["options"] == "{}"
    ]
    return MISSING if not found else None if None in found else mean(found)


def at_best(rows: Rows, task: Task, optimizer: str) -> float | None:
    """At the rate that is best for the first seed, the mean of all seeds."""
    found = values(rows, task, optimizer)
    if not found:
        return MISSING
    return mean_of_seeds(rows, task, optimizer, best_rate(task, found))


Variants = dict[str, dict[str, Any]]


def print_tables(rows: Rows, ablation: Variants, levers: Variants) -> None:
    _print_main(rows)
    _print_sweep(rows)
    _print_constant(rows)
    title = "What each part gives: K-FAC at 0.1 with one thing changed, one seed."
    print_variants(title, rows, ablation, (0,))
    title = "Levers that make steps cheap, each turned off: K-FAC at 0.1, means of three seeds."
    print_variants(title, rows, levers, (0, 1, 2))


def _print_main(rows: Rows) -> None:
    names = [name for name in ORDER[1:] if any(row["optimizer"] == name for row in rows)]
    print(
        "Everybody at its best rate, K-FAC also at its default rate, 0.1; means of all seeds run.\n"
    )
    print("| task | judged by | K-FAC at 0.1 | K-FAC | " + " | ".join(names) + " | place at 0.1 |")
    print("|---" * (len(names) + 5) + "|")
    places = []
    for part, tasks in PARTS.items():
        known = [(task, mean_of_seeds(rows, task, "K-FAC", DEFAULT)) for task in tasks]
        known = [(task, value) for task, value in known if value != MISSING]
        if known:
            print(f"| *{part}* |" + " |" * (len(names) + 4))
        for task, default in known:
            others = [at_best(rows, task, name) for name in names]
            place = 1 + sum(better(task, other, default) for other in others)
            places.append(place)
            cells = [shown(default), shown(at_best(rows, task, "K-FAC")), *map(shown, others)]
            print(f"| {task.name} | {task.measure} | " + " | ".join([*cells, str(place)]) + " |")
    first, count = places.count(1), len(places)
    print(
        f"\nAt its default rate K-FAC is ahead of every other's best on {first} of {count} tasks,"
    )
    print(f"and second on {places.count(2)}.\n")


def _print_sweep(rows: Rows) -> None:
    """How much a rate matters: the middle one of the first three, and the worst of them."""
    names = [name for name in ORDER if any(row["optimizer"] == name for row in rows)]
    print("The middle one of three rates / the worst of them, one seed.\n")
    print("| task | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for task in TASKS.values():
        cells = []
        for name in names:
            found = values(rows, task, name)
            three = [found[rate] for rate in ENTRIES[name].rates_of(task) if rate in found]
            whole = len(three) == 3
            worst = min(three, key=lambda v: _score(v, 1 if task.higher else -1)) if whole else None
            cells.append(f"{shown(three[1])} / {shown(worst)}" if whole else "")
        if any(cells):
            print(f"| {task.name} | " + " | ".join(cells) + " |")
    print()


def _print_constant(rows: Rows) -> None:
    print("Without a schedule (constant rate): K-FAC at 0.1, SGD and AdamW at the best of three.\n")
    print("| task | judged by | K-FAC at 0.1 | K-FAC | SGD | AdamW |")
    print("|---|---|---|---|---|---|")
    for task in TASKS.values():
        mine = values(rows, task, "K-FAC", "constant")
        if not mine:
            continue
        cells = [mine.get(DEFAULT), best_of(task, mine)]
        cells += [best_of(task, values(rows, task, name, "constant")) for name in ("SGD", "AdamW")]
        print(f"| {task.name} | {task.measure} | " + " | ".join(map(shown, cells)) + " |")
    print()


def print_variants(
    title: str,
    rows: Rows,
    variants: Variants,
    seeds: Sequence[int],
    tasks: Sequence[Task] = CHOSEN,
) -> None:
    """Means over some seeds; a cell without all of them stays empty."""
    changed = {json.dumps(options, sort_keys=True) for options in variants.values()} - {"{}"}
    if not any(row["options"] in changed for row in rows):
        return
    print(f"\n{title}\n")
    print("| | " + " | ".join(task.name for task in tasks) + " |")
    print("|---" * (len(tasks) + 1) + "|")
    for name, options in variants.items():
        text = json.dumps(options, sort_keys=True)
        cells = []
        for task in tasks:
            found = {
                row["seed"]: row["value"]
                for row in rows
                if (row["task"], row["optimizer"], row["options"]) == (task.name, "K-FAC", text)
                and (row["rate"], row["schedule"]) == (DEFAULT, "decay")
            }
            own = [found[seed] for seed in seeds if seed in found]
            whole = len(own) == len(seeds)
            cells.append(shown(None if None in own else mean(own)) if whole else "")
        print(f"| {name} | " + " | ".join(cells) + " |")
