"""What the folder of a run says about how it was started, so that nobody has to say it again."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from kronfac.train import recipe_files
from kronfac.train.errors import UserError
from kronfac.train.folder import RunFolder, last_run, run_name

#: What is trained when nothing is named.
DEFAULT = "digits"


def complete(options: Namespace) -> tuple[Path | None, list[str]]:
    """Fill in what a folder to go on with knows: recipe, optimizer and seed, unless they are given.

    Returns the folder, if there is one, and the changes of the recipe that it was started with.
    """
    if options.resume is None:
        options.recipe = options.recipe or DEFAULT
        return None, []
    folder = _named(options.resume) if options.resume else _last(options)
    config = RunFolder(folder).read_config()
    options.recipe = options.recipe or config.get("file") or config["recipe"]
    options.optimizer = options.optimizer or config["optimizer"]
    options.seed = config["seed"] if options.seed is None else options.seed
    return folder, _changes(config)


def complete_comparison(options: Namespace) -> list[str]:
    """The same for a folder of ``kronfac compare``: recipe, optimizers and how many seeds."""
    config = {} if options.resume is None else _newest(options.resume)
    known = config.get("comparison") or {}
    options.recipe = options.recipe or config.get("file") or config.get("recipe") or DEFAULT
    if options.optimizers is None and "optimizers" in known:
        options.optimizers = ",".join(known["optimizers"])
    options.seeds = known.get("seeds", 1) if options.seeds is None else options.seeds
    return _changes(config)


def _named(name: str) -> Path:
    folder = Path(name)
    if not folder.exists() and name in recipe_files.shipped():
        raise UserError(
            f"--resume {name}: {name!r} is a recipe and no run folder; to go on with its last run, "
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
        raise UserError(f"{folder} holds no runs, so that nothing can be resumed.")
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    return RunFolder(newest.parent).read_config()


def _changes(config: dict[str, Any]) -> list[str]:
    return [str(one) for one in config.get("changes", [])]
