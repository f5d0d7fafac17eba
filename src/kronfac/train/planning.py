"""What K-FAC would cost on many ranks, for ``kronfac plan``."""

from __future__ import annotations

import math
from pathlib import Path

from kronfac.distributed.calibrate import measure
from kronfac.distributed.workload import Intervals, unit_of
from kronfac.optimizer.base import Preconditioned
from kronfac.placement.costs import Link
from kronfac.planner.choose import choose
from kronfac.runs.errors import UserError
from kronfac.runs.timetable import Timetable
from kronfac.train import data, models
from kronfac.train.optim import build as optimizers
from kronfac.train.optim.composite import kfac_of
from kronfac.train.recipe.options import methods
from kronfac.train.recipe.recipe import Job, Recipe

#: The largest cluster that can be planned; the cost of every rank is computed.
_MOST_RANKS = 16_384


def plan(
    recipe: Recipe, ranks: int, gbit: float, latency: float, data_dir: Path | None
) -> list[str]:
    """A table of the schemes, best first, for ``ranks`` ranks that are as fast as this machine.

    Args:
        recipe: whose K-FAC table is taken.
        ranks: how many.
        gbit: gigabits per second between two of them.
        latency: microseconds of a message.
        data_dir: where data sets are; if it holds the image folder, its classes are counted.
    """
    if ranks < 2:
        raise UserError(f"--ranks {ranks} must be at least 2.")
    if ranks > _MOST_RANKS:
        raise UserError(f"--ranks {ranks} must be at most {_MOST_RANKS}.")
    if not 0 < gbit < math.inf:
        raise UserError(f"--gbit {gbit:g} must be positive.")
    if not 0 <= latency < math.inf:
        raise UserError(f"--latency {latency:g} must be 0 or more.")
    name = next((one.name for one in recipe.optimizers.values() if one.kind in methods()), None)
    if name is None:
        raise UserError(f"recipe {recipe.name!r} has no optimizer of kind 'kfac' to plan for.")
    job = recipe.job(name)
    form = data.form(job.data.name, data_dir, **job.data.options)
    optimizer = _kfac(job, form)
    every = int(optimizer.value_now("refresh_every"))
    intervals = Intervals(every, int(optimizer.value_now("factor_every")))
    units = [
        unit_of(full, state, True, full, intervals)
        for state in optimizer.layers
        for full in [f"{state.name}{state.layer.part}"]
    ]
    link = Link(latency * 1e-6, 8 / (gbit * 1e9))
    _, predictions = choose(units, ranks, link, measure(), every)
    lines = [f"{'scheme':<16}{'ms/step':>9}{'MB/refresh':>12}{'MB/step':>9}{'MB/rank':>9}"]
    for one in predictions:
        rare = one.bytes.get("reduce", 0) + one.bytes.get("share", 0)
        often = one.bytes.get("spread", 0)
        lines.append(
            f"{one.scheme:<16}{one.total * 1e3:>9.2f}{rare / 1e6:>12.2f}"
            f"{often / 1e6:>9.2f}{one.memory / 1e6:>9.2f}"
        )
    lines.append("K-FAC's own part of a step on ranks as fast as this machine, best first.")
    return [*lines, form.note] if form.note else lines


def _kfac(job: Job, form: data.Form) -> Preconditioned:
    """The optimizer of a job; only the shapes of the data are needed."""
    model = models.build(
        job.model.name,
        num_classes=form.num_classes,
        sample_shape=form.sample_shape,
        **job.model.options,
    )
    # Only values of the first step are read: the length of an epoch does not matter.
    one = Timetable(1, 1)
    optimizer = kfac_of(optimizers.build(job.optimizer, model, timetable=one, kind=form.kind))
    assert optimizer is not None
    return optimizer
