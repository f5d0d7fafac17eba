"""The training loop: steps, evaluations, events and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor

from kronfac.options.errors import UnsolvableError
from kronfac.runs.events import Recorder
from kronfac.train.optim.composite import kfac_of
from kronfac.train.record.counters import Counters
from kronfac.train.record.memory import peak_bytes
from kronfac.train.run.clock import TrainingClock
from kronfac.train.run.evaluation import evaluate
from kronfac.train.run.result import Result
from kronfac.train.run.setup import Setup
from kronfac.train.run.stepping import Stepper
from kronfac.train.run.target import first_reached

#: A flag that ranks exchange; the others are numbers of signals, which are smaller.
_NOT_FINITE = 1000

Save = Callable[["Loop"], None]


class Loop:
    """Trains until the end, a signal, a failure or the target."""

    def __init__(
        self,
        setup: Setup,
        record: Recorder,
        *,
        signal: Callable[[], int],
        save: Save | None = None,
        stop_at_target: bool = False,
    ) -> None:
        self.setup = setup
        self.record = record
        self.signal = signal
        self.save = save
        self.stop_at_target = stop_at_target
        self.clock = TrainingClock(setup.device, setup.optimizer)
        self.counters = Counters(kfac_of(setup.optimizer))
        self.stepper = Stepper(setup, self.clock)
        self.step = 0
        count = sum(p.numel() for p in setup.plain.parameters())
        self.result = Result(parameters=count, metric=setup.metric)
        self._logged = (0, 0.0)
        self._saved = -1

    # --- the run --------------------------------------------------------------------------------

    def run(self, before_finish: Callable[[], None] = lambda: None) -> Result:
        """Train; the result is also complete when training has stopped early."""
        setup, result = self.setup, self.result
        self._logged = self.step, self.clock.seconds
        self._saved = self.step
        setup.plain.train()
        self._tell_target()  # a resumed run may have reached it before
        flag = self._train() if not self._is_over() else 0
        result.step, result.seconds = self.step, self.clock.seconds
        result.memory = peak_bytes(setup.device)
        if flag >= _NOT_FINITE:
            self._fail()
        elif flag:
            result.status, result.signal = "stopped", flag
            self._save()
        else:
            self._save()
        before_finish()
        self._finish()
        return result

    def _train(self) -> int:
        """Returns why it ended: 0 for the end, else a flag that all ranks have agreed on."""
        try:
            flag = self._steps()
        except UnsolvableError as error:  # all ranks raise it together
            self.clock.pause()
            self.result.message = str(error)
            flag = _NOT_FINITE
        self.setup.ranks.settle()
        return flag

    def _steps(self) -> int:
        setup = self.setup
        last = setup.steps - 1
        self.clock.start()
        batches = setup.batches.iterate(self.step, setup.steps)
        for inputs, targets in self.clock.waiting(batches):
            logs = (self.step + 1) % setup.job.train.log_every == 0 or self.step in (0, last)
            timed = setup.device.type == "cpu" or logs
            loss = self.stepper.take(self.step, inputs, targets, timed)
            self.step += 1
            flag = setup.ranks.agree(self._flag(loss, looks=timed))
            train = setup.job.train
            due = self._is_due(train.evaluate_every) or self._is_due(train.checkpoint_every)
            if logs or due or flag:
                flag = self._pause(loss, logs, flag)
                if flag or self._is_over():
                    return flag
                self.clock.start()
        return 0

    def _pause(self, loss: Tensor, logs: bool, flag: int) -> int:
        """Everything that is not training."""
        self.clock.pause()
        if logs:
            self._log(loss)
        due = self._is_due(self.setup.job.train.evaluate_every)
        saves = self._is_due(self.setup.job.train.checkpoint_every)
        if due or saves or self.step == self.setup.steps:
            # Only a finite loss on all ranks is saved or tested.
            flag = max(flag, self.setup.ranks.agree_now(self._flag(loss, looks=True)))
        if flag < _NOT_FINITE and due:
            self._evaluate()
        if not flag and saves:
            self._save()
        return flag

    def _flag(self, loss: Tensor, looks: bool) -> int:
        if looks and not math.isfinite(float(loss)):
            return _NOT_FINITE
        return self.signal()

    def _is_due(self, epochs: float) -> bool:
        """Whether the last step completed a multiple of ``epochs``, or training."""
        if not epochs:
            return False
        before = self.setup.timetable.epoch(self.step - 1)
        passed = [math.floor(epoch / epochs + 1e-9) for epoch in (before, self.epoch)]
        return self.step == self.setup.steps or passed[1] > passed[0]

    def _is_over(self) -> bool:
        reached = self.stop_at_target and self.result.target is not None
        return reached or self.step >= self.setup.steps

    # --- events ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> float:
        """Progress in epochs."""
        return self.setup.timetable.epoch(self.step)

    def _evaluate(self) -> None:
        found = evaluate(self.setup, self.step, self.clock.seconds)
        self.result.curve.append(found)
        self.record("eval", epoch=self.epoch, **asdict(found))
        if self.result.target is None:
            self.result.target = first_reached(self.setup.job.train, [found])
            self._tell_target()

    def _tell_target(self) -> None:
        if self.result.target is not None:
            self.record("target", **asdict(self.result.target))

    def _log(self, loss: Tensor) -> None:
        setup, seconds = self.setup, self.clock.seconds
        [mean] = setup.ranks.total([float(loss)])
        step, before = self._logged
        self._logged = self.step, seconds
        samples = setup.timetable.samples(self.step) - setup.timetable.samples(step)
        phases = self.clock.take_phases()
        for name, spent in phases.items():
            self.result.phases[name] = self.result.phases.get(name, 0.0) + spent
        self.record(
            "step",
            step=self.step,
            epoch=self.epoch,
            batch=setup.timetable.batch(self.step - 1),
            loss=mean / setup.ranks.size,
            lr=setup.optimizer.param_groups[0]["lr"],
            seconds=seconds,
            samples_per_second=samples / max(seconds - before, 1e-9),
            memory=peak_bytes(setup.device),
            phases=phases,
            **self._kfac_fields(),
        )

    def _kfac_fields(self) -> dict[str, Any]:
        """K-FAC's own fields; ``kl_clip`` is the share of shortened steps since the last event."""
        if (kfac := kfac_of(self.setup.optimizer)) is None:
            return {}
        stats = self.counters.since_last()
        clipped = stats["kl_clip_active"] / max(1, stats["kl_clip_steps"])
        momentum = kfac.value_now("momentum")
        momentum = momentum or float(kfac.param_groups[0].get("momentum", 0.0))
        return {"damping": stats["damping"], "kl_clip": clipped, "momentum": momentum}

    def _save(self) -> None:
        if self.save is not None and self._saved != self.step:
            self.save(self)
            self._saved = self.step
            self.record("checkpoint", step=self.step)

    def _fail(self) -> None:
        self.result.status = "failed"
        kept = f"; the checkpoint of step {self._saved} stays" if self._saved > 0 else ""
        self.result.message = self.result.message or (
            f"the loss was not finite at step {self.step}{kept}; lower the learning rate, or raise "
            "warm-up or damping."
        )
        self.record("failure", step=self.step, message=self.result.message)

    def _finish(self) -> None:
        result = self.result
        result.stats = self.counters.total()
        self.record(
            "finish",
            status=result.status,
            step=result.step,
            seconds=result.seconds,
            accuracy=result.accuracy,
            loss=result.loss,
            stats=result.stats,
        )
