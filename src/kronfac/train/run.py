"""``train``: one run of a recipe, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kronfac.train.events import Listener, Recorder
from kronfac.train.loop import Loop
from kronfac.train.ranks import Ranks
from kronfac.train.recipe import Recipe
from kronfac.train.result import Result
from kronfac.train.setup import prepare


def train(
    recipe: Recipe,
    optimizer: str | None = None,
    seed: int | None = None,
    out: Path | str | None = None,
    *,
    data_dir: Path | str | None = None,
    device: str | torch.device | None = None,
    stop_at_target: bool = False,
    listeners: Iterable[Listener] = (),
) -> Result:
    """Run a recipe with one optimizer and one seed.

    Args:
        recipe: what to train; :func:`kronfac.train.recipe_files.load` reads one.
        optimizer: a table of the recipe; by default the one that it names.
        seed: by default the recipe's.
        out: the run folder to write; without it nothing is written.
        data_dir: where data sets are.
        device: by default a GPU if there is one.
        stop_at_target: end when the recipe's target is reached.
        listeners: called with every event.
    """
    job = recipe.job(optimizer, seed)
    ranks = Ranks()
    where = choose_device(device)
    with isolated(job.train.deterministic and where.type == "cuda"):
        setup = prepare(job, ranks, where, None if data_dir is None else Path(data_dir))
        record = Recorder(listeners if ranks.first else ())
        loop = Loop(setup, record, signal=lambda: 0, stop_at_target=stop_at_target)
        return loop.run()


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """The device of this rank."""
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def isolated(deterministic: bool) -> Iterator[None]:
    """Leave torch's random numbers and settings as they were."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.random.fork_rng():
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)
