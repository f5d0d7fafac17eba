"""How a run was started, read from its folder: ``--resume`` needs no other flag."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kronfac.runs.errors import UserError
from kronfac.train.recipe import files as recipe_files
from kronfac.train.recipe.recipe import Recipe
from kronfac.train.record.folder import RunFolder, last_run, run_name

#: What is trained when nothing is named.
DEFAULT = "digits"


@dataclass(frozen=True)
class Known:
    """How the run to resume was started; empty for a new run."""

    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changes(self) -> list[str]:
        """Changes of the recipe that it was started with."""
        return [str(one) for one in self.config.get("changes", [])]

    @property
    def file(self) -> str | None:
        """The recipe, as it was named."""
        return self.config.get("file") or self.config.get("recipe")

    @property
    def kept(self) -> dict[str, Any]:
        """The recipe's content and flags; there are folders that have none."""
        return dict(self.config.get("resume", {}))

    def recipe(self, name: str | None, changes: Sequence[str]) -> Recipe:
        """The recipe of this name, or else the one that the folder keeps, with further changes."""
        content = self.kept.get("recipe")
        if name is None and isinstance(content, dict):
            return recipe_files.change(Recipe.from_dict(self.config["recipe"], content), changes)
        return recipe_files.load(name or self.file or DEFAULT, [*self.changes, *changes])


def complete(options: Namespace) -> Known:
    """Fill in optimizer, seed and flags of the run to resume, unless they are given."""
    known = Known()
    if options.resume is not None:
        folder = _named(options.resume) if options.resume else _last(options)
        config = RunFolder(folder).read_config()
        options.optimizer = options.optimizer or config["optimizer"]
        options.seed = config["seed"] if options.seed is None else options.seed
        known = Known(folder, config)
    _complete_flags(options, known)
    return known


def complete_comparison(options: Namespace) -> Known:
    """The same for a folder of ``kronfac compare``: optimizers, how many seeds, and flags."""
    known = Known()
    if options.resume is not None:
        known = Known(options.resume, _newest(options.resume))
    others = known.config.get("comparison") or {}
    if options.optimizers is None and "optimizers" in others:
        options.optimizers = ",".join(others["optimizers"])
    options.seeds = others.get("seeds", 1) if options.seeds is None else options.seeds
    _complete_flags(options, known)
    return known


def _complete_flags(options: Namespace, known: Known) -> None:
    kept = known.kept
    if options.recipe is None and options.resume is None:
        options.recipe = DEFAULT
    if options.data_dir is None and kept.get("data_dir"):
        options.data_dir = Path(kept["data_dir"])
    if options.stop_at_target is None:
        options.stop_at_target = bool(kept.get("stop_at_target", False))
    if options.log is None:
        options.log = ",".join(kept.get("log", []))


def _named(name: str) -> Path:
    folder = Path(name)
    if not folder.exists() and name in recipe_files.shipped():
        raise UserError(
            f"--resume {name}: {name!r} is a recipe and no run folder; to resume its last run, "
            f"write `kronfac train {name} --resume`."
        )
    return folder


def _last(options: Namespace) -> Path:
    recipe = recipe_files.load(options.recipe or DEFAULT, options.changes)
    job = recipe.job(options.optimizer, options.seed)
    return last_run(options.runs, run_name(recipe.name, job.optimizer.name, job.seed))


def _newest(folder: Path) -> dict[str, Any]:
    found = list(folder.glob("*/config.json"))
    if not found:
        raise UserError(f"{folder} holds no runs: nothing can be resumed.")
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    return RunFolder(newest.parent).read_config()
