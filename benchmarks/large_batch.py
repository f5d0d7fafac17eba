"""Steps to a target against the size of the batch, for SGD and K-FAC, each tuned at every size.

    python benchmarks/large_batch.py [--workers 2]

Larger batches give better gradients, and a good optimizer turns them into fewer steps. For each batch
size and optimizer every learning rate of the grid is tried with longer and longer schedules, until the
mean over seeds reaches the target on the test set. Data are the embedded digits, 1,297 for training; the
largest batch holds four fifths of them. Where steps are to be few, K-FAC takes statistics and renews its
solutions at every one.
"""

import argparse
import json
import os
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from _common import RESULTS, machine_line, table, write_json
from _trials import Trial, run

NAME = "large_batch"
TASK = "digits"
TARGET = 0.98
BATCHES = (32, 64, 128, 256, 512, 1024)
RATES = {
    "sgd": (0.05, 0.1, 0.2, 0.4, 0.8),
    "kfac": (0.1, 0.2, 0.4, 0.8, 1.6),
}
#: Steps of a schedule: all up to 12, then an eighth more each time.
LENGTHS = (
    *range(4, 13),
    14,
    16,
    18,
    20,
    22,
    25,
    28,
    32,
    36,
    40,
    45,
    51,
    57,
    64,
    72,
    81,
    91,
    102,
    114,
)
LENGTHS += (128, 144, 161, 181, 203, 228, 256, 287, 323, 362, 406)
SEEDS = (0, 1, 2)
#: A seed that misses the target by so much speaks for the others.
FAR = 0.03
EVERY_STEP = (("factor_every", 1), ("refresh_every", 1))


class Search:
    """Fewest steps at which a learning rate reaches the target, and all that was tried for it."""

    def __init__(self, optimizer: str, batch: int, rate: float) -> None:
        self.optimizer, self.batch = optimizer, batch
        self.changes: tuple[tuple[str, Any], ...] = (("lr", rate),)
        if optimizer == "kfac":
            self.changes += (("other_lr", rate), *EVERY_STEP)
        self.tried: dict[int, float] = {}

    def steps(self) -> int | None:
        """Twice as many until they are enough, then bisection below: a rate may be too high for more."""
        low = 0
        for high in _doubling():
            if self.reaches(LENGTHS[high]):
                break
            low = high + 1
        else:
            return None
        while low < high:
            middle = (low + high) // 2
            if self.reaches(LENGTHS[middle]):
                high = middle
            else:
                low = middle + 1
        return LENGTHS[high]

    def reaches(self, steps: int) -> bool:
        """Whether the mean over seeds does; a first seed that is far below is enough to know."""
        found: list[float] = []
        for seed in SEEDS:
            trial = Trial(TASK, self.optimizer, steps, seed, self.changes, self.batch)
            found.append(run(trial, data_dir=None, only_end=True)["accuracy"] or 0.0)
            if found[0] < TARGET - FAR:
                break
        self.tried[steps] = statistics.mean(found)
        return self.tried[steps] >= TARGET


def _doubling() -> list[int]:
    """Places of lengths that are at least twice the one before, and of the last."""
    found, before = [], 0
    for place, length in enumerate(LENGTHS):
        if length >= 2 * before or place == len(LENGTHS) - 1:
            found.append(place)
            before = length
    return found


def shortest(optimizer: str, batch: int, rate: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    search = Search(optimizer, batch, rate)
    steps = search.steps()
    return {
        "optimizer": optimizer,
        "batch": batch,
        "rate": rate,
        "steps": steps,
        "tried": search.tried,
    }


def measure(workers: int) -> list[dict[str, Any]]:
    partial = RESULTS / f"{NAME}.partial.json"
    done: list[dict[str, Any]] = json.loads(partial.read_text()) if partial.exists() else []
    known = {(one["optimizer"], one["batch"], one["rate"]) for one in done}
    wanted = [(n, b, r) for b in BATCHES for n, rates in RATES.items() for r in rates]
    with ProcessPoolExecutor(workers) as pool:
        for job in as_completed([pool.submit(shortest, *w) for w in wanted if w not in known]):
            done.append(job.result())
            partial.write_text(json.dumps(done))
            one = done[-1]
            print(
                f"{one['optimizer']:5} batch {one['batch']:5} lr {one['rate']:<5} {one['steps']}",
                flush=True,
            )
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    print(machine_line())
    done = measure(arguments.workers)
    best: dict[str, dict[int, Any]] = {}
    for name in RATES:
        for batch in BATCHES:
            mine = [o for o in done if (o["optimizer"], o["batch"]) == (name, batch) and o["steps"]]
            least = min((o["steps"] for o in mine), default=None)
            rates = [o["rate"] for o in mine if o["steps"] == least]
            best.setdefault(name, {})[batch] = {"steps": least, "rates": rates}
    print(f"\nDigits: steps to {TARGET:.0%} test accuracy, mean of {len(SEEDS)} seeds")
    rows = []
    for batch in BATCHES:
        sgd, kfac = (best[name][batch]["steps"] for name in ("sgd", "kfac"))
        ratio = f"{sgd / kfac:.1f}" if sgd and kfac else ""
        rows.append((batch, sgd or "never", kfac or "never", ratio))
    print(table(("batch", "SGD", "K-FAC", "ratio"), rows))
    write_json(NAME, {"target": TARGET, "seeds": SEEDS, "best": best, "search": done})
    plot(best)
    (RESULTS / f"{NAME}.partial.json").unlink(missing_ok=True)


def plot(best: dict[str, dict[int, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    for name, colour, label in (("sgd", "#8a8a8a", "SGD + Nesterov"), ("kfac", "#c0392b", "K-FAC")):
        points = [(b, v["steps"]) for b, v in best[name].items() if v["steps"]]
        axis.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
    first = best["sgd"][BATCHES[0]]["steps"]
    if first:
        ideal = [first * BATCHES[0] / b for b in BATCHES]
        axis.plot(
            BATCHES, ideal, ":", color="black", lw=0.8, label="half the steps for twice the batch"
        )
    axis.set(xscale="log", yscale="log", xlabel="batch", ylabel=f"steps to {TARGET:.0%}")
    axis.set_xticks(BATCHES, [str(b) for b in BATCHES])
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / f"{NAME}.png", dpi=130)


if __name__ == "__main__":
    main()
