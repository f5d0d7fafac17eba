"""Why the defaults are what they are: one option at a time, the rest as it comes out of the box.

    python benchmarks/defaults.py [--seeds 3]

A drop-in user keeps the base optimizer and its learning rate, so that is what is tried: SGD with Nesterov
momentum at three learning rates around the one that suits SGD itself, on the network of
`examples/digits.py`. The number is test accuracy after a short run, the mean over seeds; "diverged" means
that at least one seed ended with a loss that is not finite, or at the level of guessing.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import machine_line, table, write_json
from torch import nn

import kronfac

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from digits import train

RATES = (0.03, 0.1, 0.2)
EPOCHS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "rescale=None": {"rescale": None},
    "rescale='kl-clip'": {"rescale": "kl-clip"},
    "damping=1e-1": {"damping": 1e-1},
    "damping=1e-2": {"damping": 1e-2},
    "damping=1e-3": {"damping": 1e-3},
    "damping=1e-5": {"damping": 1e-5},
    "decay=0.5": {"decay": 0.5},
    "decay=0.99": {"decay": 0.99},
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


def accuracy(make: Callable[..., torch.optim.Optimizer], lr: float, seeds: int) -> float | None:
    """Mean final accuracy, or None if a seed diverged."""
    finals = []
    for seed in range(seeds):
        try:
            finals.append(train(make, lr, EPOCHS, seed, every=10**6).accuracy[-1])
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
