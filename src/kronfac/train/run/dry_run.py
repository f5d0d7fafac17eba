"""A dry run: build what several runs need before the first of them starts, to find mistakes early."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kronfac.train.launch.ranks import Ranks
from kronfac.train.recipe.recipe import Job
from kronfac.train.run.clock import TrainingClock
from kronfac.train.run.setup import build, check_batch, load_data
from kronfac.train.run.stepping import Stepper


def dry_run(jobs: Sequence[Job], ranks: Ranks, device: torch.device, data_dir: Path | None) -> None:
    """Build model, optimizer and schedule of jobs on the same data, and discard them.

    Anything that cannot be used is a :class:`UserError`; all ranks call it together.
    """
    for job in jobs:
        check_batch(job, ranks.size)
    source = load_data(jobs[0], data_dir) if jobs else None
    for job in jobs:
        setup = build(job, ranks, device, source, wrapped=False)
        Stepper(setup, TrainingClock(device, setup.optimizer))
