"""How much do damping and learning rate matter? Final accuracy over a grid of both, beside SGD's.

    python benchmarks/robustness.py [--tasks digits,cifar10] [--seeds 3] [--workers 2]

Every cell is the mean of short schedules of the recipe's optimizer with only these two values changed.
The last rows are the library as it comes, with nothing of the recipe but data, model and schedule: once
with K-FAC's momentum, once with SGD's. On text the loss is an average over tokens and K-FAC is told so
(`loss_average="token"`), and the accuracy is that of the next byte. Two tasks also show the defaults with
other lengths of the steps. Runs are kept while the table grows, so an interrupted one resumes where
it was.
"""

import argparse
import json
import math
import os
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from inspect import signature
from typing import Any

import torch
from _common import RESULTS, machine_line, table, write_json
from _trials import Trial, run

import kronfac

NAME = "robustness"
#: Steps of the schedule: what K-FAC needs to come near its target.
STEPS = {"digits": 80, "mnist": 160, "fashion-mnist": 160, "cifar10": 120, "text": 140}
RATES = dict.fromkeys(STEPS, (0.05, 0.1, 0.2, 0.4)) | {"text": (0.025, 0.05, 0.1, 0.2)}
DAMPINGS = (1e-5, 1e-4, 1e-3)
#: `kronfac.KFAC(model, torch.optim.SGD(..., weight_decay=5e-4), momentum=0.9, nesterov=True)`.
PLAIN = "K-FAC, defaults"
#: `kronfac.KFAC(model, torch.optim.SGD(..., momentum=0.9, nesterov=True, weight_decay=5e-4))`.
DROP_IN = "K-FAC, defaults, over SGD's momentum"
_OWN = (("momentum", 0.9), ("nesterov", True), ("weight_decay", 5e-4))
_DEFAULTS = {
    PLAIN: _OWN,
    DROP_IN: (("base_momentum", 0.9), ("base_nesterov", True), ("weight_decay", 5e-4)),
}
#: Tasks with and without convolutions, on which the default length is compared with others.
_LENGTHS = {"cifar10": ("graft", "unit"), "text": ("graft", "unit")}
DEFAULT = signature(kronfac.KFAC).parameters["damping"].default


def rows(task: str, seed: int) -> dict[str, list[Trial]]:
    """A trial for each learning rate, by the name of the row."""
    steps, rates = STEPS[task], RATES[task]
    found = {"SGD": [Trial(task, "sgd", steps, seed, (("lr", rate),)) for rate in rates]}
    for damping in DAMPINGS:
        found[_label(damping)] = [
            Trial(task, "kfac", steps, seed, (("lr", rate), ("damping", damping))) for rate in rates
        ]
    lengths = {_length(rule): (*_OWN, ("rescale", rule)) for rule in _LENGTHS.get(task, ())}
    for name, options in (_DEFAULTS | lengths).items():
        found[name] = [
            Trial(task, "kfac", steps, seed, (("lr", rate), *options), alone=True) for rate in rates
        ]
    return found


def key(trial: Trial) -> str:
    return json.dumps([trial.task, trial.optimizer, trial.seed, dict(trial.changes), trial.alone])


def one(trial: Trial, data_dir: str | None) -> tuple[str, float | None]:
    """The final accuracy of a run; None if it diverged."""
    torch.set_num_threads(1)
    return key(trial), run(trial, data_dir=data_dir, only_end=True)["accuracy"]


def measure(wanted: list[Trial], workers: int, data_dir: str | None) -> dict[str, float | None]:
    partial = RESULTS / f"{NAME}.partial.json"
    known: dict[str, float | None] = json.loads(partial.read_text()) if partial.exists() else {}
    missing = [trial for trial in wanted if key(trial) not in known]
    with ProcessPoolExecutor(workers) as pool:
        for done in as_completed([pool.submit(one, trial, data_dir) for trial in missing]):
            name, value = done.result()
            known[name] = value
            partial.write_text(json.dumps(known))
            print(name, value, flush=True)
    return known


def mean(values: list[float | None]) -> float | None:
    """Over seeds; None if one of them diverged."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return statistics.mean(finite) if len(finite) == len(values) else None


def show(task: str, cells: dict[str, dict[str, float | None]]) -> dict[str, Any]:
    def text(value: float | None) -> str:
        return "diverged" if value is None else f"{value:.1%}"

    print(f"\n{task}: after {STEPS[task]} steps")
    heads = ("learning rate", *(f"{rate:g}" for rate in RATES[task]))
    print(table(heads, [(name, *(text(v) for v in row.values())) for name, row in cells.items()]))
    finite = {name: [v for v in row.values() if v is not None] for name, row in cells.items()}
    best = max(v for values in finite.values() for v in values)
    found = {name: max(values, default=None) for name, values in finite.items()}
    print(f"best {text(best)}", *(f"{name}: {text(found[name])}" for name in _DEFAULTS), sep="; ")
    below = {name: None if found[name] is None else best - found[name] for name in _DEFAULTS}
    return {"cells": cells, "best": best, "best_of_row": found, "below_best": below}


def _length(rule: str) -> str:
    return f"{PLAIN}, rescale={rule!r}"


def _label(damping: float) -> str:
    return f"K-FAC of the recipe, damping {damping:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(STEPS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--data-dir")
    arguments = parser.parse_args()
    tasks, seeds = arguments.tasks.split(","), range(arguments.seeds)
    print(machine_line())
    wanted = [t for task in tasks for s in seeds for row in rows(task, s).values() for t in row]
    known = measure(wanted, arguments.workers, arguments.data_dir)
    results = {}
    for task in tasks:
        grid = [rows(task, seed) for seed in seeds]
        cells = {
            name: {
                f"{rate:g}": mean([known[key(one[name][column])] for one in grid])
                for column, rate in enumerate(RATES[task])
            }
            for name in grid[0]
        }
        results[task] = show(task, cells)
    write_json(NAME, {"seeds": len(seeds), "steps": STEPS, "default": DEFAULT, "tasks": results})
    (RESULTS / f"{NAME}.partial.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
