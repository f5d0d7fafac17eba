"""K-FAC's default line against other optimizers on every task of the suite, at equal steps.

    .venv/bin/python benchmarks/suite/run.py [stage ...]

Stages: `kfac`, `rivals` and `kin` (three rates, one seed), `seeds` (three of K-FAC's default rate, of its
best and of each task's best rival), `constant` (no schedule: K-FAC, SGD, AdamW), `ablation`, `levers`
(each lever that makes steps cheap turned off, three seeds), `table`.
Without arguments all of them. Runs that are in `results/suite.jsonl` are not repeated.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from suite.optimizers import ENTRIES
from suite.running import Trial, read, run_all
from suite.table import print_tables
from suite.tasks import CHOSEN, TASKS, Task

RESULTS = Path(__file__).parents[1] / "results" / "suite.jsonl"
DEFAULT = 0.1

#: What each part gives, at the default rate; K-FAC's own defaults are the first.
ABLATION: dict[str, dict[str, Any]] = {
    "default": {},
    "polar only (no curvature)": {"relative": 1e8},
    "curvature only (Muon's norm, not orthogonal)": {"rescale": "unit"},
    "input side only": {"fisher": "forward"},
    "output side only": {"inputs": False, "share_inputs": False, "row_form": False},
    "absolute damping 1e-4": {"damping": 1e-4},
    "length of Muon, whatever gradients agree on": {"rescale": "orthogonal"},
    "power 1/2": {"power": 0.5},
    "momentum after preconditioning (SGD's own)": {"momentum_after": True},
}

#: Levers that are on by default and change numbers, each turned off. Shared inputs and the row form do
#: not, but for rounding.
LEVERS: dict[str, dict[str, Any]] = {
    "default": {},
    'four products (`solver="eigen"`)': {"solver": "eigen"},
    'no bfloat16 (`products="float32"`)': {"products": "float32"},
    "all rows (`rows=None`)": {"rows": None},
}


def sweep(names: Iterable[str], tasks: Iterable[Task], schedule: str = "decay") -> list[Trial]:
    return [
        Trial(task.name, name, rate, 0, schedule)
        for task in tasks
        for name in names
        for rate in ENTRIES[name].rates_of(task)
    ]


def best(rows: Iterable[dict[str, Any]], task: Task) -> dict[str, Any]:
    """The best of some runs."""
    sign = 1 if task.higher else -1
    return max(rows, key=lambda row: float("-inf") if row["value"] is None else sign * row["value"])


def seeds() -> list[Trial]:
    """Two more seeds of the runs that the table compares."""
    known = [row for row in read(RESULTS) if row["seed"] == 0 and row["schedule"] == "decay"]
    found = []
    for task in TASKS.values():
        own = [row for row in known if row["task"] == task.name and row["options"] == "{}"]
        rivals = [row for row in own if row["optimizer"] != "K-FAC"]
        mine = [row for row in own if row["optimizer"] == "K-FAC"]
        chosen = {("K-FAC", DEFAULT)}
        for row in (best(mine, task), best(rivals, task)):
            chosen.add((row["optimizer"], row["rate"]))
        found += [Trial(task.name, *one, seed) for one in sorted(chosen) for seed in (1, 2)]
    return found


def ablation() -> list[Trial]:
    return [
        Trial(task.name, "K-FAC", DEFAULT, 0, "decay", json.dumps(options, sort_keys=True))
        for options in ABLATION.values()
        for task in CHOSEN
    ]


def levers() -> list[Trial]:
    """Three seeds of each."""
    return [
        Trial(task.name, "K-FAC", DEFAULT, seed, "decay", json.dumps(options, sort_keys=True))
        for seed in range(3)
        for task in CHOSEN
        for options in LEVERS.values()
    ]


def _weight(task: Task) -> bool:
    """The most expensive task comes last."""
    return "1000" in task.name


STAGES = {
    "kfac": lambda: sweep(["K-FAC"], TASKS.values()),
    "rivals": lambda: sweep(["SGD", "AdamW", "Muon", "SOAP"], TASKS.values()),
    "kin": lambda: sweep(["Newton-Muon", "SOAP, polar"], sorted(TASKS.values(), key=_weight)),
    "seeds": seeds,
    "constant": lambda: sweep(["K-FAC", "SGD", "AdamW"], CHOSEN, "constant"),
    "ablation": ablation,
    "levers": levers,
}


def main() -> None:
    stages = sys.argv[1:] or [*STAGES, "table"]
    for stage in stages:
        if stage == "table":
            print_tables(list(read(RESULTS)), ABLATION, LEVERS)
        else:
            run_all(STAGES[stage](), RESULTS)


if __name__ == "__main__":
    main()
