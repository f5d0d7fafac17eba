"""Every method of the family in one table: quality, steps, seconds, overhead, memory and bytes.

    python benchmarks/family.py [lines] [search] [train] [cost] [table] [--methods eva] [--tasks text]
    python benchmarks/family.py table --write    # into docs/methods.md, with its picture

`lines` compares what the defaults of some methods were chosen among.

All optimizers have the same number of steps on each task and the same small search on training samples
kept apart, with seeds that `train` does not use: three learning rates, a third of, equal to and three
times that of the line to start with (`Method.line`; the recipe's own table for SGD, AdamW, Muon and
SOAP), and as long as the best is the first or the last, the next one by a factor of three, at most two
of them. `cost` times a plain, a factor and a refresh step of each method, in turns with SGD's, on an
idle machine; seconds of training are the steps of each kind times that, since training itself may run
beside other work. A method whose runs would take more than five minutes of processor time on a task is
not trained there; the table shows what its step costs. Whatever is done is kept in
`results/family.jsonl`, and a row counts as long as the optimizer's settings are those it was made with.
"""

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from _common import machine_line
from _family import (
    LONGEST,
    OTHERS,
    SKIPPED,
    STEPS,
    TARGETS,
    Row,
    everyone,
    find,
    keep,
    kind_of,
    options_of,
    read,
    setting,
    valid,
)
from _family_lines import compare_lines
from _trials import Trial, run

#: Seeds of the search, whose mean counts; of digits more, as it is small and they differ.
TUNING_SEEDS = {"digits": (100, 101, 102), "cifar10": (100,), "text": (100,)}
#: Further rates at an end of the three.
MORE = 2
#: Epochs between evaluations: every fifth step of digits, every tenth of the others.
EVALUATE_EVERY = {"digits": 0.25, "cifar10": 0.125, "text": 0.01136}
#: Steps by which the time of a run is estimated.
PROBE = 4


def trial(task: str, name: str, rate: float, seed: int) -> Trial:
    options = {**options_of(task, name), "lr": rate}
    return Trial(task, kind_of(name), STEPS[task], seed, tuple(options.items()), alone=True)


def rate_at(task: str, name: str, place: int) -> float:
    """The starting rate times a power of three."""
    return float(f"{options_of(task, name)['lr'] * 3.0**place:.3g}")


def search(names: Iterable[str], tasks: Iterable[str], rows: list[Row]) -> None:
    """Three rates each, and more at the end where the best one is, on samples kept apart."""
    for task in tasks:
        for name in names:
            if name not in OTHERS and is_too_slow(task, name, rows):
                continue
            places = [-1, 0, 1]
            for place in places:
                try_rate(task, name, rate_at(task, name, place), rows)
            for _ in range(MORE):
                best = chosen(task, name, rows)
                ends = {rate_at(task, name, end): end + step for end, step in ends_of(places)}
                if best not in ends:
                    break
                places.append(ends[best])
                try_rate(task, name, rate_at(task, name, places[-1]), rows)


def ends_of(places: list[int]) -> list[tuple[int, int]]:
    return [(min(places), -1), (max(places), 1)]


def try_rate(task: str, name: str, rate: float, rows: list[Row]) -> None:
    for seed in TUNING_SEEDS[task]:
        key = {"stage": "search", "task": task, "optimizer": name, "rate": rate, "seed": seed}
        key |= {"setting": setting(task, name)}
        if not find(rows, **key):
            keep(rows, key | trained(task, trial(task, name, rate, seed), holdout=True))


def is_too_slow(task: str, name: str, rows: list[Row]) -> bool:
    """Whether a run would take too long, estimated once from a short one."""
    if (task, name) in SKIPPED:
        return True
    key = {"stage": "probe", "task": task, "optimizer": name, "setting": setting(task, name)}
    if not find(rows, **key):
        short = replace(trial(task, name, rate_at(task, name, 0), 100), steps=PROBE)
        started = time.process_time()
        trained(task, short, holdout=True)
        spent = time.process_time() - started
        keep(rows, key | {"cpu_ms": round(1e3 * spent / PROBE, 1)})
    return float(find(rows, **key)[0]["cpu_ms"]) * STEPS[task] > 1e3 * LONGEST


def chosen(task: str, name: str, rows: list[Row]) -> float | None:
    """The rate that was best in the search."""
    key = {"stage": "search", "task": task, "optimizer": name, "setting": setting(task, name)}
    found: dict[float, list[float]] = {}
    for row in find(rows, **key):
        worst = math.inf if task == "text" else 0.0
        found.setdefault(row["rate"], []).append(worst if row["final"] is None else row["final"])
    if not found:
        return None
    sign = -1 if task == "text" else 1
    return max(found, key=lambda rate: sign * statistics.mean(found[rate]))


def train(names: Iterable[str], tasks: Iterable[str], rows: list[Row], seeds: int) -> None:
    """The best rate of each, on the test set."""
    for seed in range(seeds):
        for task in tasks:
            for name in names:
                rate = chosen(task, name, rows)
                key = {"stage": "train", "task": task, "optimizer": name, "seed": seed}
                key |= {"setting": setting(task, name), "rate": rate}
                if rate is not None and not find(rows, **key):
                    keep(rows, key | trained(task, trial(task, name, rate, seed)))


def trained(task: str, one: Trial, holdout: bool = False) -> Row:
    """Final quality, and the step at which the target was met."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            every = EVALUATE_EVERY[task]
            found = run(one, data_dir=None, holdout=holdout, only_end=holdout, evaluate_every=every)
        except (RuntimeError, ValueError) as error:
            return {"final": None, "error": str(error).splitlines()[0]}
    final = found["loss" if task == "text" else "accuracy"]
    row: Row = {"final": final if final is None or math.isfinite(final) else None}
    return row if holdout else row | {"steps": first_hit(task, found["curve"])}


def first_hit(task: str, curve: list[Any]) -> int | None:
    """The step of the first evaluation at the target."""
    for step, _, accuracy, loss in curve:
        if loss <= TARGETS[task] if task == "text" else accuracy >= TARGETS[task]:
            return int(step)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "stages", nargs="*", help="lines, search, train, cost, table (default: all)"
    )
    parser.add_argument("--methods", help="some of them (default: all)")
    parser.add_argument("--tasks", help="some of them (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of timing")
    parser.add_argument(
        "--write", action="store_true", help="put tables and picture into docs/methods.md"
    )
    arguments = parser.parse_args()
    stages = arguments.stages or ["lines", "search", "train", "cost", "table"]
    names = arguments.methods.split(",") if arguments.methods else everyone()
    tasks = arguments.tasks.split(",") if arguments.tasks else list(STEPS)
    rows = read()
    if "lines" in stages:
        compare_lines(names, rows, trained)
    if "search" in stages:
        search(names, tasks, rows)
    if "train" in stages:
        train(names, tasks, rows, arguments.seeds)
    if "cost" in stages:
        from _family_cost import cost

        cost(names, tasks, rows, arguments.repeats)
    if "table" in stages:
        from _family_tables import PAGE, draw, fill, tables

        print(machine_line(), *tables(valid(rows)), sep="\n\n")
        if arguments.write:
            PAGE.write_text(fill(PAGE.read_text(), valid(rows)))
            draw(valid(rows))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
