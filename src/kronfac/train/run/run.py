"""``train``: one run of a recipe, in this process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kronfac.optimizer.base import Preconditioned
from kronfac.runs.errors import UserError
from kronfac.runs.events import EventFile, Listener, Recorder
from kronfac.train.launch.ranks import current
from kronfac.train.launch.signals import Interruption
from kronfac.train.optim.composite import Composite, kfac_of
from kronfac.train.recipe.options import method_name
from kronfac.train.recipe.recipe import Job, Recipe
from kronfac.train.record import environment, loggers
from kronfac.train.record.folder import RunFolder, as_json
from kronfac.train.record.layer_table import describe_layers
from kronfac.train.record.memory import forget_peak
from kronfac.train.run import checkpointing, finished, resume_checks
from kronfac.train.run.loop import Loop
from kronfac.train.run.result import Result
from kronfac.train.run.setup import Setup, prepare


@dataclass(frozen=True)
class Origin:
    """How a run was started, for its ``config.json``.

    Args:
        changes: of the recipe.
        file: the recipe, as it was named.
        comparison: which optimizers and how many seeds there are beside this one.
        command: the command line.
    """

    changes: Sequence[str] = ()
    file: str | None = None
    comparison: Mapping[str, Any] | None = None
    command: Sequence[str] = field(default_factory=lambda: list(sys.argv))


def train(
    recipe: Recipe,
    optimizer: str | None = None,
    seed: int | None = None,
    out: Path | str | None = None,
    *,
    resume: Path | str | None = None,
    data_dir: Path | str | None = None,
    device: str | torch.device | None = None,
    stop_at_target: bool = False,
    listeners: Iterable[Listener] = (),
    log: Sequence[str] = (),
    origin: Origin | None = None,
) -> Result:
    """Run a recipe with one optimizer and one seed.

    Args:
        recipe: what to train; :func:`kronfac.train.recipe.files.load` reads one.
        optimizer: a table of the recipe; by default the one that it names.
        seed: by default the recipe's.
        out: the run folder to write, which must not exist; without it nothing is written.
        resume: a run folder to resume instead, bit for bit.
        data_dir: where data sets are.
        device: by default a GPU if there is one.
        stop_at_target: end when the recipe's target is reached.
        listeners: called with every event, on the first rank.
        log: names of :data:`kronfac.train.record.loggers.LOGGERS`.
        origin: what ``config.json`` records about the start.

    With a folder, SIGINT, SIGTERM and SIGHUP end the run with a checkpoint after the current step. A
    run to resume that has nothing left to do is left as it is.
    """
    job = recipe.job(optimizer, seed)
    folder = _folder(out, resume)
    loggers.check(log)
    ranks, where = current(), choose_device(device)
    saved = None
    if folder and resume:
        saved = ranks.on_first(lambda: _saved(folder, job))
        done = ranks.on_first(lambda: finished.result_of(folder, saved, job, stop_at_target))
        if done is not None:
            return done  # type: ignore[no-any-return]
    forget_peak(where)
    with isolated(where, job.train.deterministic):
        setup = prepare(job, ranks, where, None if data_dir is None else Path(data_dir))
        run = _Run(setup, folder, stop_at_target, list(listeners))
        run.restore(saved)
        if folder is not None and saved == {}:
            run.lost = ranks.on_first(lambda: folder.last_saved())
        if folder is not None:
            kept = _kept(recipe, data_dir, stop_at_target, log)
            config = _config(job, origin or Origin(), kept)
            ranks.on_first(lambda: run.open(resume is None, log, config))
        return run.go()


class _Run:
    """A loop with its folder."""

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder | None,
        stop_at_target: bool,
        listeners: list[Listener],
    ) -> None:
        self.setup, self.folder = setup, folder
        self.file: EventFile | None = None
        self.record = Recorder(listeners if setup.ranks.first else [])
        self.interruption = Interruption()
        self.resumed: int | None = None
        #: The step of a checkpoint that was saved and is gone.
        self.lost: int | None = None
        self.loop = Loop(
            setup,
            self.record,
            signal=self.interruption,
            save=None if folder is None else self._save,
            stop_at_target=stop_at_target,
        )

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Resume from a checkpoint; without one, start from step 0."""
        if saved and self.folder is not None:
            checkpointing.restore(self.loop, saved, self.folder.checkpoint)
        if saved is not None:
            self.resumed = self.loop.step

    def open(self, new: bool, log: Sequence[str], config: dict[str, Any]) -> None:
        """Create the folder, or reopen it; only on the first rank."""
        assert self.folder is not None
        setup, folder = self.setup, self.folder
        if new:
            around = environment.describe(setup.ranks, setup.device, setup.source)
            folder.create(
                {
                    "config.json": as_json(config),
                    "environment.json": as_json(around),
                    "summary.txt": _summary(setup) + "\n",
                }
            )
        made = [loggers.make(name, folder.path, config) for name in log]
        self.file = EventFile(folder.events)
        self.record.listeners[:0] = [self.file, *made]

    def go(self) -> Result:
        """Run the loop; every end, also an exception, writes a last event."""
        try:
            handling = self.interruption if self.folder is not None else nullcontext()
            with handling, self._noted_warnings():
                self.record("start", **self._start_fields())
                self._note_lost()
                result = self.loop.run(self._describe)
        except BaseException as error:
            self._note_failure(error)
            raise
        finally:
            if self.file is not None:
                self.file.close()
        result.folder = None if self.folder is None else self.folder.path
        return result

    def _save(self, loop: Loop) -> None:
        assert self.folder is not None
        checkpointing.save(self.folder.checkpoint, loop)

    def _start_fields(self) -> dict[str, Any]:
        setup, job = self.setup, self.setup.job
        return {
            "recipe": job.recipe,
            "optimizer": job.optimizer.name,
            "kind": job.optimizer.kind,
            "method": method_name(job.optimizer.kind),
            "seed": job.seed,
            "world": setup.ranks.size,
            "parameters": self.loop.result.parameters,
            "steps": setup.steps,
            "epochs": setup.timetable.epoch(setup.steps),
            "train_samples": setup.source.num_train,
            "batch": job.train.batch,
            "target": job.train.target if job.train.target_loss is None else job.train.target_loss,
            "metric": setup.metric,
            "samples": setup.source.kind,
            "resumed": self.resumed,
        }

    def _describe(self) -> None:
        """Record what K-FAC did with each layer."""
        if (kfac := kfac_of(self.setup.optimizer)) is not None:
            self.record("layers", **describe_layers(kfac, self.loop.clock.layers))

    def _note_lost(self) -> None:
        if self.lost is not None and self.folder is not None:
            self.record(
                "warning",
                step=0,
                message=f"{self.folder.checkpoint} of step {self.lost} is gone: the run starts again "
                "at step 0.",
            )

    def _note_failure(self, error: BaseException) -> None:
        """Write the last event; a failure to write must not hide the error that ended the run."""
        message = " ".join(str(error).split()) or type(error).__name__
        with suppress(UserError, ValueError):
            self.record("failure", step=self.loop.step, message=message)

    @contextmanager
    def _noted_warnings(self) -> Iterator[None]:
        """Make warnings events, for those who listen."""
        if not self.record.listeners:
            yield
            return
        with warnings.catch_warnings():

            def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
                self.record("warning", step=self.loop.step, message=str(message))

            warnings.showwarning = show
            yield


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """The device of this rank."""
    if device is not None:
        return _named_device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_device(device: str | torch.device) -> torch.device:
    """The device of this name, without waking it; raise unless this machine has it."""
    unknown = f"--device {str(device)!r} is unknown; choose cpu or cuda."
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UserError(unknown) from error
    if chosen.type == "cpu":
        return chosen
    if chosen.type != "cuda":
        raise UserError(unknown)
    if not torch.cuda.is_available():
        raise UserError("--device cuda: there is no usable GPU; choose cpu.")
    if chosen.index is not None and chosen.index >= torch.cuda.device_count():
        raise UserError(f"--device {device}: there are only {torch.cuda.device_count()} GPUs.")
    return chosen


def _named_device(device: str | torch.device) -> torch.device:
    chosen = check_device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


@contextmanager
def isolated(device: torch.device, deterministic: bool) -> Iterator[None]:
    """Leave torch's random numbers and settings as they were; CPUs are deterministic anyway."""
    gpus = [device] if device.type == "cuda" else []
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.random.fork_rng(devices=gpus):
        if deterministic and gpus:
            torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)


def _folder(out: Path | str | None, resume: Path | str | None) -> RunFolder | None:
    if out is not None and resume is not None:
        raise UserError("give either an output folder or one to resume, and not both.")
    if resume is not None:
        return RunFolder(Path(resume))
    if out is None:
        return None
    folder = RunFolder(Path(out))
    folder.check_new()
    return folder


def _saved(folder: RunFolder, job: Job) -> dict[str, Any]:
    """The checkpoint of a folder; nothing if the run ended before its first one."""
    resume_checks.check_folder(folder, job)
    if not folder.checkpoint.is_file():
        return {}
    content = checkpointing.load(folder.checkpoint)
    resume_checks.check_job(content["job"], job, folder.checkpoint)
    return content


def _kept(
    recipe: Recipe, data_dir: Path | str | None, stop_at_target: bool, log: Sequence[str]
) -> dict[str, Any]:
    """What a resume needs, from any directory and without the recipe's file."""
    return {
        "recipe": recipe.to_dict(),
        "data_dir": None if data_dir is None else str(Path(data_dir).expanduser().absolute()),
        "stop_at_target": stop_at_target,
        "log": list(log),
    }


def _config(job: Job, origin: Origin, kept: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "recipe": job.recipe,
        "optimizer": job.optimizer.name,
        "seed": job.seed,
        "settings": job.to_dict(),
        "file": origin.file,
        "changes": list(origin.changes),
        "comparison": None if origin.comparison is None else dict(origin.comparison),
        "command": list(origin.command),
        "resume": dict(kept),
    }


def _summary(setup: Setup) -> str:
    optimizer = setup.optimizer
    if not isinstance(optimizer, Composite):
        return str(optimizer)
    return "\n\n".join(
        str(one) if isinstance(one, Preconditioned) else _share(one) for one in optimizer.members
    )


def _share(optimizer: torch.optim.Optimizer) -> str:
    """Which part of the model one of two optimizers steps, and its settings."""
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return f"Stepped by {type(optimizer).__name__}: {count:,} parameters.\n{optimizer}"
