"""Whether training waits for data: images per second of the loader alone, and of steps that use them.

    python benchmarks/data_loading.py [--recipes digits,fashion-mnist,cifar10] [--data-dir DIR]

Batches are decoded and augmented by one thread beside training. `loader` makes them as fast as it can
and nobody uses them; `SGD` and `K-FAC` are training steps of the recipe, data included; `waited` is the
share of their time in which the next batch was not ready. The three take turns in each round.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from _common import Spread, machine_line, table, write_json

from kronfac.train.launch.ranks import current
from kronfac.train.recipe import files as recipe_files
from kronfac.train.recipe.recipe import Recipe
from kronfac.train.run.run import train
from kronfac.train.run.setup import prepare

RECIPES = ("digits", "fashion-mnist", "cifar10")
OPTIMIZERS = {"sgd": "SGD", "kfac": "K-FAC"}
STEPS = 60


def loader(recipe: Recipe, data_dir: Path | None) -> float:
    """Images per second of the loader alone."""
    setup = prepare(recipe.job("sgd"), current(), torch.device("cpu"), data_dir)
    start = time.perf_counter()
    for _ in setup.batches.iterate(0, STEPS):
        pass
    return round(STEPS * recipe.train.batch / (time.perf_counter() - start), 1)


def training(recipe: Recipe, optimizer: str, data_dir: Path | None) -> tuple[float, float]:
    """Images per second of training, and the share of its time that it waits for data."""
    result = train(recipe, optimizer, data_dir=data_dir)
    rate = STEPS * recipe.train.batch / result.seconds
    return round(rate, 1), round(result.phases["data"] / result.seconds, 5)


def measure(name: str, rounds: int, data_dir: Path | None) -> dict[str, Any]:
    """All numbers of one recipe, a value for each round."""
    changes = {"train.steps": STEPS, "train.evaluate_every": 1e6}
    recipe = recipe_files.load(name, changes)
    alone: list[float] = []
    found: dict[str, list[tuple[float, float]]] = {optimizer: [] for optimizer in OPTIMIZERS}
    for _ in range(rounds):
        alone.append(loader(recipe, data_dir))
        for optimizer, values in found.items():
            values.append(training(recipe, optimizer, data_dir))
    return {
        "batch": recipe.train.batch,
        "augment": list(recipe.data.augment),
        "loader": alone,
        "training": {o: [rate for rate, _ in values] for o, values in found.items()},
        "waited": {o: [share for _, share in values] for o, values in found.items()},
    }


def row(name: str, found: dict[str, Any]) -> list[str]:
    """A line of the table: medians over rounds."""
    cells = [f"{Spread.of(found['loader']).median:,.0f}"]
    for optimizer in OPTIMIZERS:
        cells.append(f"{Spread.of(found['training'][optimizer]).median:,.0f}")
        cells.append(f"{100 * Spread.of(found['waited'][optimizer]).median:.1f} %")
    return [name, *cells]


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    names = arguments.recipes.split(",")
    results = {name: measure(name, arguments.rounds, arguments.data_dir) for name in names}
    headers = ["images per second", "loader"]
    for shown in OPTIMIZERS.values():
        headers += [shown, "waited"]
    print(machine_line())
    print(table(headers, [row(name, found) for name, found in results.items()]))
    write_json("data_loading", results)


if __name__ == "__main__":
    main()
