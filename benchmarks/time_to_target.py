"""Seconds and steps to a fixed test accuracy (or loss), each optimizer with its own tuned schedule.

    python benchmarks/time_to_target.py [--tasks cifar10] [--seeds 3]

Settings are what `benchmarks/tune.py` chose on other seeds and on training samples kept apart. Optimizers
take turns within each seed, evaluation is not timed, and a run that misses the target counts as
infinitely slow. Runs that are done are kept, so an interrupted table resumes where it was.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from _common import RESULTS, machine_line, table, write_json
from _tasks import OPTIMIZERS, TABLE, TASKS
from _trials import Trial, run
from tune import chosen

NAME = "time_to_target"
LABELS = {
    "sgd": "SGD + Nesterov",
    "adamw": "AdamW",
    "muon": "Muon + AdamW",
    "soap": "SOAP",
    "kfac": "K-FAC",
}
#: What savings are compared with.
BASE = "sgd"


def trial(task: str, optimizer: str, seed: int) -> Trial:
    found = chosen(task, optimizer)
    changes = TASKS[task].changes(optimizer, found["lr"])
    return Trial(task, optimizer, found["steps"], seed, changes)


def measure(
    tasks: list[str], names: list[str], seeds: int, data_dir: str | None
) -> list[dict[str, Any]]:
    """All runs, in turns; what was measured before with the same settings is kept."""
    partial = RESULTS / f"{NAME}.partial.json"
    runs: list[dict[str, Any]] = json.loads(partial.read_text()) if partial.exists() else []
    for task in tasks:
        for seed in range(seeds):
            for name in names[seed % len(names) :] + names[: seed % len(names)]:
                one = trial(task, name, seed)
                if any(_same(done, one) for done in runs):
                    continue
                runs.append(run(one, data_dir=data_dir))
                partial.write_text(json.dumps(runs))
                print(f"{task:14} {name:6} seed {seed}: {_describe(runs[-1])}", flush=True)
    return runs


def _same(done: dict[str, Any], one: Trial) -> bool:
    wanted = (one.task, one.optimizer, one.steps, one.seed, dict(one.changes))
    return tuple(done[k] for k in ("task", "optimizer", "steps", "seed", "changes")) == wanted


def _describe(one: dict[str, Any]) -> str:
    end = one["loss"] if one["task"] == "text" else one["accuracy"]
    reached = one["reached"]
    when = f"reached at step {reached['step']}, {reached['seconds']:.1f} s" if reached else "missed"
    return f"{when}; ended at {end if end is None else round(end, 4)} after {one['seconds']:.1f} s"


def summarise(runs: list[dict[str, Any]], tasks: list[str], names: list[str]) -> dict[str, Any]:
    """Medians over seeds; a miss is infinite."""
    found: dict[str, Any] = {}
    for task in tasks:
        recipe = Trial(task, BASE, 1, 0).recipe()
        loss = recipe.train.target is None
        found[task] = {
            "target": recipe.train.target_loss if loss else recipe.train.target,
            "rows": {},
        }
        for name in names:
            mine = [r for r in runs if (r["task"], r["optimizer"]) == (task, name)]
            found[task]["rows"][name] = _row(
                mine, "loss" if loss else "accuracy", found[task]["target"]
            )
        base = found[task]["rows"][BASE]
        for row in found[task]["rows"].values():
            for key in ("steps", "seconds"):
                row[f"{key}_saved"] = 1 - row[key] / base[key] if base[key] < math.inf else None
    return found


def first_hit(run: dict[str, Any], metric: str, target: float) -> dict[str, float] | None:
    """Step and seconds of the first evaluation at the target."""
    for step, seconds, accuracy, loss in run["curve"]:
        if loss <= target if metric == "loss" else accuracy >= target:
            return {"step": step, "seconds": seconds}
    return None


def _row(runs: list[dict[str, Any]], metric: str, target: float) -> dict[str, Any]:
    hits = [first_hit(r, metric, target) for r in runs]
    seconds = [hit["seconds"] if hit else math.inf for hit in hits]
    ends = [r[metric] for r in runs if r[metric] is not None]
    return {
        "settings": {"steps": runs[0]["steps"], **runs[0]["changes"]},
        "reached": sum(hit is not None for hit in hits),
        "runs": len(runs),
        "steps": statistics.median(hit["step"] if hit else math.inf for hit in hits),
        "seconds": statistics.median(seconds),
        "seconds_range": [min(seconds), max(seconds)],
        "final": statistics.mean(ends) if ends else None,
        "ms_per_step": 1e3 * statistics.median(r["seconds"] / r["steps"] for r in runs),
        "phases": _phases(runs),
    }


def _phases(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Share of the time of all runs."""
    names = dict.fromkeys(name for r in runs for name in r["phases"])
    sums = {name: sum(r["phases"].get(name, 0.0) for r in runs) for name in names}
    total = sum(sums.values()) or 1.0
    return {name: round(value / total, 4) for name, value in sums.items()}


def show(found: dict[str, Any]) -> None:
    for task, content in found.items():
        print(f"\n{task}: target {content['target']}")
        rows = [_cells(LABELS[name], row) for name, row in content["rows"].items()]
        heads = ("", "reached", "steps", "", "seconds", "", "range", "ms/step", "final")
        print(table(heads, rows))


def _cells(label: str, row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["seconds_range"]
    hit = row["steps"] < math.inf
    final = "-" if row["final"] is None else f"{row['final']:.3f}"
    return (
        label,
        f"{row['reached']}/{row['runs']}",
        f"{row['steps']:.0f}" if hit else "never",
        _saved(row["steps_saved"]) if hit else "",
        f"{row['seconds']:.1f}" if hit else "never",
        _saved(row["seconds_saved"]) if hit else "",
        f"{low:.0f}-{high:.0f}",
        f"{row['ms_per_step']:.0f}",
        final,
    )


def _saved(share: float | None) -> str:
    return "" if share is None else f"{-share:+.0%}"


def plot(runs: list[dict[str, Any]], found: dict[str, Any], path: Path) -> None:
    """One row of two pictures for each task: over steps and over seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {
        "sgd": "#8a8a8a",
        "adamw": "#4477aa",
        "muon": "#228833",
        "soap": "#ccbb44",
        "kfac": "#c0392b",
    }
    tasks = list(found)
    figure, axes = plt.subplots(
        len(tasks), 2, figsize=(9, 3.1 * len(tasks)), squeeze=False, layout="constrained"
    )
    for row, task in zip(axes, tasks, strict=True):
        for one in (r for r in runs if r["task"] == task):
            accuracy = task != "text"
            points = [(s, t, a if accuracy else loss) for s, t, a, loss in one["curve"]]
            label = LABELS[one["optimizer"]] if one["seed"] == 0 else None
            style = {"color": colours[one["optimizer"]], "lw": 1.1, "alpha": 0.8}
            row[0].plot([p[0] for p in points], [p[2] for p in points], label=label, **style)
            row[1].plot([p[1] for p in points], [p[2] for p in points], **style)
        for axis, unit in zip(row, ("steps", "seconds of training"), strict=True):
            axis.axhline(found[task]["target"], color="black", lw=0.8, ls=":")
            axis.set(xlabel=unit, title=task if unit == "steps" else "")
            target = found[task]["target"]
            if target < 1:
                axis.set_ylim(target - 0.2, target + 0.06)
            else:
                axis.set_ylim(target - 0.15, target + 0.9)
            axis.grid(alpha=0.25)
        row[0].set_ylabel("test accuracy" if found[task]["target"] < 1 else "test loss")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TABLE))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir")
    arguments = parser.parse_args()
    tasks, names = arguments.tasks.split(","), arguments.optimizers.split(",")
    print(machine_line())
    runs = measure(tasks, names, arguments.seeds, arguments.data_dir)
    wanted = {(t, n, s) for t in tasks for n in names for s in range(arguments.seeds)}
    runs = [r for r in runs if (r["task"], r["optimizer"], r["seed"]) in wanted]
    runs = [r for r in runs if _same(r, trial(r["task"], r["optimizer"], r["seed"]))]
    found = summarise(runs, tasks, names)
    show(found)
    write_json(NAME, {"tasks": found, "runs": runs})
    plot(runs, found, RESULTS / f"{NAME}.png")
    (RESULTS / f"{NAME}.partial.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
