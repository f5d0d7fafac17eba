"""Why the defaults are what they are: one option at a time, the rest as it comes out of the box.

    python benchmarks/defaults.py [--seeds 3]

A drop-in user keeps the base optimizer and its learning rate, so that is what is tried: SGD with Nesterov
momentum at three learning rates around the one that suits SGD itself, on a network of three convolutions
without norms. The number is test accuracy after a short run, the mean over seeds; "diverged" means that
at least one seed ended with a loss that is not finite, or at the level of guessing.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _common import machine_line, table, write_json
from torch import nn

import kronfac
from kronfac.train import data

RATES = (0.03, 0.1, 0.2)
EPOCHS = 4
BATCH = 64
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "rescale='unit'": {"rescale": "unit"},
    "rescale='orthogonal'": {"rescale": "orthogonal"},
    "rescale='graft'": {"rescale": "graft"},
    "rescale=None": {"rescale": None},
    "rescale='kl-clip'": {"rescale": "kl-clip"},
    "damping=1e-1": {"damping": 1e-1},
    "damping=1e-2": {"damping": 1e-2},
    "damping=1e-3": {"damping": 1e-3},
    "damping=1e-5": {"damping": 1e-5},
    "decay=0": {"decay": 0.0},
    "decay=0.8": {"decay": 0.8},
    "decay=0.95": {"decay": 0.95},
    "1/10": {"factor_every": 1, "refresh_every": 10},
    "50/500": {"factor_every": 50, "refresh_every": 500},
    "early_refresh=False": {"early_refresh": False},
    "stagger=True": {"stagger": True},
    "solver='cholesky'": {"solver": "cholesky"},
    "sharing='reduce'": {"sharing": "reduce"},
    "fisher='forward'": {"fisher": "forward"},
}


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)


def with_options(options: dict[str, Any]) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
    return lambda model, lr: kronfac.KFAC(model, sgd(model, lr), **options)


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, 3, padding=1, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64 * 4, 10),
    )


def train(make: Callable[..., torch.optim.Optimizer], lr: float, seed: int) -> float:
    """Test accuracy after a short run with a learning rate that falls to zero."""
    source = data.load("digits")
    batches = data.Batches(source, BATCH, seed=seed)
    torch.manual_seed(seed)
    model = make_network()
    optimizer = make(model, lr)
    total = round(batches.timetable.step(EPOCHS))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    for images, labels in batches.iterate(0, total):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        tested = [(model(x).argmax(1) == y).sum().item() for x, y in batches.test(500)]
    return sum(tested) / source.num_test


def accuracy(make: Callable[..., torch.optim.Optimizer], lr: float, seeds: int) -> float | None:
    """Mean final accuracy, or None if a seed diverged."""
    finals = []
    for seed in range(seeds):
        try:
            finals.append(train(make, lr, seed))
        except RuntimeError:  # no curvature can be solved any more
            return None
    return statistics.mean(finals) if min(finals) > 0.2 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print(machine_line())
    results: dict[str, list[float | None]] = {}
    results["SGD alone"] = [accuracy(sgd, lr, seeds) for lr in RATES]
    for name, options in SETTINGS.items():
        results[name] = [accuracy(with_options(options), lr, seeds) for lr in RATES]
    shown = [
        [name, *("diverged" if one is None else f"{one:.1%}" for one in row)]
        for name, row in results.items()
    ]
    print(table(["setting", *(f"lr {lr}" for lr in RATES)], shown))
    write_json("defaults", {"rates": RATES, "epochs": EPOCHS, "accuracy": results})


if __name__ == "__main__":
    main()
