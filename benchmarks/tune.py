"""Find each optimizer's learning rate and shortest schedule, with the same budget for all of them.

    python benchmarks/tune.py [--tasks cifar10,text] [--optimizers sgd,kfac] [--workers 2]

1. Four learning rates at one length; while the best is at the edge, one more beyond it.
2. The best one at lengths found by bisection: the shortest that passes the target.
3. Both neighbouring learning rates at the next shorter length.
4. The middle between that length and the next shorter one.

Runs are tested on training samples that are kept apart. Trials are kept in
`benchmarks/results/tuning/`, so an interrupted search resumes where it was.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _common import RESULTS, table
from _tasks import OPTIMIZERS, TASKS, Task
from _trials import Trial, run

FOLDER = RESULTS / "tuning"


class Search:
    """The search of one optimizer on one task; trials that were run before are not run again."""

    def __init__(self, task: Task, optimizer: str, data_dir: str | None) -> None:
        self.task, self.optimizer, self.data_dir = task, optimizer, data_dir
        self.path = FOLDER / f"{task.name}-{optimizer}.json"
        known = json.loads(self.path.read_text()) if self.path.exists() else {"trials": []}
        self.trials: list[dict[str, Any]] = known["trials"]
        recipe = Trial(task.name, optimizer, 1, 0).recipe()
        self.by_loss = recipe.train.target is None
        self.target = recipe.train.target_loss if self.by_loss else recipe.train.target

    def score(self, rate: float, steps: int, seed: int) -> float:
        """Higher is better: accuracy, or loss with its sign turned."""
        found = [t for t in self.trials if (t["lr"], t["steps"], t["seed"]) == (rate, steps, seed)]
        if not found:
            changes = self.task.changes(self.optimizer, rate)
            trial = Trial(self.task.name, self.optimizer, steps, seed, changes)
            result = run(trial, data_dir=self.data_dir, holdout=True, only_end=True)
            keys = ("steps", "seed", "status", "accuracy", "loss", "seconds")
            found = [{"lr": rate, **{key: result[key] for key in keys}}]
            self.trials += found
            self.save()
            print(f"{self.task.name:14} {self.optimizer:6} {found[0]}", flush=True)
        value = found[0]["loss" if self.by_loss else "accuracy"]
        if value is None:
            return float("-inf")
        return -value if self.by_loss else value

    def mean(self, rate: float, steps: int) -> float:
        """Over the seeds of tuning."""
        return statistics.mean(self.score(rate, steps, seed) for seed in self.task.seeds)

    def passes(self, rate: float, steps: int) -> bool:
        """Whether the target is passed with a margin."""
        wanted = -self.target if self.by_loss else self.target
        return self.mean(rate, steps) >= wanted + self.task.margin

    def go(self) -> dict[str, Any]:
        """Search; returns the learning rate and the number of steps."""
        rates = list(self.task.rates[self.optimizer])
        best = self.best(rates)
        while best in (rates[0], rates[-1]):
            rates.append(best * 2 if best == rates[-1] else best / 2)
            rates.sort()
            best = self.best(rates)
        steps = self.shortest(best)
        if steps is None:
            chosen = {"lr": best, "steps": self.task.lengths[-1], "reached": False}
        else:
            place = rates.index(best)
            near = [rates[i] for i in (place - 1, place + 1) if 0 <= i < len(rates)]
            best, steps = self.refine(best, steps, near)
            chosen = {"lr": best, "steps": steps, "reached": True}
        self.save(chosen)
        return chosen

    def refine(self, best: float, steps: int, near: list[float]) -> tuple[float, int]:
        """Neighbouring rates at the next shorter length, then the middle of two lengths."""
        if steps > self.task.lengths[0]:
            shorter = self.shorter(steps)
            if fit := [rate for rate in near if self.passes(rate, shorter)]:
                best, steps = max(fit, key=lambda rate: self.mean(rate, shorter)), shorter
        if steps > self.task.lengths[0]:
            middle = (self.shorter(steps) + steps) // 2
            steps = middle if self.passes(best, middle) else steps
        return best, steps

    def shorter(self, steps: int) -> int:
        """The next shorter length."""
        return self.task.lengths[self.task.lengths.index(steps) - 1]

    def best(self, rates: list[float]) -> float:
        """The best learning rate at the first length."""
        return max(rates, key=lambda rate: self.mean(rate, self.task.first_length))

    def shortest(self, rate: float) -> int | None:
        """The shortest length that passes, by bisection."""
        low, high = 0, len(self.task.lengths)
        while low < high:
            middle = (low + high) // 2
            if self.passes(rate, self.task.lengths[middle]):
                high = middle
            else:
                low = middle + 1
        return self.task.lengths[low] if low < len(self.task.lengths) else None

    def save(self, chosen: dict[str, Any] | None = None) -> None:
        """Write all trials, and what was chosen."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        content = {
            "task": self.task.name,
            "optimizer": self.optimizer,
            "rates": self.task.rates[self.optimizer],
            "lengths": self.task.lengths,
            "target": self.target,
            "margin": self.task.margin,
            "chosen": chosen,
            "trials": self.trials,
        }
        self.path.write_text(json.dumps(content, indent=1) + "\n")


def chosen(task: str, optimizer: str) -> dict[str, Any]:
    """What the search came to."""
    path = FOLDER / f"{task}-{optimizer}.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    if not content.get("chosen"):
        raise SystemExit(f"{optimizer} is not tuned on {task} yet: python benchmarks/tune.py")
    return dict(content["chosen"])


def search_all(pairs: list[tuple[str, str]], workers: int, data_dir: str | None) -> None:
    """Each pair in a process of its own, with its share of the cores."""
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    waiting, running = list(pairs), []
    while waiting or running:
        while waiting and len(running) < workers:
            task, optimizer = waiting.pop(0)
            command = [sys.executable, __file__, "--tasks", task, "--optimizers", optimizer]
            command += ["--workers", "0", *(["--data-dir", data_dir] if data_dir else [])]
            running.append(subprocess.Popen(command, env=environment))
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        running = [process for process in running if process.poll() is None]


def show(pairs: list[tuple[str, str]]) -> None:
    rows = []
    for task, optimizer in pairs:
        path = FOLDER / f"{task}-{optimizer}.json"
        content = json.loads(path.read_text()) if path.exists() else {"trials": []}
        best = content.get("chosen") or {"lr": "", "steps": "", "reached": "not done"}
        row = (f"{task} {optimizer}", best["lr"], best["steps"], best["reached"])
        rows.append((*row, len(content["trials"])))
    print(table(("task, optimizer", "lr", "steps", "reached", "runs"), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--workers", type=int, default=2, help="0 runs in this process")
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    names = arguments.optimizers.split(",")
    pairs = [(task, name) for task in arguments.tasks.split(",") for name in names]
    data_dir = None if arguments.data_dir is None else str(arguments.data_dir)
    if arguments.workers:
        search_all(pairs, arguments.workers, data_dir)
        show(pairs)
        return
    for task, name in pairs:
        Search(TASKS[task], name, data_dir).go()


if __name__ == "__main__":
    main()
