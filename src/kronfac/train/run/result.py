"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kronfac.train.run.evaluation import Evaluation

Status = Literal["done", "stopped", "failed"]


@dataclass(frozen=True)
class Reached:
    """When the target was reached: seconds are those of training."""

    step: int
    seconds: float


@dataclass
class Result:
    """The outcome of :func:`kronfac.train.run.run.train`.

    Args:
        status: ``"done"``, ``"stopped"`` (by a signal) or ``"failed"`` (the loss was not finite).
        step: completed steps.
        seconds: of training, without evaluation.
        curve: all evaluations, those before a resume included.
        target: when the target was reached, if it was.
        message: why it failed.
        signal: the number of the signal that stopped it.
        parameters: how many the model has.
        phases: seconds of each phase.
        stats: of ``optimizer.stats()``, for K-FAC, with counts since step 0.
        memory: the most bytes that were in use.
        folder: the run folder, if there is one.
        metric: what it is judged by, ``"accuracy"`` or ``"loss"``.
        was_finished: the run to resume was finished before, and nothing was done.
    """

    status: Status = "done"
    step: int = 0
    seconds: float = 0.0
    curve: list[Evaluation] = field(default_factory=list)
    target: Reached | None = None
    message: str = ""
    signal: int = 0
    parameters: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    memory: int = 0
    folder: Path | None = None
    metric: str = "accuracy"
    was_finished: bool = False

    @property
    def accuracy(self) -> float | None:
        """Of the last evaluation."""
        return self.curve[-1].accuracy if self.curve else None

    @property
    def loss(self) -> float | None:
        """Test loss of the last evaluation."""
        return self.curve[-1].loss if self.curve else None
