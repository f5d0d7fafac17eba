"""When a run reaches its target: at the first evaluation that is good enough."""

from __future__ import annotations

from collections.abc import Iterable

from kronfac.train.recipe.recipe import TrainPart
from kronfac.train.run.evaluation import Evaluation
from kronfac.train.run.result import Reached


def first_reached(train: TrainPart, curve: Iterable[Evaluation]) -> Reached | None:
    """The first evaluation that meets the current target, which may have changed since."""
    found = next((one for one in curve if _meets(train, one)), None)
    return None if found is None else Reached(found.step, found.seconds)


def _meets(train: TrainPart, found: Evaluation) -> bool:
    if train.target_loss is not None and found.loss <= train.target_loss:
        return True
    return train.target is not None and found.accuracy >= train.target
