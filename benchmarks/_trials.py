"""One training run of a recipe with some settings, as the numbers that benchmarks keep."""

from dataclasses import asdict, dataclass
from typing import Any

from kronfac.train.recipe import files as recipe_files
from kronfac.train.run.run import train

#: Training samples that tuning tests on (fewer of the small set of digits); the test set stays unseen.
HOLDOUT = 2000
_DIGITS = 300


@dataclass(frozen=True)
class Trial:
    """A run: `changes` are keys of the optimizer's table, such as lr; `alone`, if they are all of it."""

    task: str
    optimizer: str
    steps: int
    seed: int
    changes: tuple[tuple[str, Any], ...] = ()
    batch: int | None = None
    alone: bool = False

    def recipe(self, *, holdout: bool = False) -> Any:
        """The recipe with this trial's settings."""
        recipe = recipe_files.load(self.task)
        changes: dict[str, Any] = {"train.steps": self.steps}
        if self.batch is not None:
            changes["train.batch"] = self.batch
        if holdout:
            changes["data.holdout"] = _DIGITS if recipe.data.name == "digits" else HOLDOUT
            if recipe.data.train is not None:
                changes["data.train"] = recipe.data.train + HOLDOUT
        if self.alone:
            changes[f"optimizers.{self.optimizer}"] = {}
        for key, value in self.changes:
            changes[f"optimizers.{self.optimizer}.{key}"] = value
        return recipe_files.change(recipe, changes)


def run(
    trial: Trial,
    *,
    data_dir: str | None,
    holdout: bool = False,
    only_end: bool = False,
    evaluate_every: float | None = None,
) -> dict[str, Any]:
    """Train and return plain numbers; a loss that is not finite counts as a miss."""
    recipe = trial.recipe(holdout=holdout)
    every = 1e6 if only_end else evaluate_every
    if every is not None:
        recipe = recipe_files.change(recipe, {"train.evaluate_every": every})
    result = train(recipe, trial.optimizer, trial.seed, data_dir=data_dir)
    last = result.curve[-1] if result.curve and result.status == "done" else None
    return {
        **asdict(trial),
        "changes": dict(trial.changes),
        "status": result.status,
        "accuracy": last.accuracy if last else None,
        "loss": last.loss if last else None,
        "seconds": round(result.seconds, 2),
        "curve": [
            [e.step, round(e.seconds, 2), e.accuracy, round(e.loss, 4)] for e in result.curve
        ],
        "phases": {name: round(s, 3) for name, s in result.phases.items()},
        "memory": result.memory,
        "reached": None if result.target is None else asdict(result.target),
    }
