"""The axes of the support table, the cells that they span, and the cells that do not run."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase

from tests.support.models import MODELS

LAYERS = tuple(MODELS)
PRECISIONS = ("float32", "float64", "bf16 autocast", "fp16 autocast", "bf16 parameters")
EXECUTIONS = ("eager", "compiled")  # with backend="aot_eager"; "inductor" is the default backend
CHECKPOINTS = ("none", "reentrant", "non-reentrant")
PLAIN, *TRAINERS = FRAMEWORKS = ("plain loop", "Lightning", "Trainer", "Accelerate", "FSDP2")

#: Largest distance of a preconditioned gradient from double precision, as a share of its norm. Half
#: precision rounds to 2⁻⁹ (bfloat16) or 2⁻¹² (float16) at every operation, some of which cancel; 0.05 is
#: a cosine similarity of at least 0.998.
TOLERANCES = {
    "float64": 1e-9,
    "float32": 1e-5,
    "bf16 autocast": 0.05,
    "fp16 autocast": 0.01,
    "bf16 parameters": 0.05,
}


@dataclass(frozen=True)
class Cell:
    """One combination. Trainers, and ranks under FSDP2, run models in eager mode without checkpoints."""

    layer: str
    precision: str
    execution: str = "eager"
    checkpoints: str = "none"
    framework: str = PLAIN

    def __str__(self) -> str:
        how = [self.execution, self.checkpoints] if self.framework == PLAIN else [self.framework]
        return "/".join([self.layer, self.precision, *how])


@dataclass(frozen=True)
class Obstacle:
    """Why cells do not run, as half a sentence, and a pattern of what their test raises instead."""

    reason: str
    raises: type[Exception]
    match: str


#: By cells, in which ``*`` stands for any value. A test asserts that each of them still fails.
EXCEPTIONS: dict[Cell, Obstacle] = {
    Cell("*", "fp16 autocast", framework=framework): Obstacle(
        "Accelerate, and Trainer with it, ignores fp16 on CPUs and runs in single precision",
        AssertionError,
        "the run was in single precision",
    )
    for framework in ("Trainer", "Accelerate")
}
EXCEPTIONS[Cell("BatchNorm", "*", framework="FSDP2")] = Obstacle(
    "BatchNorm takes the means of each rank's own samples, and not those of the whole batch",
    AssertionError,
    "gradients are not those of a plain run",
)


def obstacle(cell: Cell) -> Obstacle | None:
    """What keeps a cell from running."""
    for pattern, found in EXCEPTIONS.items():
        if all(map(fnmatchcase, astuple(cell), astuple(pattern))):
            return found
    return None


def plain_cells() -> list[Cell]:
    """Every layer, precision, execution and kind of checkpoint in a plain loop."""
    return [
        Cell(layer, precision, execution, checkpoints)
        for layer in LAYERS
        for precision in PRECISIONS
        for execution in EXECUTIONS
        for checkpoints in CHECKPOINTS
    ]


def inductor_cells() -> list[Cell]:
    """Every layer with the default backend, in the two precisions that most people train in."""
    precisions = ("float32", "bf16 autocast")
    return [Cell(layer, precision, "inductor") for layer in LAYERS for precision in precisions]


def trainer_cells() -> list[Cell]:
    """Every layer and precision under every trainer, and under FSDP2."""
    return [
        Cell(layer, precision, framework=framework)
        for layer in LAYERS
        for framework in TRAINERS
        for precision in PRECISIONS
    ]


def all_cells() -> list[Cell]:
    """Every cell that has a test."""
    return [*plain_cells(), *inductor_cells(), *trainer_cells()]


def is_slow(cell: Cell) -> bool:
    """Whether a cell is left to the slow tests; compilers and trainers take most of the time.

    By default every layer is compiled with every kind of checkpoint and runs under every trainer,
    in precisions that take turns, and runs in eager mode with everything.
    """
    if cell.execution == "eager" and cell.framework == PLAIN:
        return False
    if cell.execution == "inductor":
        return True
    turn = CHECKPOINTS.index(cell.checkpoints) + FRAMEWORKS.index(cell.framework)
    turn += LAYERS.index(cell.layer)
    return cell.precision != PRECISIONS[turn % len(PRECISIONS)]
