"""What a training run is: model, data, batch, schedule and optimizers, from one TOML file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kronfac.runs.errors import UserError
from kronfac.runs.hints import advice
from kronfac.runs.timetable import Sizes, Timetable, sizes_of
from kronfac.train.recipe.options import check_options, kinds, methods, starting_line
from kronfac.train.recipe.tables import fill, to_table

#: Keys of [train] that may also stand directly in the table of an optimizer.
SHORT = ("epochs", "steps")
#: Keys of a recipe that stand outside of tables.
_TEXTS = ("description", "source", "optimizer")
#: Only one of two such keys may be given; a newer one replaces the other.
EXCLUSIVE = {
    one: other
    for keys in (
        ("epochs", "steps"),
        ("target", "target_loss"),
        ("warmup", "warmup_share"),
        ("micro_batches", "micro_batch_size"),
    )
    for one, other in (keys, keys[::-1])
}
#: More steps, samples or epochs than any run has: what is more is a slip.
_MOST = 10**12
#: Names of optimizers become names of folders.
_NAME = re.compile(r"[\w+-][\w.+-]*")
#: Above it the seeds of single steps, which are made of it, would not fit into 64 bits.
_LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class ModelPart:
    """[model]: its name; further keys are the model's own options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataPart:
    """[data]: its name, how much of it, augmentation; further keys are the source's own options.

    ``holdout`` training samples are kept apart and tested on instead of the test set.
    """

    name: str
    train: int | None = None
    test: int | None = None
    holdout: int | None = None
    augment: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("train", "test", "holdout"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"data.{name} = {value} must be at least 1; leave it out for all.")


@dataclass(frozen=True)
class TrainPart:
    """[train]: everything about the loop.

    Args:
        batch: samples of a step, on all ranks together, or pairs: from which epoch on, how many.
        epochs: how long, if ``steps`` does not say it.
        steps: how long.
        seed: of the initial weights, the order of samples and augmentation.
        target: test accuracy to be reached.
        target_loss: test loss to be reached.
        evaluate_every: epochs between evaluations; the last step is always evaluated.
        evaluate_batch: samples of one evaluation step, on all ranks together.
        label_smoothing: of the training loss.
        mixup: α of running mixup, 0 for none.
        weight_rescaling: keep the norm of weights in front of norms at ``√(2·d_out)``.
        precision: ``"bfloat16"`` runs forward and loss under autocast.
        micro_batches: parts into which each rank divides its share of a batch.
        micro_batch_size: the most samples of such a part, instead of their number.
        channels_last: memory layout of images and convolutions.
        compile: run the model through ``torch.compile``.
        clip: bound of the norm of all gradients together, 0 for none.
        deterministic: only algorithms that give the same numbers again (matters on GPUs).
        log_every: steps between events.
        checkpoint_every: epochs between checkpoints; 0 saves only at the end and when interrupted.
    """

    batch: int | Sizes
    epochs: float | None = None
    steps: int | None = None
    seed: int = 0
    target: float | None = None
    target_loss: float | None = None
    evaluate_every: float = 1.0
    evaluate_batch: int = 1000
    label_smoothing: float = 0.0
    mixup: float = 0.0
    weight_rescaling: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    micro_batches: int = 1
    micro_batch_size: int | None = None
    channels_last: bool = False
    compile: bool = False
    clip: float = 0.0
    deterministic: bool = True
    log_every: int = 10
    checkpoint_every: float = 1.0

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise UserError("[train] needs either 'epochs' or 'steps', and not both.")
        for name in ("evaluate_batch", "micro_batches", "micro_batch_size", "log_every", "steps"):
            self._at_least(name, 1)
        if isinstance(self.batch, int):
            self._at_least("batch", 1)
        sizes_of(self.batch)
        for name in ("seed", "mixup", "clip", "checkpoint_every"):
            self._at_least(name, 0)
        for name in ("epochs", "evaluate_every"):
            if (value := getattr(self, name)) is not None and not 0 < value <= _MOST:
                raise UserError(f"train.{name} = {value} must be a positive number of epochs.")
        if self.mixup and not 1e-3 <= self.mixup <= 1e3:
            raise UserError(f"train.mixup = {self.mixup} must be 0, or from 0.001 to 1000.")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"train.label_smoothing = {self.label_smoothing} must be in [0, 1).")
        if self.seed > _LARGEST_SEED:
            raise UserError(f"train.seed = {self.seed} must be at most {_LARGEST_SEED}.")
        if self.target is not None and not 0 < self.target <= 1:
            raise UserError(f"train.target = {self.target} must be an accuracy in (0, 1].")
        if self.target is not None and self.target_loss is not None:
            raise UserError("[train] has both 'target' and 'target_loss'; give one of them.")
        if self.micro_batches > 1 and self.micro_batch_size is not None:
            raise UserError(
                "[train] has both 'micro_batches' and 'micro_batch_size'; give one of them."
            )
        if self.target_loss is not None and not 0 < self.target_loss < math.inf:
            raise UserError(f"train.target_loss = {self.target_loss} must be a positive number.")

    def num_steps(self, timetable: Timetable) -> int:
        """How long it is, whichever of the two says it."""
        return self.steps or max(1, round(timetable.step(self.epochs or 0.0)))

    def num_parts(self, share: int) -> int:
        """Micro-batches of a rank's share of a batch."""
        return (
            self.micro_batches
            if self.micro_batch_size is None
            else -(-share // self.micro_batch_size)
        )

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"train.{name} = {value} must be at least {least}.")
        if value is not None and value > _MOST:
            raise UserError(f"train.{name} = {value} must be at most {_MOST}.")


@dataclass(frozen=True)
class SchedulePart:
    """[schedule]: how the learning rate changes; see :mod:`kronfac.train.optim.schedules`.

    Args:
        shape: ``"constant"``, ``"linear"``, ``"cosine"``, ``"polynomial"`` or ``"steps"``.
        warmup: epochs of linear rise.
        warmup_share: the same as a share of all epochs.
        warmup_from: the factor at which it begins.
        start: epoch at which the fall begins.
        end: epoch at which it ends.
        power: of ``"polynomial"``.
        milestones: epochs of ``"steps"``.
        gamma: factor of one step down.
        tied_momentum: let momentum fall with the learning rate.
        batch_scaling: how the learning rate follows a batch that changes: not at all (``"none"``),
            in proportion to it (``"linear"``) or to its square root (``"sqrt"``).
    """

    shape: str = "linear"
    warmup: float = 0.0
    warmup_share: float = 0.0
    warmup_from: float = 0.0
    start: float | None = None
    end: float | None = None
    power: float | None = None
    milestones: tuple[float, ...] | None = None
    gamma: float | None = None
    tied_momentum: bool = False
    batch_scaling: Literal["none", "linear", "sqrt"] = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < math.inf:
            raise UserError(f"schedule.warmup = {self.warmup} must be 0 epochs or more.")
        if not 0 <= self.warmup_share < 1:
            raise UserError(f"schedule.warmup_share = {self.warmup_share} must be in [0, 1).")
        if self.warmup and self.warmup_share:
            raise UserError("[schedule] has both 'warmup' and 'warmup_share'; give one of them.")


@dataclass(frozen=True)
class OptimizerPart:
    """[optimizers.NAME]: its kind and options, and what it changes in [train] and [schedule]."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A whole recipe; :meth:`job` is one run of it."""

    name: str
    description: str
    source: str
    optimizer: str
    model: ModelPart
    data: DataPart
    train: TrainPart
    schedule: SchedulePart
    optimizers: Mapping[str, OptimizerPart]

    @classmethod
    def from_dict(cls, name: str, content: Mapping[str, Any]) -> Recipe:
        """Check the content of a file; anything wrong is a :class:`UserError`."""
        if not content:
            raise UserError(
                f"recipe {name!r} is empty: it needs [model], [data], [train] and [optimizers.NAME]; "
                "`kronfac recipes digits` prints one to begin with."
            )
        known = (*_TEXTS, "model", "data", "train", "schedule")
        for key in content:
            if key not in (*known, "optimizers"):
                hint = advice(key, (*known, "optimizers"))
                raise UserError(f"unknown key {key!r} in recipe {name!r}; {hint}")
        for key in _TEXTS:
            if not isinstance(content.get(key, ""), str):
                raise UserError(f"{key} = {content[key]!r} of recipe {name!r} must be a text.")
        parts = {key: _table(content, key, name) for key in ("model", "data", "train", "schedule")}
        train, schedule = parts["train"], parts["schedule"]
        common = fill(TrainPart, train, "train"), fill(SchedulePart, schedule, "schedule")
        optimizers = {
            one: _optimizer(one, _table(table, one, f"{name}, [optimizers]"), train, schedule)
            for table in [_table(content, "optimizers", name)]
            for one in table
        }
        if not optimizers:
            raise UserError(f"recipe {name!r} has no [optimizers.NAME]; give at least one.")
        default = content.get("optimizer", next(iter(optimizers)))
        recipe = cls(
            name=name,
            description=content.get("description", ""),
            source=content.get("source", "kronfac"),
            optimizer=default,
            model=fill(ModelPart, parts["model"], "model"),
            data=fill(DataPart, parts["data"], "data"),
            train=common[0],
            schedule=common[1],
            optimizers=optimizers,
        )
        recipe.check_optimizer(default)
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """The content of a file that gives this recipe."""
        optimizers: dict[str, Any] = {}
        for name, one in self.optimizers.items():
            table: dict[str, Any] = {} if one.kind == name else {"kind": one.kind}
            table |= dict(one.options)
            table |= {"train": dict(one.train)} if one.train else {}
            table |= {"schedule": dict(one.schedule)} if one.schedule else {}
            optimizers[name] = table
        return {
            "description": self.description,
            "source": self.source,
            "optimizer": self.optimizer,
            "model": to_table(self.model),
            "data": to_table(self.data),
            "train": to_table(self.train),
            "schedule": to_table(self.schedule),
            "optimizers": optimizers,
        }

    @property
    def all_optimizers(self) -> tuple[str, ...]:
        """Its own optimizers, then all further methods, each with the line to start with."""
        return tuple(dict.fromkeys([*self.optimizers, *methods()]))

    def check_optimizer(self, name: str) -> None:
        """Raise unless there is a table or a method of this name."""
        if name not in self.all_optimizers:
            hint = advice(name, self.all_optimizers)
            raise UserError(f"recipe {self.name!r} has no optimizer {name!r}; {hint}")

    def part_of(self, name: str) -> OptimizerPart:
        """An optimizer's own table, or that of a method with the line to start with."""
        self.check_optimizer(name)
        return self.optimizers.get(name) or OptimizerPart(name, name, starting_line(name))

    def job(self, optimizer: str | None = None, seed: int | None = None) -> Job:
        """One run: with this optimizer's own changes of [train] and [schedule]."""
        name = self.optimizer if optimizer is None else optimizer
        chosen = self.part_of(name)
        train = fill(TrainPart, _merged(to_table(self.train), chosen.train), "train")
        schedule = fill(SchedulePart, _merged(to_table(self.schedule), chosen.schedule), "schedule")
        if seed is not None:
            train = replace(train, seed=seed)
        return Job(self.name, self.model, self.data, train, schedule, chosen)


@dataclass(frozen=True)
class Job:
    """One run of a recipe: one optimizer, one seed, nothing left to choose."""

    recipe: str
    model: ModelPart
    data: DataPart
    train: TrainPart
    schedule: SchedulePart
    optimizer: OptimizerPart

    @property
    def seed(self) -> int:
        """The seed of everything random."""
        return self.train.seed

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for comparison and for config.json."""
        return {
            "recipe": self.recipe,
            "model": to_table(self.model),
            "data": to_table(self.data),
            "train": to_table(self.train),
            "schedule": to_table(self.schedule),
            "optimizer": {
                "name": self.optimizer.name,
                "kind": self.optimizer.kind,
                **self.optimizer.options,
            },
        }


def _table(content: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    value = content.get(key, {})
    if not isinstance(value, Mapping):
        raise UserError(f"{key!r} of recipe {name!r} is {value!r}; it must be a table, [{key}].")
    return dict(value)


def _merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A table with changes; of two keys that exclude each other the newer one stays."""
    kept = {key: value for key, value in table.items() if EXCLUSIVE.get(key) not in changes}
    return {**kept, **changes}


def _optimizer(
    name: str, table: dict[str, Any], train: Mapping[str, Any], schedule: Mapping[str, Any]
) -> OptimizerPart:
    where = f"optimizers.{name}"
    if not _NAME.fullmatch(name):
        raise UserError(
            f"[{where}]: {name!r} cannot be the name of an optimizer; use letters, digits, '-', '_'."
        )
    kind = table.pop("kind", name)
    if kind not in kinds():
        hint = advice(str(kind), kinds())
        raise UserError(f"unknown kind {kind!r} of optimizer in [{where}]; {hint}")
    if kind in methods() and "lr" not in table:
        table = {**starting_line(kind), **table}
    changes = _table({"train": table.pop("train", {})}, "train", where)
    changes |= {key: table.pop(key) for key in SHORT if key in table}
    shapes = _table({"schedule": table.pop("schedule", {})}, "schedule", where)
    part = OptimizerPart(name, kind, table, changes, shapes)
    # Keys and types that are wrong in a table are refused when the recipe is read, not when it is used.
    fill(TrainPart, _merged(train, changes), f"{where}.train" if changes else "train")
    fill(SchedulePart, _merged(schedule, shapes), f"{where}.schedule" if shapes else "schedule")
    _check_options(part)
    return part


def _check_options(part: OptimizerPart) -> None:
    check_options(part.kind, part.options, f"optimizers.{part.name}")
