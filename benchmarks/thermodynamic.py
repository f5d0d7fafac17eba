"""Simulated thermodynamic computers: accuracy against bits, and TNGD's against the time it relaxes.

    python benchmarks/thermodynamic.py [--seeds 10]

A tanh network with 32 hidden units reads the digits that come with the package: 20 steps with batches of
128, SGD with momentum 0.9 as the base and `rescale=None`, so that a solver's errors act on directions and
lengths. Every point may choose among the same learning rates, by its loss on training samples kept apart
with a seed of its own; its number is the mean accuracy on the test part over other seeds.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _common import machine_line, table, write_json
from torch import Tensor, nn

import kronfac
from kronfac.train.data import digits

STEPS, BATCH, KEPT = 20, 128, 297
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
TUNING_SEED = 100
BITS = (2, 3, 4, 5, 6, 8, None)
#: That of the paper on TNGD, and one with which inverses are harder.
DAMPINGS = (1e-2, 1e-4)
TIMES = (0.0, 1.0, 3.0, 10.0, 50.0, math.inf)
PICTURE = Path(__file__).parents[1] / "docs" / "thermodynamic.png"
COLOURS = {"thick": "#194e80", "thin": "#cc380d", "grey": "#777777"}

Data = tuple[Tensor, Tensor]
Make = Callable[[nn.Module, torch.optim.Optimizer], Any]


def parts() -> dict[str, Data]:
    """Pixels in [0, 1] and labels: for training, kept apart, and for the test."""
    source = digits.read()
    train, test = (
        (part.images.flatten(1).float() / 16, part.labels) for part in (source.train, source.test)
    )
    return {
        "train": (train[0][KEPT:], train[1][KEPT:]),
        "kept": (train[0][:KEPT], train[1][:KEPT]),
        "test": test,
    }


def trained(make: Make, rate: float, seed: int, data: Data) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = make(model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9))
    for _ in range(STEPS):
        chosen = torch.randint(len(data[0]), (BATCH,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data[0][chosen]), data[1][chosen])
        if not bool(torch.isfinite(loss)):
            break
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def loss_of(model: nn.Module, data: Data) -> float:
    loss = float(F.cross_entropy(model(data[0]), data[1]))
    return loss if math.isfinite(loss) else math.inf


@torch.no_grad()
def accuracy_of(model: nn.Module, data: Data) -> float:
    return float((model(data[0]).argmax(1) == data[1]).float().mean())


def measure(make: Make, seeds: int, data: dict[str, Data]) -> dict[str, float]:
    """The learning rate that suits best, and what it leads to."""
    losses = {
        rate: loss_of(trained(make, rate, TUNING_SEED, data["train"]), data["kept"])
        for rate in RATES
    }
    rate = min(losses, key=losses.__getitem__)
    found = [
        accuracy_of(trained(make, rate, seed, data["train"]), data["test"]) for seed in range(seeds)
    ]
    return {
        "accuracy": statistics.mean(found),
        "error": statistics.stdev(found) / math.sqrt(seeds),
        "lr": rate,
    }


def plain(model: nn.Module, base: torch.optim.Optimizer) -> Any:
    return base


def kfac(solver: Any, damping: float) -> Make:
    options = {"damping": damping, "factor_every": 1, "refresh_every": 5}
    return lambda model, base: kronfac.KFAC(model, base, solver=solver, rescale=None, **options)


def tngd(time: float, start: str) -> Make:
    options: dict[str, Any] = {"refresh_every": 5, "rescale": None}
    return lambda model, base: kronfac.TNGD(model, base, time=time, start=start, **options)


def points() -> dict[tuple[str, Any], Make]:
    """What is measured, by curve and place on it."""
    found: dict[tuple[str, Any], Make] = {("SGD", ""): plain}
    for damping in DAMPINGS:
        found[f"Cholesky, damping {damping}", ""] = kfac("cholesky", damping)
        for method in (1, 2):
            for bits in BITS:
                device = kronfac.Thermodynamic(method=method, bits=bits)
                found[f"method {method}, damping {damping}", bits] = kfac(device, damping)
    for start in ("gradient", "previous"):
        for time in TIMES:
            found[f"TNGD from {start}", time] = tngd(time, start)
    return found


def draw(results: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    ends = range(len(BITS))
    for damping, colour in zip(DAMPINGS, (COLOURS["thick"], COLOURS["thin"]), strict=True):
        for method, style in ((1, "o-"), (2, "s--")):
            curve = results[f"method {method}, damping {damping}"].values()
            left.plot(
                ends,
                [100 * one["accuracy"] for one in curve],
                style,
                color=colour,
                label=f"method {method}, damping {damping}",
            )
        exact = results[f"Cholesky, damping {damping}"][""]["accuracy"]
        left.axhline(100 * exact, color=colour, lw=0.8, alpha=0.6)
    left.set_xticks(ends, ["ideal" if bits is None else str(bits) for bits in BITS])
    left.set(xlabel="bits of the converters", ylabel="test accuracy after 20 steps, %")
    left.set_title("K-FAC on a thermodynamic computer")
    places = range(len(TIMES))
    for start, colour in (("gradient", COLOURS["thick"]), ("previous", COLOURS["thin"])):
        curve = results[f"TNGD from {start}"].values()
        right.plot(
            places,
            [100 * one["accuracy"] for one in curve],
            "o-",
            color=colour,
            label=f"from {start}",
        )
    right.set_xticks(places, ["∞" if math.isinf(time) else f"{time:g}" for time in TIMES])
    right.set(xlabel="time t", title="TNGD")
    for axis in (left, right):
        sgd = results["SGD"][""]["accuracy"]
        axis.axhline(100 * sgd, color=COLOURS["grey"], lw=0.8, ls=":", label="SGD")
        axis.legend(fontsize=8, loc="lower right")
        axis.grid(alpha=0.25)
        axis.set_ylim(70, 97)  # what is below does not train
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    data, results = parts(), {}
    rows = []
    for (curve, place), make in points().items():
        found = measure(make, seeds, data)
        results.setdefault(curve, {})[str(place) if place != "" else ""] = found
        rows.append((curve, place, f"{found['accuracy']:.1%}", found["lr"]))
    print(machine_line())
    print(table(("curve", "at", "accuracy", "lr"), rows))
    write_json("thermodynamic", {"steps": STEPS, "batch": BATCH, "seeds": seeds, "curves": results})
    draw(results, PICTURE)


if __name__ == "__main__":
    main()
