"""Compress a trained recurrent net by Kronecker products, beside low rank and pruning of equal size.

    python benchmarks/kronecker.py [--seeds 2] [--threads 1]

An LSTM reads Fashion-MNIST row by row (28 steps of 28 numbers). Its two matrices become a sum of
Kronecker products (`kronfac.nn.compress`), a product of two thin matrices, or lose all but their largest
entries bit by bit; each then has as many parameters and is fine-tuned alike. Beside them: an LSTM of
fewer units and the Kronecker layer, both trained from scratch for as long as the others in all, and
fine-tuning with K-FAC. Learning rates are chosen on 10,000 training images that are held out; the
accuracy is that of the test set. Runs are kept while the table grows, so an interrupted one resumes.
"""

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import interleave, machine_line, read_json, table, write_json
from _compressed import (
    INPUTS,
    LowRank,
    Pruning,
    Reader,
    accuracy,
    copied,
    fit,
    parameters,
    smaller,
    stored,
)
from torch import Tensor, nn

from kronfac.nn import compress
from kronfac.train import data

HIDDEN, FACTORS = 128, (16, 30)
WHOLE_STEPS, STEPS, KFAC_STEPS, TUNING_STEPS = 2000, 2000, 600, 500
TUNED = {
    "Kronecker": (3e-3, 1e-2, 2e-2),
    "low rank": (3e-3, 1e-2, 2e-2),
    "pruned": (3e-3, 1e-2, 2e-2),
    "Kronecker, K-FAC": (0.1, 0.2),
}
KINDS = ("Kronecker", "low rank", "pruned", "fewer units")
#: With the first seed and the smallest size only.
ONCE = ("Kronecker, K-FAC", "Kronecker, from scratch")
Images = tuple[Tensor, Tensor]


def images() -> tuple[Images, Images, Images]:
    """For training, held out, and for the test."""
    source = data.load("fashion-mnist")
    x, y = source.train_batch(torch.arange(60_000))
    test, names = source.test_batch(torch.arange(10_000))
    x, test = x.squeeze(1), test.squeeze(1)
    return (x[:50_000], y[:50_000]), (x[50_000:], y[50_000:]), (test, names)


def whole(training: Images, seed: int) -> Reader:
    """The trained net, kept for runs that resume."""
    torch.manual_seed(seed)
    model = Reader(nn.LSTM(INPUTS, HIDDEN, batch_first=True))
    kept = Path(tempfile.gettempdir()) / f"kronfac-kronecker-{WHOLE_STEPS}-{seed}.pt"
    if kept.exists():
        model.load_state_dict(torch.load(kept))
        return model
    fit(model, *training, WHOLE_STEPS, 3e-3, seed=seed)
    torch.save(model.state_dict(), kept)
    return model


def small(
    kind: str, trained: Reader, factor: float, steps: int
) -> tuple[Reader, Callable[[], None]]:
    """A net of this kind before it is tuned, and what to do after each step."""
    kronecker = compress(trained, factor, exclude="head")
    assert isinstance(kronecker, Reader)
    budget = parameters(kronecker)
    if kind == "low rank":
        return copied(trained, LowRank(trained.cell, budget)), _nothing  # type: ignore[arg-type]
    if kind == "pruned":
        cell = copy.deepcopy(trained.cell)
        return copied(trained, cell), Pruning(cell, budget, steps)
    if kind == "fewer units":
        return Reader(smaller(budget)), _nothing
    if kind == "Kronecker, from scratch":
        for module in kronecker.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return kronecker, _nothing


def _nothing() -> None:
    """After a step of a net that stays as small as it is."""


def run(
    kind: str, trained: Reader, factor: float, rate: float, steps: int, training: Images, seed: int
) -> Reader:
    torch.manual_seed(seed + 1)
    model, after = small(kind, trained, factor, steps)
    fit(model, *training, steps, rate, after=after, kfac="K-FAC" in kind, seed=seed + 1)
    return model


def tune(runs: dict[str, Any], save: Callable[[], None]) -> dict[str, float]:
    """The best learning rate of each kind on what is held out, for the smallest size."""
    training, held, _ = images()
    chosen = {}
    for kind, rates in TUNED.items():
        reached = {}
        for rate in rates:
            key = f"tuning {kind} {rate}"
            steps = KFAC_STEPS // 3 if "K-FAC" in kind else TUNING_STEPS
            if key not in runs:
                model = run(kind, whole(training, 0), FACTORS[-1], rate, steps, training, 0)
                runs[key] = {"held_out": accuracy(model, *held)}
                print(key, runs[key], flush=True)
                save()
            reached[rate] = runs[key]["held_out"]
        chosen[kind] = max(reached, key=reached.__getitem__)
    chosen["fewer units"] = chosen["Kronecker, from scratch"] = chosen["Kronecker"]
    return chosen


def compare(
    runs: dict[str, Any], rates: dict[str, float], seed: int, save: Callable[[], None]
) -> None:
    """Every kind and size with one seed."""
    training, _, test = images()
    trained = whole(training, seed)
    if f"whole 1 {seed}" not in runs:
        row = {"parameters": parameters(trained), "bytes": stored(trained, "whole")}
        runs[f"whole 1 {seed}"] = row | {"accuracy": accuracy(trained, *test)}
        save()
    for factor in FACTORS:
        for kind in (*KINDS, *(ONCE if (factor, seed) == (FACTORS[-1], 0) else ())):
            key = f"{kind} {factor} {seed}"
            if key in runs:
                continue
            alone = kind in ("fewer units", "Kronecker, from scratch")
            steps = WHOLE_STEPS + STEPS if alone else STEPS
            steps = KFAC_STEPS if "K-FAC" in kind else steps
            model = run(kind, trained, factor, rates[kind], steps, training, seed)
            row = {"parameters": parameters(model), "bytes": stored(model, kind)}
            runs[key] = row | {"accuracy": accuracy(model, *test), "steps": steps}
            print(key, runs[key], flush=True)
            save()


def inference() -> list[dict[str, Any]]:
    """Milliseconds to read a sequence of 28, of a batch and of one sample, beside the dense layer."""
    found = []
    for hidden in (128, 512, 1024):
        layer = nn.LSTM(hidden, hidden, batch_first=True)
        kinds: dict[str, nn.Module] = {"dense": layer}
        kinds["Kronecker"] = compress(layer, 16)
        kinds["Kronecker, one term"] = compress(layer, 16, terms=1)
        kinds["low rank"] = LowRank(layer, 8 * hidden * hidden // 16)
        for batch in (1, 64):
            x = torch.randn(batch, 28, hidden)
            calls = {kind: (lambda one=one, x=x: one(x)) for kind, one in kinds.items()}
            with torch.no_grad():
                times = interleave(calls, rounds=7, calls=3, warmup=2)
            for kind, time in times.items():
                ratio = time.ratio(times["dense"]).median
                row = {"hidden": hidden, "batch": batch, "kind": kind, "ratio": ratio}
                found.append(row | {"ms": 1e3 * time.spread.median})
    return found


def show(runs: dict[str, Any], times: list[dict[str, Any]]) -> None:
    """Print both tables."""
    cells = []
    for name in dict.fromkeys(key.rpartition(" ")[0] for key in runs if "tuning" not in key):
        rows = [row for key, row in runs.items() if key.rpartition(" ")[0] == name]
        reached = [row["accuracy"] for row in rows]
        spread = f" ± {statistics.stdev(reached):.1%}" if len(rows) > 1 else ""
        size = runs["whole 1 0"]["parameters"] / rows[0]["parameters"]
        cells.append(
            [
                name.rpartition(" ")[0],
                f"{rows[0]['parameters']:,}",
                f"{size:.1f}",
                f"{rows[0]['bytes']:,}",
                f"{statistics.mean(reached):.1%}{spread}",
            ]
        )
    print(table(["layer", "parameters", "smaller", "bytes", "test accuracy"], cells))
    lines = [
        [f"{t['hidden']}, batch {t['batch']}, {t['kind']}", f"{t['ms']:.2f}", f"{t['ratio']:.2f}"]
        for t in times
    ]
    print(table(["LSTM of 28 steps", "ms", "of dense"], lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(machine_line())
    results = read_json("kronecker")
    results.setdefault("runs", {})
    runs = results["runs"]

    def save() -> None:
        write_json("kronecker", results)

    rates = tune(runs, save)
    results["learning_rates"] = rates
    for seed in range(arguments.seeds):
        compare(runs, rates, seed, save)
    results["inference"] = inference()
    save()
    show(runs, results["inference"])


if __name__ == "__main__":
    main()
