"""One training step: forward, backward, clip, step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from kronfac.train.data.mixup import RunningMixup
from kronfac.train.optim.composite import kfac_of
from kronfac.train.optim.schedules import BATCH_SCALING, TiedMomentum
from kronfac.train.optim.weight_rescaling import WeightRescaling
from kronfac.train.run.clock import TrainingClock
from kronfac.train.run.setup import Setup


class Stepper:
    """Takes the steps of a run, each a function of the run's state and the number of the step."""

    def __init__(self, setup: Setup, clock: TrainingClock) -> None:
        self.setup = setup
        self.clock = clock
        train = setup.job.train
        self.mixup = _mixup(setup) if train.mixup else None
        self._rescaling = WeightRescaling(setup.plain) if train.weight_rescaling else None
        kfac = kfac_of(setup.optimizer)
        self._observes = kfac if kfac is not None and kfac.needs_observe else None
        self._labels = torch.Generator(setup.device)
        self._scale = BATCH_SCALING[setup.job.schedule.batch_scaling]
        self._momentum: TiedMomentum | None = None
        if setup.job.schedule.tied_momentum:
            self._momentum = TiedMomentum(setup.optimizer)  # type: ignore[arg-type]

    def take(self, step: int, inputs: Tensor, targets: Tensor, timed: bool) -> Tensor:
        """Train on one batch; returns the loss of this rank, on its device."""
        self._seed(step)
        self._set_rates(step)
        optimizer = self.setup.optimizer
        if self.mixup is not None:
            inputs, targets = self.mixup.mix(step, inputs, targets)
        with self.clock.split(timed) as times:
            optimizer.zero_grad()
            loss = self._accumulate(inputs, targets)
            times.backward_done()
            if (bound := self.setup.job.train.clip) > 0:
                torch.nn.utils.clip_grad_norm_(self.setup.plain.parameters(), bound)
            optimizer.step()
            if self._rescaling is not None:
                self._rescaling.apply()
            times.step_done()
        return loss

    def _seed(self, step: int) -> None:
        """Seed by step: random numbers depend on no earlier step, and resuming needs no state."""
        job, ranks = self.setup.job, self.setup.ranks
        seed = (job.seed * 1_000_003 + step) * 1_009 + ranks.rank
        torch.manual_seed(seed)
        self._labels.manual_seed(-1 - seed)  # not those of dropout

    def _set_rates(self, step: int) -> None:
        times = self.setup.timetable
        scale = self._scale(times.batch(step), times.batch(0))
        factor = self.setup.rate(times.epoch(step + 0.5)) * scale
        for group in self.setup.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        if self._momentum is not None:
            self._momentum.update(scale)

    def _accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        count = self.setup.job.train.num_parts(len(inputs))
        total = torch.zeros((), device=self.setup.device)
        parts = zip(inputs.chunk(count), targets.chunk(count), strict=True)
        for number, (some, wanted) in enumerate(parts, start=1):
            with self._joined_gradients(number == count):
                loss = self.loss(some, wanted) / count
                loss.backward()
            total += loss.detach()
        return total

    def _joined_gradients(self, last: bool) -> AbstractContextManager[Any]:
        """Ranks average gradients once per step, after the last micro-batch."""
        model = self.setup.model
        if isinstance(model, DistributedDataParallel) and not last:
            return model.no_sync()
        return nullcontext()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss of some samples; K-FAC draws labels of its own if its Fisher needs them."""
        train = self.setup.job.train
        if train.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        half = train.precision == "bfloat16"
        with torch.autocast(self.setup.device.type, torch.bfloat16, enabled=half):
            outputs = self.setup.model(inputs)
            loss = cross_entropy(outputs, targets, train.label_smoothing)
        if self._observes is not None:
            self._observes.observe(outputs, "categorical", generator=self._labels)
        return loss


def _mixup(setup: Setup) -> RunningMixup:
    return RunningMixup(
        setup.job.train.mixup,
        setup.source.num_classes,
        seed=setup.job.seed,
        rank=setup.ranks.rank,
        world=setup.ranks.size,
    )


def cross_entropy(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean over samples or tokens; targets are classes or, as mixup gives them, shares of classes."""
    classes = outputs.shape[-1]
    if targets.is_floating_point():
        return F.cross_entropy(outputs, targets, label_smoothing=smoothing)
    flat = outputs.reshape(-1, classes), targets.reshape(-1)
    return F.cross_entropy(*flat, label_smoothing=smoothing)
