"""Several optimizers and seeds on one recipe, one run after the other."""

from __future__ import annotations

import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from glob import escape
from pathlib import Path

from kronfac import report as pictures
from kronfac.report.read.read import Run, read_run
from kronfac.report.read.summary import reached
from kronfac.runs.errors import UserError
from kronfac.runs.events import Listener
from kronfac.train.launch import launch
from kronfac.train.launch.ranks import current
from kronfac.train.recipe.recipe import Recipe
from kronfac.train.record.folder import RunFolder, free_path, run_name
from kronfac.train.run.dry_run import dry_run
from kronfac.train.run.resume_checks import FREE, TARGETS, check_folder
from kronfac.train.run.run import Origin, choose_device, isolated, train

_DONE = "finished"


def run(
    recipe: Recipe,
    names: Sequence[str],
    options: Namespace,
    origin: Origin,
    *,
    listeners: Sequence[Listener] = (),
    log: Sequence[str] = (),
) -> int:
    """Run everything that is not done yet, then write the report; returns the exit code.

    It is that of a failure only if all runs have failed: otherwise there is something to compare.
    Optimizers take turns within each seed: a change of the machine's speed affects all of them.
    """
    ranks = current()
    folder: Path = ranks.on_first(lambda: _folder(recipe, options))
    first = recipe.train.seed
    turns = [(name, seed) for seed in range(first, first + options.seeds) for name in names]
    places = [folder / run_name(recipe.name, name, seed) for name, seed in turns]
    states: list[str] = ranks.on_first(lambda: _states(recipe, folder, places))
    left = dict.fromkeys(
        turn[0] for turn, known in zip(turns, states, strict=True) if known != _DONE
    )
    device = choose_device(options.device)
    with isolated(device, deterministic=False):
        dry_run([recipe.job(name) for name in left], ranks, device, options.data_dir)
    for (name, seed), place, known in zip(turns, places, states, strict=True):
        if known == _DONE:
            continue
        result = train(
            recipe,
            name,
            seed,
            None if known else place,
            resume=place if known else None,
            data_dir=options.data_dir,
            device=options.device,
            stop_at_target=options.stop_at_target,
            listeners=listeners,
            log=log,
            origin=origin,
        )
        if result.status == "failed" and ranks.first:
            print(f"kronfac: {result.message}", file=sys.stderr)
        if result.status == "stopped":
            if ranks.first:
                more = f" --nproc {options.nproc}" if options.nproc > 1 else ""
                print(f"continue with: kronfac compare --resume {folder}{more}")
            return 128 + result.signal
    if ranks.first:
        _tell(folder, recipe.name, names, report=not options.no_report)
    done = ranks.on_first(lambda: any(RunFolder(place).status == "done" for place in places))
    return launch.DONE if done else launch.FAILED


def _folder(recipe: Recipe, options: Namespace) -> Path:
    if options.resume is not None:
        return Path(options.resume)
    return Path(options.out or free_path(options.runs, f"{recipe.name}-compare"))


def _states(recipe: Recipe, folder: Path, places: Sequence[Path]) -> list[str]:
    """What is known of each run, after a check that all runs in the folder belong to this comparison."""
    known = [_known(place) for place in places]
    begun = [place for place, state in zip(places, known, strict=True) if state]
    for place in dict.fromkeys([*begun, *_compared(folder)]):
        _check(RunFolder(place), recipe)
    return known


def _compared(folder: Path) -> list[Path]:
    """Runs of a comparison in a folder, also those that are not asked for now: the report shows them."""
    found = sorted(path.parent for path in folder.glob("*/config.json"))
    return [path for path in found if RunFolder(path).read_config().get("comparison")]


def _check(run: RunFolder, recipe: Recipe) -> None:
    """Raise unless a run that is there is one of this recipe; a finished one keeps its target."""
    config = run.read_config()
    if config["recipe"] != recipe.name:
        raise UserError(
            f"{run.path} is of recipe {config['recipe']!r}, and here it is {recipe.name!r}; choose "
            "another folder with --out."
        )
    job = recipe.job(config["optimizer"], config["seed"])
    free = set(FREE) - set(TARGETS) if run.is_finished else set(FREE)
    check_folder(run, job, free)


def _known(place: Path) -> str:
    """Whether a run is finished or begun, or nothing."""
    if not place.exists():
        return ""
    return _DONE if RunFolder(place).is_finished else "begun"


def _tell(folder: Path, recipe: str, names: Sequence[str], report: bool) -> None:
    print("\n".join(table(folder, recipe, names)))
    if report:
        print(pictures.write([folder], folder))


def table(folder: Path, recipe: str, names: Sequence[str]) -> list[str]:
    """One line for each optimizer: medians over seeds, by the rules of the report."""
    width = max(12, *(len(name) + 2 for name in names))
    lines = [
        f"{'optimizer':<{width}}{'runs':>5}{'final':>10}{'reached':>9}{'steps':>8}{'seconds':>10}"
    ]
    for name in names:
        paths = sorted(folder.glob(f"{escape(f'{recipe}-{name}-s')}[0-9]*/events.jsonl"))
        runs = [run for path in paths if (run := read_run(path.parent)) is not None]
        marks = [reached(run) for run in runs]  # infinite for a miss
        hits = sum(math.isfinite(mark.step) for mark in marks)
        steps, seconds = _median([m.step for m in marks]), _median([m.seconds for m in marks])
        lines.append(
            f"{name:<{width}}{len(runs):>5}{_final(runs):>10}{f'{hits}/{len(runs)}':>9}"
            f"{'-' if steps is None else f'{steps:.0f}':>8}"
            f"{'-' if seconds is None else f'{seconds:.1f}':>10}"
        )
    return [*lines, "(median over seeds; steps and seconds of training to the target)"]


def _final(runs: Sequence[Run]) -> str:
    def middle(metric: str) -> float | None:
        ends = [run.finish for run in runs if run.finish is not None and run.metric == metric]
        return _median([end[metric] for end in ends if end[metric] is not None])

    accuracy, loss = middle("accuracy"), middle("loss")
    if accuracy is not None:
        return f"{accuracy:.2%}"
    return "-" if loss is None else f"{loss:.4f}"


def _median(values: Sequence[float]) -> float | None:
    middle = statistics.median(values) if values else math.inf
    return middle if math.isfinite(middle) else None
