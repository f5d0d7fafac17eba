"""Everything that a run needs, built from a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kronfac.runs.errors import UserError
from kronfac.runs.timetable import Timetable, sizes_of
from kronfac.train import data, models
from kronfac.train.launch.ranks import Ranks
from kronfac.train.optim import build as optimizers
from kronfac.train.optim import schedules
from kronfac.train.optim.build import Steppable
from kronfac.train.recipe.recipe import Job, SchedulePart


@dataclass
class Setup:
    """Data, model, optimizer and schedule of one run.

    ``model`` is what the loop calls, with its wrappers; ``plain`` is what checkpoints know.
    """

    job: Job
    ranks: Ranks
    device: torch.device
    source: Any
    batches: Any
    plain: nn.Module
    model: nn.Module
    optimizer: Steppable
    rate: Callable[[float], float]
    steps: int

    @property
    def timetable(self) -> Timetable:
        """Steps, epochs and batches of the run."""
        return self.batches.timetable  # type: ignore[no-any-return]

    @property
    def metric(self) -> str:
        """The metric of the target."""
        by_loss = self.source.kind == "text" or self.job.train.target_loss is not None
        return "loss" if by_loss else "accuracy"


def prepare(job: Job, ranks: Ranks, device: torch.device, data_dir: Path | None) -> Setup:
    """Load the data and build the rest; all ranks get the same weights."""
    check_batch(job, ranks.size)
    return build(job, ranks, device, load_data(job, data_dir))


def check_batch(job: Job, ranks: int) -> None:
    """Raise unless every batch can be divided equally over ranks and micro-batches."""
    train = job.train
    for _, size in sizes_of(train.batch):
        parts = train.num_parts(max(1, size // ranks))
        if size % (ranks * parts):
            raise UserError(
                f"train.batch = {size} cannot be divided over {ranks} rank(s) and "
                f"{parts} micro-batch(es); choose a multiple of {ranks * parts}."
            )


def load_data(job: Job, data_dir: Path | None) -> Any:
    """The source of the job's samples."""
    sizes = {name: getattr(job.data, name) for name in ("train", "test")}
    source = data.load(job.data.name, data_dir, **sizes, **job.data.options)
    return source if job.data.holdout is None else data.hold_out(source, job.data.holdout)


def build(
    job: Job, ranks: Ranks, device: torch.device, source: Any, *, wrapped: bool = True
) -> Setup:
    """Build everything on a source; ``wrapped`` is for compiling and for several ranks."""
    if source.kind == "text":
        _check_text(job)
    batches = data.Batches(
        source,
        job.train.batch,
        seed=job.seed,
        rank=ranks.rank,
        world=ranks.size,
        augment=job.data.augment,
        device=device,
    )
    plain = _model(job, source, device)
    model = _wrapped(plain, job, ranks, device) if wrapped else plain
    times = batches.timetable
    optimizer = optimizers.build(job.optimizer, model, timetable=times, kind=source.kind)
    steps = job.train.num_steps(times)
    rate = _shape(job.schedule, times.epoch(steps))
    return Setup(job, ranks, device, source, batches, plain, model, optimizer, rate, steps)


def _check_text(job: Job) -> None:
    """Refuse what is for images only."""
    if job.train.target is not None:
        raise UserError(
            f"train.target = {job.train.target} is an accuracy, and text is judged by its loss; set "
            "train.target_loss instead."
        )
    if job.data.augment:
        names = list(job.data.augment)
        raise UserError(
            f"data.augment = {names!r} changes images, and this data is text; leave it out."
        )
    if job.train.mixup:
        raise UserError(
            f"train.mixup = {job.train.mixup} mixes images, and this data is text; set 0."
        )


def _model(job: Job, source: Any, device: torch.device) -> nn.Module:
    torch.manual_seed(job.seed)
    model: nn.Module = models.build(
        job.model.name,
        num_classes=source.num_classes,
        sample_shape=source.sample_shape,
        **job.model.options,
    )
    model = model.to(device)
    if job.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _wrapped(plain: nn.Module, job: Job, ranks: Ranks, device: torch.device) -> nn.Module:
    model = plain
    if job.train.compile:
        # Code that was compiled for an earlier run of this process would not see the hooks of K-FAC.
        torch.compiler.reset()
        model = torch.compile(model)  # type: ignore[assignment]
    if ranks.size > 1:
        ids = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids)
    return model


def _shape(part: SchedulePart, total: float) -> Callable[[float], float]:
    falls = part.shape in ("linear", "cosine", "polynomial") and part.start is None
    if falls and part.end is None and part.warmup >= total:
        raise UserError(
            f"schedule.warmup = {part.warmup:g} epochs is not shorter than the run, {total:g} epochs; "
            "train longer, or set a shorter one."
        )
    if part.warmup_from and not (part.warmup or part.warmup_share):
        raise UserError(
            f"schedule.warmup_from = {part.warmup_from:g} has no warm-up to begin; set schedule.warmup, "
            "too."
        )
    if part.shape == "steps" and not part.milestones:
        raise UserError(
            "schedule.shape = 'steps' has no steps; set schedule.milestones, [35, 75] for example."
        )
    names = ("warmup_from", "start", "end", "power", "milestones", "gamma")
    options = {name: getattr(part, name) for name in names}
    warmup = part.warmup or part.warmup_share * total
    return schedules.build(part.shape, total=total, warmup=warmup, **options)
