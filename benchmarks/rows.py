"""What statistics of some rows cost, and what training makes of them.

    python benchmarks/rows.py [time] [quality] [--rounds 5] [--seeds 2]

`time`: seconds of observing both sides of all layers at a factor step, in turns, one thread: ResNet-20
at batch 128 and the transformer of `_models.py` at batch 256, in multiples of what all rows cost.
`quality`: K-FAC's default line at rate 0.1 on those tasks of the suite that defaults are chosen on and
whose layers have more than 4,096 rows; the number is what the suite judges by. Runs that are in
`results/rows.jsonl` are not repeated.
"""

import argparse
import itertools
import json
import statistics
from typing import Any

import torch
from _common import RESULTS, Spread, machine_line, table, write_json
from _models import WORKLOADS
from suite.running import Trial, run_all
from suite.tasks import TASKS
from torch.optim import SGD

import kronfac

ROWS: dict[str, Any] = {"all": None, "16,384": 16384, "auto": "auto"}
BATCHES = {"resnet20": 128, "transformer": 256}
QUALITY = ("Fashion-MNIST CNN", "CIFAR-10 ResNet-8")


def observing(name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of the hooks in each round, by option; the first step, which sees all rows, is left out."""
    made = {}
    for label, rows in ROWS.items():
        model, (inputs, targets), loss = WORKLOADS[name](batch_size=BATCHES[name])
        base = SGD(model.parameters(), lr=0.0)
        optimizer = kronfac.KFAC(model, base, factor_every=1, refresh_every=10_000, rows=rows)
        made[label] = (model, inputs, targets, loss, optimizer)
    seconds: dict[str, list[float]] = {label: [] for label in ROWS}
    for turn in range(rounds + 2):
        for label, (model, inputs, targets, loss, optimizer) in made.items():
            optimizer.zero_grad()
            with optimizer.timed() as phases:
                loss(model(inputs), targets).backward()
            optimizer.step()
            if turn >= 2:
                seconds[label].append(sum(v for k, v in phases.items() if k.startswith("observe")))
    return seconds


def show_times(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in BATCHES:
        seconds = observing(name, rounds)
        found[name] = {label: statistics.median(values) for label, values in seconds.items()}
        rows = []
        for label, values in seconds.items():
            pairs = zip(values, seconds["all"], strict=True)
            ratio = Spread.of([mine / whole for mine, whole in pairs])
            rows.append([label, f"{1000 * Spread.of(values).median:.1f}", f"{ratio:.2f}"])
        print(f"\n{name}, batch {BATCHES[name]}")
        print(table(["rows", "ms observing", "of all rows"], rows))
    return found


def show_quality(seeds: int) -> dict[str, Any]:
    def trial(task: str, label: str, seed: int) -> Trial:
        return Trial(task, "K-FAC", 0.1, seed, options=json.dumps({"rows": ROWS[label]}))

    wanted = [trial(*one) for one in itertools.product(QUALITY, ROWS, range(seeds))]
    runs = iter(run_all(wanted, RESULTS / "rows.jsonl", workers=1))
    found: dict[str, Any] = {}
    for name in QUALITY:
        found[name], rows = {}, []
        for label in ROWS:
            own = [next(runs) for _ in range(seeds)]
            values = [run["value"] for run in own]
            found[name][label] = values
            loss = statistics.mean(run["loss"] for run in own)
            shown = " ".join(f"{value:.2f}" for value in values)
            rows.append([label, shown, f"{statistics.mean(values):.2f}", f"{loss:.4f}"])
        print(f"\n{name}: {TASKS[name].measure}")
        print(table(["rows", "by seed", "mean", "training loss"], rows))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["time", "quality"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    print(machine_line())
    results: dict[str, Any] = {}
    if "time" in arguments.what:
        results["seconds"] = show_times(arguments.rounds)
    if "quality" in arguments.what:
        results["quality"] = show_quality(arguments.seeds)
    write_json("rows", results)


if __name__ == "__main__":
    main()
