"""K-FAC's default line against other optimizers on every task of the suite, at equal steps.

    .venv/bin/python benchmarks/suite/run.py [--workers 2] [stage ...]

Stages: `kfac`, `rivals` and `kin` (three rates, one seed), `edges` (one more rate while the best is at
the edge of those tried), `seeds` (two more of K-FAC's default rate and of everybody's best), `constant`
(no schedule: K-FAC, SGD, AdamW), `ablation`, `levers` (each lever that makes steps cheap turned off,
three seeds), `heads` (a shorter step of the head, two seeds), `table`. Without arguments all of them.
Runs in `results/suite.jsonl` are not repeated.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from suite.optimizers import ENTRIES
from suite.running import Trial, read, run_all
from suite.table import best_rate, print_tables, print_variants, values
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
#: not, but for rounding, and no layer of these tasks is wide enough to be cut into blocks.
LEVERS: dict[str, dict[str, Any]] = {
    "default": {},
    'four products (`solver="eigen"`)': {"solver": "eigen"},
    'no bfloat16 (`products="float32"`)': {"products": "float32"},
    "all rows (`rows=None`)": {"rows": None},
}


#: What a shorter step of the head gives, on the tasks above and two later ones.
HEADS: dict[str, dict[str, Any]] = {"default": {}, "0.3 of the rate for the head": {"head": 0.3}}
ADDITION = "addition modulo 53"
HEAD_TASKS = [*CHOSEN, TASKS["byte LSTM"], TASKS[ADDITION]]


def sweep(names: Iterable[str], tasks: Iterable[Task], schedule: str = "decay") -> list[Trial]:
    return [
        Trial(task.name, name, rate, 0, schedule)
        for task in tasks
        for name in names
        for rate in ENTRIES[name].rates_of(task)
    ]


def tried(task: Task) -> dict[str, dict[float, float | None]]:
    """By optimizer and rate, what the first seed came to under the schedule."""
    rows = list(read(RESULTS))
    return {name: values(rows, task, name) for name in ENTRIES}


def beyond(task: Task, found: dict[float, float | None]) -> float | None:
    """The next rate where the best is at the edge of those tried, by the step between the last two."""
    rates, best = sorted(found), best_rate(task, found)
    if best == rates[0]:
        return float(f"{rates[0] ** 2 / rates[1]:.2g}")
    if best == rates[-1]:
        return float(f"{rates[-1] ** 2 / rates[-2]:.2g}")
    return None


def run_edges(workers: int) -> None:
    """One more rate while the best is at the edge; a fourth at most beyond each of the three."""
    for _ in range(2):
        trials = []
        for task in sorted(TASKS.values(), key=_weight):
            for name, found in tried(task).items():
                if all(value is None for value in found.values()) or len(found) > 4:
                    continue
                if (rate := beyond(task, found)) is not None:
                    trials.append(Trial(task.name, name, rate))
        run_all(trials, RESULTS, workers)


def seeds() -> list[Trial]:
    """Two more seeds of K-FAC's default rate and of everybody's best, the closest rivals first."""
    tasks = sorted(TASKS.values(), key=_weight)
    chosen = [(task, "K-FAC", DEFAULT) for task in tasks]
    known = {task.name: tried(task) for task in tasks}
    for name in ("Newton-Muon", "Muon", "SOAP, polar", "SOAP", "K-FAC", "AdamW", "SGD"):
        for task in tasks:
            found = known[task.name][name]
            if any(value is not None for value in found.values()):
                chosen.append((task, name, best_rate(task, found)))
    return [Trial(task.name, *one, seed) for task, *one in chosen for seed in (1, 2)]


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


def heads() -> list[Trial]:
    """Two seeds of each, and the addition with what Muon leaves to AdamW left to SGD."""
    found = [
        Trial(task.name, "K-FAC", DEFAULT, seed, "decay", json.dumps(options))
        for seed in range(2)
        for task in HEAD_TASKS
        for options in HEADS.values()
    ]
    left = json.dumps({"exclude": ["tokens", "head", "*norm*"]})
    return [*found, Trial(ADDITION, "K-FAC", DEFAULT, 0, "decay", left)]


def _weight(task: Task) -> bool:
    """The most expensive task comes last."""
    return "1000" in task.name


STAGES = {
    "kfac": lambda: sweep(["K-FAC"], TASKS.values()),
    "rivals": lambda: sweep(["SGD", "AdamW", "Muon", "SOAP"], TASKS.values()),
    "kin": lambda: sweep(["Newton-Muon", "SOAP, polar"], sorted(TASKS.values(), key=_weight)),
    "edges": lambda: [],  # in rounds, each of which depends on the last
    "seeds": seeds,
    "constant": lambda: sweep(["K-FAC", "SGD", "AdamW"], CHOSEN, "constant"),
    "ablation": ablation,
    "levers": levers,
    "heads": heads,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, a thread each")
    parser.add_argument("stages", nargs="*", default=[*STAGES, "table"])
    arguments = parser.parse_args()
    for stage in arguments.stages:
        if stage == "table":
            rows = list(read(RESULTS))
            print_tables(rows, ABLATION, LEVERS)
            title = "A shorter step of the head: K-FAC at 0.1, means of two seeds."
            print_variants(title, rows, HEADS, (0, 1), HEAD_TASKS)
        elif stage == "edges":
            run_edges(arguments.workers)
        else:
            run_all(STAGES[stage](), RESULTS, arguments.workers)


if __name__ == "__main__":
    main()
