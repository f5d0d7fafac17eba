"""Compress a trained recurrent net by Kronecker products, beside low rank and pruning of equal size.

    python benchmarks/kronecker.py [--seeds 2] [--threads 1]

An LSTM reads Fashion-MNIST row by row (28 steps of 28 numbers). Its two matrices become a sum of
Kronecker products (`kronfac.nn.compress`), a product of two thin matrices, or lose all but their largest
entries bit by bit; each then has as many parameters and is fine-tuned alike. Beside them: an LSTM of
fewer units and the Kronecker layer, both trained from scratch for as long as the others in all, the
whole net tuned on likewise, and fine-tuning with K-FAC. Learning rates are chosen on 10,000 training
images that are held out; the accuracy is that of the test set. Runs are kept while the table grows, so
an interrupted one resumes.
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
    Sparse,
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

HIDDEN, FACTORS = 128, (30, 16)
WHOLE_STEPS, STEPS = 2000, 2000
#: Learning rates to choose from, at the first size and with the first seed.
RATES = {
    "Kronecker": (3e-3, 1e-2, 2e-2),
    "low rank": (3e-3, 1e-2, 2e-2),
    "pruned": (3e-3, 1e-2, 2e-2),
    "fewer units": (3e-3, 1e-2, 2e-2),
    "Kronecker, K-FAC": (0.03, 0.1, 0.2),
    "Kronecker, from scratch": (3e-3, 1e-2),
    "whole, tuned on": (3e-3, 1e-2),
    "Kronecker, 1 term": (1e-2,),
    "Kronecker, 8 terms": (1e-2,),
}
#: How many products at most; with the first seed only.
TERMS = {"Kronecker, 1 term": 1, "Kronecker, 8 terms": 8}
#: Steps, where they are not STEPS: as many in all as the others had, and about as much time.
LENGTHS = {
    "fewer units": WHOLE_STEPS + STEPS,
    "Kronecker, from scratch": WHOLE_STEPS + STEPS,
    "Kronecker, K-FAC": 600,
}
#: At the first size and with the first seed only.
ONCE = ("Kronecker, K-FAC", "Kronecker, from scratch", "whole, tuned on")
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
    if kind.startswith("whole"):
        return trained, _nothing
    kronecker = compress(trained, factor, exclude="head")
    assert isinstance(kronecker, Reader)
    budget = parameters(kronecker)
    if kind in TERMS:
        kronecker = compress(trained, factor, exclude="head", terms=TERMS[kind])
        assert isinstance(kronecker, Reader)
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
    kind: str, factor: int, seed: int, rate: float, parts: tuple[Images, Images, Images]
) -> dict[str, Any]:
    """Train one net; its sizes and accuracies."""
    training, held, test = parts
    trained = whole(training, seed)
    steps = LENGTHS.get(kind, STEPS)
    torch.manual_seed(seed + 1)
    model, after = small(kind, trained, factor, steps)
    before = accuracy(model, *held)
    if kind != "whole":
        kfac = "K-FAC" in kind
        fit(model, *training, steps, rate, after=after, kfac=kfac, seed=seed + 1)
    return {
        "parameters": parameters(model),
        "bytes": stored(model, kind),
        "before": before,
        "held_out": accuracy(model, *held),
        "test": accuracy(model, *test),
    }


def compare(runs: dict[str, Any], seeds: int, save: Callable[[], None]) -> dict[str, float]:
    """Every kind, size and seed; the learning rates that were chosen on what was held out."""
    parts = images()

    def get(kind: str, factor: int, seed: int, rate: float) -> float:
        key = f"{kind} {factor} {seed} {rate}"
        if key not in runs:
            runs[key] = run(kind, factor, seed, rate, parts)
            print(key, runs[key], flush=True)
            save()
        return float(runs[key]["held_out"])

    chosen = {"whole": 0.0}
    for seed in range(seeds):
        get("whole", 1, seed, 0.0)
        for kind, rates in RATES.items():
            if kind not in chosen:
                reached = {rate: get(kind, FACTORS[0], 0, rate) for rate in rates}
                chosen[kind] = max(reached, key=reached.__getitem__)
            for factor in FACTORS:
                if kind not in (*ONCE, *TERMS) or (kind in TERMS and seed == 0):
                    get(kind, factor, seed, chosen[kind])
    return chosen


def inference() -> list[dict[str, Any]]:
    """Milliseconds to read a sequence of 28, of one sample and of a batch, beside the dense layer.

    A pruned matrix with its zeros takes the time of the dense one.
    """
    found = []
    for hidden in (128, 512, 1024):
        layer = nn.LSTM(hidden, hidden, batch_first=True)
        kinds: dict[str, nn.Module] = {"dense": layer}
        kinds["Kronecker"] = compress(layer, 16)
        kinds["Kronecker, one term"] = compress(layer, 16, terms=1)
        kinds["low rank"] = LowRank(layer, 8 * hidden * hidden // 16)
        kinds["pruned, sparse"] = Sparse(layer, 16)
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


def show(results: dict[str, Any]) -> None:
    """Print both tables."""
    runs, chosen, cells = results["runs"], results["learning_rates"], []
    full = runs["whole 1 0 0.0"]["parameters"]
    for factor in (1, *sorted(FACTORS)):
        for kind, rate in chosen.items():
            names = [f"{kind} {factor} {seed} {rate}" for seed in range(9)]
            rows = [runs[name] for name in names if name in runs]
            if rows:
                reached = [row["test"] for row in rows]
                spread = f" ± {statistics.stdev(reached):.1%}" if len(rows) > 1 else ""
                size = f"{rows[0]['parameters']:,}", f"{full / rows[0]['parameters']:.1f}"
                last = f"{rows[0]['bytes']:,}", f"{statistics.mean(reached):.1%}{spread}"
                cells.append([kind, *size, *last])
    print(table(["layer", "parameters", "smaller", "bytes", "test accuracy"], cells))
    lines = [
        [f"{t['hidden']}, batch {t['batch']}, {t['kind']}", f"{t['ms']:.2f}", f"{t['ratio']:.2f}"]
        for t in results["inference"]
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

    def save() -> None:
        write_json("kronecker", results)

    results["learning_rates"] = compare(results["runs"], arguments.seeds, save)
    results["inference"] = inference()
    save()
    show(results)


if __name__ == "__main__":
    main()
