"""How much do damping and learning rate matter? Final accuracy over a grid of both, beside SGD's.

    python benchmarks/robustness.py [--tasks digits,cifar10] [--seeds 2] [--workers 2]

Every cell is one short schedule of the recipe's optimizer with only these two values changed; the last
lines say how far the library's default damping and the recipe's learning rate are from the best cell.
Runs are kept while the table grows, so that an interrupted one goes on where it was.
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
STEPS = {"digits": 80, "fashion-mnist": 160, "cifar10": 120, "text": 240}
RATES = {
    "sgd": (0.05, 0.1, 0.2, 0.4),
    "kfac": (0.05, 0.1, 0.2, 0.4),
}
DAMPINGS = (1e-5, 1e-4, 1e-3)
#: What a recipe's table sets for K-FAC, back at the library's defaults, over SGD with Nesterov momentum.
OUT_OF_THE_BOX: dict[str, Any] = {
    name: signature(kronfac.KFAC).parameters[name].default
    for name in (
        "damping",
        "decay",
        "factor_every",
        "refresh_every",
        "solver",
        "rescale",
        "momentum",
        "nesterov",
    )
} | {"base_momentum": 0.9, "base_nesterov": True}
DEFAULT = signature(kronfac.KFAC).parameters["damping"].default


def trials(tasks: list[str], seeds: int) -> list[Trial]:
    found = []
    for task in tasks:
        for seed in range(seeds):
            found += [
                Trial(task, "sgd", STEPS[task], seed, (("lr", rate),)) for rate in RATES["sgd"]
            ]
            found += [
                Trial(task, "kfac", STEPS[task], seed, (("lr", rate), ("damping", damping)))
                for rate in RATES["kfac"]
                for damping in DAMPINGS
            ]
            found += [
                Trial(
                    task,
                    "kfac",
                    STEPS[task],
                    seed,
                    (("lr", rate), ("other_lr", rate), *OUT_OF_THE_BOX.items()),
                )
                for rate in RATES["kfac"]
            ]
    return found


def key(task: str, optimizer: str, seed: int, changes: dict[str, Any]) -> str:
    return json.dumps([task, optimizer, seed, changes], sort_keys=True)


def one(trial: Trial, data_dir: str | None) -> tuple[str, float | None]:
    """The final accuracy, or minus the final loss, of a run; None if it diverged."""
    torch.set_num_threads(1)
    result = run(trial, data_dir=data_dir, only_end=True)
    value = result["accuracy"] if result["accuracy"] is not None else result["loss"]
    if value is not None and result["accuracy"] is None:
        value = -value
    return key(trial.task, trial.optimizer, trial.seed, dict(trial.changes)), value


def measure(wanted: list[Trial], workers: int, data_dir: str | None) -> dict[str, float | None]:
    partial = RESULTS / f"{NAME}.partial.json"
    known: dict[str, float | None] = json.loads(partial.read_text()) if partial.exists() else {}
    missing = [t for t in wanted if key(t.task, t.optimizer, t.seed, dict(t.changes)) not in known]
    with ProcessPoolExecutor(workers) as pool:
        for done in as_completed([pool.submit(one, trial, data_dir) for trial in missing]):
            name, value = done.result()
            known[name] = value
            partial.write_text(json.dumps(known))
            print(name, value, flush=True)
    return known


def mean(known: dict[str, float | None], trial: Trial, seeds: int) -> float | None:
    """Over seeds; None if one of them diverged."""
    values = [
        known[key(trial.task, trial.optimizer, seed, dict(trial.changes))] for seed in range(seeds)
    ]
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return statistics.mean(finite) if len(finite) == len(values) else None


def show(task: str, cells: dict[str, dict[str, float | None]]) -> dict[str, Any]:
    def text(value: float | None) -> str:
        if value is None:
            return "diverged"
        return f"{value:.1%}" if value > 0 else f"{-value:.3f}"

    print(f"\n{task}: after {STEPS[task]} steps")
    heads = ("learning rate", *(f"{rate:g}" for rate in RATES["kfac"]))
    rows = [(name, *(text(v) for v in row.values())) for name, row in cells.items()]
    print(table(heads, rows))
    kfac = {n: row for n, row in cells.items() if n != "SGD"}
    plain = max((v for v in cells["K-FAC out of the box"].values() if v is not None), default=None)
    best = max(v for row in kfac.values() for v in row.values() if v is not None)
    default = cells[_label(DEFAULT)]
    at_default = max(v for v in default.values() if v is not None)
    rate = Trial(task, "kfac", 1, 0).recipe().optimizers["kfac"].options["lr"]
    exact = default.get(f"{rate:g}")
    print(
        f"best {text(best)}; default damping {text(at_default)}, at the recipe's lr {text(exact)}"
    )
    close = sum(
        v is not None and v >= best - 0.02 * abs(best) for r in kfac.values() for v in r.values()
    )
    sgd = [v for v in cells["SGD"].values() if v is not None]
    return {
        "cells": cells,
        "best": best,
        "default_damping": at_default,
        "default_damping_and_recipe_rate": exact,
        "out_of_the_box": plain,
        "recipe_rate": rate,
        "cells_within_2_percent": close,
        "sgd_best": max(sgd, default=None),
    }


def _label(damping: float) -> str:
    return f"K-FAC, damping {damping:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default="digits,fashion-mnist,cifar10")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--data-dir")
    arguments = parser.parse_args()
    tasks, seeds = arguments.tasks.split(","), arguments.seeds
    print(machine_line())
    known = measure(trials(tasks, seeds), arguments.workers, arguments.data_dir)
    results = {}
    for task in tasks:
        cells: dict[str, dict[str, float | None]] = {"SGD": {}}
        for trial in trials([task], 1):
            changes = dict(trial.changes)
            row = "SGD" if trial.optimizer == "sgd" else _label(changes["damping"])
            row = "K-FAC out of the box" if "decay" in changes else row
            cells.setdefault(row, {})[f"{changes['lr']:g}"] = mean(known, trial, seeds)
        results[task] = show(task, cells)
    write_json(NAME, {"seeds": seeds, "steps": STEPS, "default_damping": DEFAULT, "tasks": results})
    (RESULTS / f"{NAME}.partial.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
