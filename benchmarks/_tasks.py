"""What optimizers are compared on: the recipes of the same names, their targets and search spaces.

Every optimizer has the same budget: as many learning rates, as many lengths of the schedule, the same
seeds, the same shape of schedule. What a table of the recipe says beside the learning rate (momentum,
weight decay, damping, intervals) is the usual advice for that optimizer, the same for both image tasks.
"""

from dataclasses import dataclass

OPTIMIZERS = ("sgd", "adamw", "muon", "soap", "kfac")


@dataclass(frozen=True)
class Task:
    """A recipe with a search space: learning rates of each optimizer, steps of a schedule."""

    name: str
    rates: dict[str, tuple[float, ...]]
    lengths: tuple[int, ...]
    first_length: int  # at which learning rates are tried
    margin: float  # by which tuning must pass the target, so that other seeds reach it too
    #: Learning rate of the parameters that are no matrices, as a share of the matrices'.
    other: dict[str, float]
    seeds: tuple[int, ...] = (100,)  # of tuning; the tables' begin at 0

    def changes(self, optimizer: str, rate: float) -> tuple[tuple[str, float], ...]:
        """What a learning rate sets in the optimizer's table."""
        if optimizer not in self.other:
            return (("lr", rate),)
        return ("lr", rate), ("other_lr", rate * self.other[optimizer])


_IMAGE_RATES = {
    "sgd": (0.1, 0.2, 0.4, 0.8),
    "adamw": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "muon": (0.02, 0.04, 0.08, 0.16),
    "soap": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "kfac": (0.05, 0.1, 0.2, 0.4),
}
_TEXT_RATES = {
    "sgd": (0.05, 0.1, 0.2, 0.4),
    "adamw": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "muon": (0.01, 0.02, 0.04, 0.08),
    "soap": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "kfac": (0.05, 0.1, 0.2, 0.4),
}
#: Recipes of the big table; the demo's, digits, is tuned in the same way.
TABLE = ("cifar10", "fashion-mnist", "text")
_LENGTHS = (80, 120, 160, 220, 300, 400, 560, 720)

_IMAGE_OTHERS = {"muon": 0.125}
_DIGITS_LENGTHS = (40, 60, 80, 120, 160, 240, 320)
_TEXT_LENGTHS = (70, 100, 140, 200, 280, 400)

TASKS = {
    task.name: task
    for task in (
        Task("digits", _IMAGE_RATES, _DIGITS_LENGTHS, 80, 0.01, {"muon": 0.125}, (100, 101, 102)),
        Task("cifar10", _IMAGE_RATES, _LENGTHS, 220, 0.02, _IMAGE_OTHERS),
        Task("fashion-mnist", _IMAGE_RATES, _LENGTHS, 220, 0.02, _IMAGE_OTHERS),
        Task("text", _TEXT_RATES, _TEXT_LENGTHS, 200, 0.06, {"muon": 0.25}),
    )
}
