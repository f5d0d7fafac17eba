"""Every method of the family in one table: quality, steps, seconds, overhead, memory and bytes.

    python benchmarks/family.py [search] [train] [cost] [table] [--methods eva,mkor] [--tasks text]

All optimizers have the same number of steps on each task and the same small search: three learning
rates, a third of, equal to and three times that of the line to start with (`Method.line`; the recipe's
own table for SGD, AdamW, Muon and SOAP), on training samples kept apart, with a seed that `train` does
not use. `cost` times a plain, a factor and a refresh step of each method, interleaved with SGD's, and
adds them up by the method's own intervals. A method whose runs would take more than five minutes of
processor time on a task is not trained there (others take at most two); the table shows what its
step costs. Whatever is done is kept in `results/family.jsonl`.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import RESULTS, interleave, machine_line, table
from _models import WORKLOADS
from _trials import Trial, run
from torch import nn
from traffic import fake_world, keep_gradients

from kronfac.train.recipe import files as recipe_files
from kronfac.train.recipe.options import method_name, methods, starting_line

PATH = RESULTS / "family.jsonl"
PICTURE = RESULTS / "family.png"
#: Steps of each task, whoever trains it.
STEPS = {"digits": 80, "cifar10": 80, "text": 80}
#: Test accuracy, or loss of text, that steps and seconds are counted to.
TARGETS = {"digits": 0.96, "cifar10": 0.45, "text": 2.5}
OTHERS = ("sgd", "adamw", "muon", "soap")
NAMES = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon", "soap": "SOAP", "kfac": "K-FAC"}
TUNING_SEED = 100
#: Most seconds of processor time of a run, and the steps by which that is estimated.
LONGEST, PROBE = 300.0, 4
#: What is not run, and why.
SKIPPED = {("text", "dualgaussnewton"): "out of memory"}  # 256 outputs a token: 18 GB and more
#: Ranks of the world in which bytes are counted.
RANKS = 8
#: What the papers promise, beside what is measured.
CLAIMS = {
    "eva": "≤ +15 %",
    "mkor": "≤ +15 %",
    "adafisher": "≤ +15 %",
    "ekfac": "≤ +25 % over K-FAC",
    "singd": "no decomposition",
    "jorge": "no decomposition",
}

Row = dict[str, Any]


def everyone() -> list[str]:
    return [*OTHERS, *methods()]


def title(name: str) -> str:
    return NAMES.get(name) or method_name(name) or name


# --- quality -------------------------------------------------------------------------------------


def options_of(task: str, name: str) -> dict[str, Any]:
    """What an optimizer starts with on a task."""
    if name in OTHERS:
        return dict(recipe_files.load(task).part_of(name).options)
    return starting_line(name)


def trial(task: str, name: str, rate: float, seed: int) -> Trial:
    options = {**options_of(task, name), "lr": rate}
    return Trial(task, name, STEPS[task], seed, tuple(options.items()), alone=True)


def rates(task: str, name: str) -> list[float]:
    middle = options_of(task, name)["lr"]
    return [float(f"{middle * factor:.3g}") for factor in (1 / 3, 1, 3)]


def search(names: Iterable[str], tasks: Iterable[str], rows: list[Row]) -> None:
    """Three rates each, on samples kept apart."""
    for task in tasks:
        for name in names:
            if name not in OTHERS and is_too_slow(task, name, rows):
                continue
            for rate in rates(task, name):
                key = {"stage": "search", "task": task, "optimizer": name, "rate": rate}
                if not any(key.items() <= row.items() for row in rows):
                    keep(rows, key | trained(trial(task, name, rate, TUNING_SEED), holdout=True))


def is_too_slow(task: str, name: str, rows: list[Row]) -> bool:
    """Whether a run would take too long, estimated once from a short one."""
    if (task, name) in SKIPPED:
        return True
    key = {"stage": "probe", "task": task, "optimizer": name}
    found = next((row for row in rows if key.items() <= row.items()), None)
    if found is None:
        short = replace(trial(task, name, rates(task, name)[1], TUNING_SEED), steps=PROBE)
        started = time.process_time()
        trained(short, holdout=True)
        found = key | {"cpu_ms": round(1e3 * (time.process_time() - started) / PROBE, 1)}
        keep(rows, found)
    return float(found["cpu_ms"]) * STEPS[task] > 1e3 * LONGEST


def chosen(task: str, name: str, rows: list[Row]) -> float | None:
    """The rate that was best in the search."""
    key = {"stage": "search", "task": task, "optimizer": name}
    found = [row for row in rows if key.items() <= row.items() and row["final"] is not None]
    if not found:
        return None
    sign = -1 if task == "text" else 1
    return float(max(found, key=lambda row: sign * row["final"])["rate"])


def train(names: Iterable[str], tasks: Iterable[str], rows: list[Row], seeds: int) -> None:
    """The best rate of each, on the test set."""
    for seed in range(seeds):
        for task in tasks:
            for name in names:
                rate = chosen(task, name, rows)
                key = {"stage": "train", "task": task, "optimizer": name, "seed": seed}
                if rate is not None and not any(key.items() <= row.items() for row in rows):
                    keep(rows, key | {"rate": rate} | trained(trial(task, name, rate, seed)))


def trained(one: Trial, holdout: bool = False) -> Row:
    """Final quality, and where the target was met."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = run(one, data_dir=None, holdout=holdout, only_end=holdout)
        except (RuntimeError, ValueError) as error:
            return {"final": None, "error": str(error).splitlines()[0]}
    final = found["loss" if one.task == "text" else "accuracy"]
    step, seconds = first_hit(one.task, found["curve"])
    return {
        "final": final if final is None or math.isfinite(final) else None,
        "steps": step,
        "seconds": seconds,
        "ms": round(1e3 * found["seconds"] / one.steps, 1),
    }


def first_hit(task: str, curve: list[Any]) -> tuple[int | None, float | None]:
    """Step and seconds of the first evaluation at the target."""
    for step, seconds, accuracy, loss in curve:
        if loss <= TARGETS[task] if task == "text" else accuracy >= TARGETS[task]:
            return step, seconds
    return None, None


# --- cost ----------------------------------------------------------------------------------------


def stepper(workload: str, name: str, factor: int | None = None, refresh: int | None = None) -> Any:
    """One training step, and the optimizer."""
    model, (inputs, targets), loss_of = WORKLOADS[workload]()
    optimizer = build(name, model, workload, factor, refresh)

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(inputs)
        if getattr(optimizer, "needs_observe", False):
            optimizer.observe(outputs)
        loss_of(outputs, targets).backward()
        optimizer.step()

    return step, optimizer


def build(
    name: str, model: nn.Module, workload: str, factor: int | None, refresh: int | None
) -> Any:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    line = {key: value for key, value in starting_line(name).items() if key != "lr"}
    line |= {} if factor is None else {"factor_every": factor, "refresh_every": refresh}
    line |= {"early_refresh": False}
    line |= {"loss_average": "token"} if workload == "transformer" else {}
    base = torch.optim.SGD(model.parameters(), lr=1e-4)
    return methods()[name](model, base, **line)


NEVER = 10**9
KINDS = {"busy": (1, 1), "factor": (1, NEVER), "plain": (NEVER, NEVER)}


def cost(names: Iterable[str], rows: list[Row], repeats: int) -> None:
    for workload in ("resnet20", "transformer"):
        for name in names:
            key = {"stage": "cost", "workload": workload, "optimizer": name}
            if name in ("muon", "soap", "sgd") or any(key.items() <= row.items() for row in rows):
                continue  # benchmarks/overhead.py has the others
            keep(rows, key | measured(workload, name, repeats))


def measured(workload: str, name: str, repeats: int) -> Row:
    """Overhead of a mean step over SGD's at the method's own intervals, state, and bytes."""
    calls: dict[str, Callable[[], None]] = {"sgd": stepper(workload, "sgd")[0]}
    if name == "adamw":
        calls["plain"], optimizer = stepper(workload, name)
    else:
        for kind, intervals in KINDS.items():
            calls[kind], optimizer = stepper(workload, name, *intervals)
    timings = interleave(calls, rounds=repeats, warmup=2)
    over = {one: timing.ratio(timings["sgd"]).median - 1 for one, timing in timings.items()}
    row: Row = {"over": {one: round(value, 4) for one, value in over.items()}}
    row |= {"sgd_ms": round(1e3 * timings["sgd"].spread.median, 2), "state": state_bytes(optimizer)}
    if name == "adamw":
        return row | {"overhead": row["over"]["plain"]}
    defaults = methods()[name].method.defaults  # type: ignore[attr-defined]
    factor_every, refresh_every = defaults.factor_every, defaults.refresh_every
    plain, factor, busy = (over[one] for one in ("plain", "factor", "busy"))
    mean = plain + (factor - plain) / factor_every + (busy - factor) / refresh_every
    row |= {"overhead": round(mean, 4), "intervals": f"{factor_every}/{refresh_every}"}
    return row | {"sent": sent_bytes(workload, name)}


def state_bytes(optimizer: Any) -> int:
    """Bytes of all tensors of the state."""
    entries = optimizer.state_dict()["state"].values()
    tensors = [v for entry in entries for v in entry.values() if isinstance(v, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sent_bytes(workload: str, name: str) -> float | None:
    """Bytes that the first of eight ranks sends at a mean step under comm-opt."""
    with fake_world(RANKS, 0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, (inputs, targets), loss_of = WORKLOADS[workload](batch_size=4)
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, keep_gradients)
        defaults = methods()[name].method.defaults  # type: ignore[attr-defined]
        base = torch.optim.SGD(model.parameters(), lr=1e-6)
        optimizer = methods()[name](
            ddp, base, factor_every=1, refresh_every=2, early_refresh=False, distribute="comm-opt"
        )
        sent = []
        try:
            for _ in range(3):
                optimizer.zero_grad()
                outputs = ddp(inputs)
                if optimizer.needs_observe:
                    optimizer.observe(outputs)
                loss_of(outputs, targets).backward()
                optimizer.step()
                total = optimizer.stats()["sent"]
                sent.append(sum(total[phase] for phase in ("reduce", "share", "spread")))
        except RuntimeError:  # numbers that nobody sent need not have a solution
            return None
        finally:
            optimizer.detach()
    factor, refresh = sent[1] - sent[0], sent[2] - sent[1]
    return factor / defaults.factor_every + (refresh - factor) / defaults.refresh_every


# --- tables --------------------------------------------------------------------------------------


def show(rows: list[Row]) -> None:
    names = [name for name in everyone() if any(row.get("optimizer") == name for row in rows)]
    for task in STEPS:
        print(f"\n{task}: {STEPS[task]} steps, target {TARGETS[task]}")
        cells = [quality_cells(task, name, rows) for name in names]
        print(table(["", "rate", "final", "steps", "seconds", "ms/step"], cells))
    for workload in ("resnet20", "transformer"):
        print(
            f"\n{workload}: over SGD at each method's own intervals; state; sent by one of 8 ranks"
        )
        cells = [found for name in names if (found := cost_cells(workload, name, rows))]
        print(table(["", "intervals", "over SGD", "state", "sent/step", "claim"], cells))


def quality_cells(task: str, name: str, rows: list[Row]) -> list[str]:
    key = {"stage": "train", "task": task, "optimizer": name}
    found = [row for row in rows if key.items() <= row.items()]
    if (task, name) in SKIPPED:
        return [title(name), "-", SKIPPED[task, name], "-", "-", "-"]
    if not found:
        probe = next((r for r in rows if (key | {"stage": "probe"}).items() <= r.items()), None)
        slow = probe is not None and probe["cpu_ms"] * STEPS[task] > 1e3 * LONGEST
        ms = f"{probe['cpu_ms']:.0f}" if probe is not None and slow else "-"
        return [title(name), "-", "too slow" if slow else "-", "-", "-", ms]
    finals = [row["final"] for row in found if row["final"] is not None]
    final = statistics.median(finals) if finals else None
    shown = "failed" if final is None else f"{final:.3f}" if task == "text" else f"{final:.1%}"
    steps = statistics.median(row.get("steps") or math.inf for row in found)
    seconds = statistics.median(row.get("seconds") or math.inf for row in found)
    hit = math.isfinite(steps)
    ms = statistics.median(row.get("ms", math.nan) for row in found)
    return [
        title(name),
        f"{found[0]['rate']:g}",
        shown,
        f"{steps:.0f}" if hit else "never",
        f"{seconds:.1f}" if hit else "never",
        f"{ms:.0f}",
    ]


def cost_cells(workload: str, name: str, rows: list[Row]) -> list[str] | None:
    key = {"stage": "cost", "workload": workload, "optimizer": name}
    found = next((row for row in rows if key.items() <= row.items()), None)
    if found is None:
        return None
    sent = found.get("sent")
    return [
        title(name),
        found.get("intervals", ""),
        f"{found['overhead']:+.1%}",
        f"{found['state'] / 1e6:.2f} MB",
        "" if sent is None else f"{sent / 1e3:.1f} kB",
        CLAIMS.get(name, ""),
    ]


def draw(rows: list[Row], path: Path) -> None:
    """Quality against milliseconds of a step, and state against them, as Pareto pictures."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(15, 4), layout="constrained")
    for axis, task in zip(axes, STEPS, strict=False):
        points = []
        for name in everyone():
            cells = quality_cells(task, name, rows)
            if cells[2].rstrip("%").replace(".", "").isdigit():
                value = float(cells[2].rstrip("%"))
                points.append((float(cells[5]) * STEPS[task] / 1e3, value, title(name)))
        scatter(axis, points, "seconds of training", task)
        if task == "text":
            axis.invert_yaxis()
    found = {r["optimizer"]: r for r in rows if r.get("workload") == "transformer"}
    points = [(100 * r["overhead"], r["state"] / 1e6, title(n)) for n, r in found.items()]
    scatter(axes[3], points, "% over SGD", "transformer: MB of state")
    figure.savefig(path, dpi=110)


def scatter(axis: Any, points: list[tuple[float, float, str]], xlabel: str, what: str) -> None:
    for x, y, name in points:
        axis.scatter(x, y, s=18, color="#cc380d" if name == "K-FAC" else "#194e80")
        axis.annotate(name, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=7)
    axis.set(xlabel=xlabel, title=what, xscale="log")
    axis.grid(alpha=0.25)


# --- keeping -------------------------------------------------------------------------------------


def keep(rows: list[Row], row: Row) -> None:
    rows.append(row)
    with PATH.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(time.strftime("%H:%M:%S"), row, flush=True)


def read() -> list[Row]:
    return [json.loads(line) for line in PATH.read_text().splitlines()] if PATH.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", help="search, train, cost, table (default: all)")
    parser.add_argument("--methods", help="some of them (default: all)")
    parser.add_argument("--tasks", help="some of them (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7, help="rounds of timing")
    arguments = parser.parse_args()
    stages = arguments.stages or ["search", "train", "cost", "table"]
    names = arguments.methods.split(",") if arguments.methods else everyone()
    tasks = arguments.tasks.split(",") if arguments.tasks else list(STEPS)
    rows = read()
    if "search" in stages:
        search(names, tasks, rows)
    if "train" in stages:
        train(names, tasks, rows, arguments.seeds)
    if "cost" in stages:
        cost(names, rows, arguments.repeats)
    if "table" in stages:
        print(machine_line())
        show(rows)
        draw(rows, PICTURE)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
