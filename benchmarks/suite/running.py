"""One run of one optimizer on one task, and many of them side by side, resumable."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from suite.optimizers import ENTRIES
from suite.tasks import SCHEDULES, TASKS


@dataclass(frozen=True)
class Trial:
    """What identifies a run."""

    task: str
    optimizer: str
    rate: float
    seed: int = 0
    schedule: str = "decay"
    #: Options of K-FAC as text: `{"rescale": "unit"}` for example.
    options: str = "{}"


def train(trial: Trial, make: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Train, and return what the model is judged by; `null` if it diverged."""
    torch.set_num_threads(1)
    task, schedule = TASKS[trial.task], SCHEDULES[trial.schedule]
    torch.manual_seed(trial.seed)
    problem = task.make()
    options = json.loads(trial.options)
    make = make or ENTRIES[trial.optimizer].make
    optimizer = make(problem.model, trial.rate, task, **options)
    rates = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(trial.seed)
    order, losses, started = torch.empty(0, dtype=torch.long), [], time.perf_counter()
    for step in range(task.steps):
        if len(order) < task.batch:
            order = torch.cat([order, torch.randperm(problem.samples, generator=generator)])
        indices, order = order[: task.batch], order[task.batch :]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * schedule(step, task.steps)
        optimizer.zero_grad()
        loss_now = problem.loss(indices)
        loss_now.backward()
        optimizer.step()
        losses.append(float(loss_now.detach()))
    seconds = time.perf_counter() - started
    problem.model.eval()
    with torch.no_grad():
        value = problem.evaluate()
    last = losses[-max(1, task.steps // 20) :]
    loss = sum(last) / len(last)
    return {
        **asdict(trial),
        "value": value if value == value and abs(value) < 1e30 else None,
        "loss": loss if math.isfinite(loss) else None,
        "seconds": round(seconds, 2),
    }


def run_all(trials: Iterable[Trial], path: Path, workers: int = 2) -> list[dict[str, Any]]:
    """Run what `path` does not have yet, a line of JSON each, and return all that was asked for."""
    os.environ["OMP_NUM_THREADS"] = "1"
    wanted = list(dict.fromkeys(trials))
    known = {_key(row): row for row in read(path)}
    missing = [trial for trial in wanted if _key(asdict(trial)) not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    context = get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)
    with pool, path.open("a") as file:
        waiting = {pool.submit(_safely, trial): trial for trial in missing}
        for number, done in enumerate(as_completed(waiting), 1):
            row = done.result()
            known[_key(row)] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            shown = "failed" if row["value"] is None else f"{row['value']:.3f}"
            print(
                f"[{number}/{len(missing)}] {row['task']}, {row['optimizer']}, {row['rate']:g}, "
                f"{row['schedule']}, {row['options']}: {shown} ({row['seconds']:.0f} s)",
                flush=True,
            )
    return [known[_key(asdict(trial))] for trial in wanted]


def _end_with_parent() -> None:
    """Let a worker end when whoever started it is gone, also if that was killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _safely(trial: Trial) -> dict[str, Any]:
    """A run that raises counts as failed, and says why."""
    try:
        return train(trial)
    except (RuntimeError, ValueError) as error:
        return {**asdict(trial), "value": None, "loss": None, "seconds": 0.0, "error": str(error)}


def read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("task", "optimizer", "rate", "seed", "schedule", "options"))
