"""What each command does."""

from __future__ import annotations

import os
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kronfac.runs.errors import UserError
from kronfac.runs.events import Listener
from kronfac.train import comparison, data_sets, planning
from kronfac.train.launch import group, launch
from kronfac.train.launch.ranks import current
from kronfac.train.optim.build import missing_package
from kronfac.train.recipe import files as recipe_files
from kronfac.train.recipe.recipe import Job, Recipe
from kronfac.train.record import loggers
from kronfac.train.record.folder import RunFolder, free_path, run_name
from kronfac.train.run import progress, resuming
from kronfac.train.run.result import Result
from kronfac.train.run.run import Origin, check_device
from kronfac.train.run.run import train as run_recipe
from kronfac.train.run.setup import check_batch


def train(options: Namespace) -> int:
    """``kronfac train``."""
    _check_folders(options)
    known = resuming.complete(options)
    changes = _changes(options)
    recipe = known.recipe(options.recipe, changes)
    job = recipe.job(options.optimizer, options.seed)
    _check_target(options, [job])
    if options.out is not None:
        RunFolder(options.out).check_new()
    if (code := _on_ranks(options, [job])) is not None:
        return code
    with group.joined():
        out = None if known.folder else options.out or _new_folder(recipe, options)
        result = run_recipe(
            recipe,
            options.optimizer,
            options.seed,
            out,
            resume=known.folder,
            data_dir=options.data_dir,
            device=options.device,
            stop_at_target=options.stop_at_target,
            listeners=_listeners(options),
            log=_names(options.log, "--log"),
            origin=Origin([*known.changes, *changes], options.recipe or known.file),
        )
    if result.was_finished and not options.quiet and _is_first():
        print(progress.finished(result, recipe.job(options.optimizer, options.seed).train))
    return _report_end(result)


def compare(options: Namespace) -> int:
    """``kronfac compare``."""
    _check_folders(options)
    known = resuming.complete_comparison(options)
    changes = _changes(options)
    recipe = known.recipe(options.recipe, changes)
    chosen = {None: recipe.optimizers, "all": recipe.all_optimizers}.get(options.optimizers)
    left_out = [] if chosen is None else _unusable(recipe)
    names = [name for name in chosen or () if name not in left_out]
    names = names if chosen is not None else _names(options.optimizers, "--optimizers")
    if not names:
        raise UserError(f"--optimizers {options.optimizers!r} names none; leave it out for all.")
    for name in names:
        recipe.check_optimizer(name)
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds} must be at least 1.")
    last = recipe.train.seed + options.seeds - 1  # the largest, which must be a seed as well
    jobs = [recipe.job(name, last) for name in names]
    _check_target(options, jobs)
    if options.out is not None:
        RunFolder(options.out).check_new()
    if (code := _on_ranks(options, jobs)) is not None:
        return code
    with group.joined():
        if left_out and current().first:
            print("\n".join(_left_out(recipe, name) for name in left_out))
        return comparison.run(
            recipe,
            names,
            options,
            Origin(
                [*known.changes, *changes],
                options.recipe or known.file,
                {"optimizers": names, "seeds": options.seeds},
            ),
            listeners=_listeners(options),
            log=_names(options.log, "--log"),
        )


def report(options: Namespace) -> int:
    """``kronfac report``."""
    from kronfac import report as pictures

    out = options.out or (options.run[0] if len(options.run) == 1 else Path("report"))
    print(pictures.write(options.run, out, title=options.title))
    return 0


def recipes(options: Namespace) -> int:
    """``kronfac recipes``."""
    if options.name is not None:
        print(recipe_files.text(options.name), end="")
        return 0
    for name in recipe_files.shipped():
        print(name)
        about = recipe_files.load(name).description
        print(textwrap.fill(about, 80, initial_indent="    ", subsequent_indent="    "))
    return 0


def data(options: Namespace) -> int:
    """``kronfac data``."""
    if options.name is None:
        print("\n".join(data_sets.overview(options.data_dir)))
    else:
        print(data_sets.fetch(options.name, options.data_dir))
    return 0


def plan(options: Namespace) -> int:
    """``kronfac plan``."""
    recipe = recipe_files.load(options.recipe, options.changes)
    lines = planning.plan(recipe, options.ranks, options.gbit, options.latency, options.data_dir)
    print("\n".join(lines))
    return 0


# --- what train and compare share ----------------------------------------------------------------


def _changes(options: Namespace) -> list[str]:
    """Short flags are changes as well, and come last."""
    changes = list(options.changes)
    if options.epochs is not None:
        changes.append(f"train.epochs={options.epochs}")
    if options.batch is not None:
        changes.append(f"train.batch={options.batch}")
    if getattr(options, "lr", None) is not None:
        name = options.optimizer or recipe_files.load(options.recipe, changes).optimizer
        changes.append(f"optimizers.{name}.lr={options.lr}")
    return changes


def _unusable(recipe: Recipe) -> list[str]:
    """Optimizers whose packages are not installed, unless that leaves none."""
    found = [name for name, one in recipe.optimizers.items() if missing_package(one.kind)]
    return found if len(found) < len(recipe.optimizers) else []


def _left_out(recipe: Recipe, name: str) -> str:
    package = missing_package(recipe.optimizers[name].kind)
    return f"{name} is left out: it needs the package {package} (pip install {package})"


def _names(text: str, flag: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{flag} {text!r} names {name!r} more than once; name each once.")
    return names


def _check_folders(options: Namespace) -> None:
    """Refuse flags that exclude each other, and say where runs go unless a flag did."""
    if options.resume is not None and options.out is not None:
        raise UserError("--out starts a new run and --resume continues one; give one of them.")
    if options.runs is not None and (options.out is not None or options.resume):
        other = "--out" if options.out is not None else "--resume"
        raise UserError(f"--runs and {other} both say which folder; give one of them.")
    options.runs = Path("runs") if options.runs is None else options.runs


def _check_target(options: Namespace, jobs: Sequence[Job]) -> None:
    aims = any(one.train.target is not None or one.train.target_loss is not None for one in jobs)
    if options.stop_at_target and not aims:
        raise UserError(
            "--stop-at-target needs a target; set train.target or train.target_loss in the recipe."
        )


def _listeners(options: Namespace) -> list[Listener]:
    return [progress.warnings_only] if options.quiet else [progress.make()]


def _on_ranks(options: Namespace, jobs: Sequence[Job]) -> int | None:
    """Start the ranks and return their exit code; ``None`` if this process trains itself.

    Arguments are checked first, because ranks take seconds to start.
    """
    if options.nproc < 1:
        raise UserError(f"--nproc {options.nproc} must be at least 1.")
    if options.nproc == 1 or group.LAUNCHED in os.environ:
        return None
    if group.world_size() > 1:
        raise UserError("--nproc starts ranks by itself; leave it out under torchrun.")
    launch.check_count(options.nproc)
    for job in jobs:
        check_batch(job, options.nproc)
    loggers.check(_names(options.log, "--log"))
    if options.device is not None:
        check_device(options.device)
    return launch.launch(options.arguments, options.nproc)


def _new_folder(recipe: Recipe, options: Namespace) -> Path:
    job = recipe.job(options.optimizer, options.seed)
    name = run_name(recipe.name, job.optimizer.name, job.seed)
    path: Path = current().on_first(lambda: free_path(options.runs, name))
    return path


def _is_first() -> bool:
    """Whether this rank prints, also after it has left the group."""
    return group.world_size() == 1 or int(os.environ["RANK"]) == 0


def _report_end(result: Result) -> int:
    if not _is_first():
        return _code(result)
    if result.status == "failed":
        print(f"kronfac: {result.message}", file=sys.stderr)
    print(result.folder)
    return _code(result)


def _code(result: Result) -> int:
    if result.status == "stopped":
        return 128 + result.signal
    return launch.FAILED if result.status == "failed" else launch.DONE
