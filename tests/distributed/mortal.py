"""A training run on ranks that saves as it goes, and in which a rank may be made to die.

As a script it is one rank: ``torchrun tests/distributed/mortal.py '{"steps": 8}'``. The arguments are the
fields of :class:`Run`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import kronfac
from kronfac.distributed.comm.collectives import Arrival, Collectives
from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.methods.kfac.block import KFACBlock
from tests.distributed.equivalence import SCHEMES, bounds
from tests.distributed.models import KINDS, momentum

SAMPLES = 12
#: Where a rank can be made to die.
PLACES = (
    "build",
    "forward",
    "backward",
    "send",
    "wait",
    "solve",
    "between",
    "consolidate",
    "save",
)


@dataclass(frozen=True)
class Run:
    """What is trained, and what happens to which rank."""

    scheme: str = "comm-opt"
    """A name of ``tests.distributed.equivalence.SCHEMES``; "without DDP" is part of the name."""
    model: str = "cnn"
    steps: int = 8
    save_every: int = 0
    """Steps between checkpoints; 0 for none."""
    whole: bool = False
    """Whether one rank saves everything with ``torch.save``."""
    folder: str = "."
    timeout: float = 20.0
    """Seconds after which a message is lost, for the process group."""
    place: str = ""
    """Where the doomed rank meets its end."""
    doomed: int = 1
    at: int = 3
    """The step in which it does."""
    fate: str = "kill"
    """``"kill"``, ``"stop"`` (it hangs), ``"raise"`` or ``"leave"`` (it ends as if all were done)."""
    farewell: str = "destroy"
    """How ranks end when all is done: ``"late"`` lets one of them be later than the others, and
    ``"none"`` leaves the process group as it is."""

    def arguments(self) -> str:
        return json.dumps(asdict(self))


# --- how a rank dies -------------------------------------------------------------------------


class Fate:
    """Strikes one rank once, in the first life of the run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.step = 0
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self.armed = bool(run.place) and first and int(os.environ["RANK"]) == run.doomed

    def at(self, place: str) -> None:
        """Strike if this is the place and the time has come."""
        run = self.run
        if not self.armed or place != run.place or (self.step < run.at and place != "build"):
            return
        self.armed = False
        print(f"struck at {place} in step {self.step}", flush=True)
        if run.fate == "raise":
            raise ValueError("this rank does not like its data")
        if run.fate == "leave":
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGKILL if run.fate == "kill" else signal.SIGSTOP)

    def watch(self, owner: type, name: str, place: str) -> None:
        """Strike when a method has been called."""
        method: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.at(place)
            return result

        setattr(owner, name, watched)

    def watch_all(self, model: nn.Module) -> None:
        """Strike in the middle of what ranks do together."""
        self.watch(Collectives, "_start", "send")
        self.watch(Arrival, "wait", "wait")
        self.watch(KFACBlock, "solve", "solve")
        self.watch(KFACBlock, "solve_batch", "solve")
        self.watch(KFACBlock, "solve_share", "solve")
        self.watch(ProcessGroup, "__init__", "build")
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        last.register_forward_hook(lambda *_: self.at("forward"))
        last.weight.register_hook(lambda _: self.at("backward"))


# --- checkpoints -----------------------------------------------------------------------------


def checkpoints(run: Run) -> list[Path]:
    """Whole ones, oldest first."""
    name = "step-*/whole.pt" if run.whole else "step-*/.metadata"
    return sorted(one.parent for one in Path(run.folder).glob(name))


def save(run: Run, step: int, model: nn.Module, optimizer: kronfac.KFAC, fate: Fate) -> None:
    place = Path(run.folder) / f"step-{step:04d}"
    if run.whole:
        state = optimizer.full_state_dict()
        fate.at("save")
        if state is not None:
            place.mkdir(exist_ok=True)
            content = {"model": plain(model).state_dict(), "optimizer": state, "step": step}
            torch.save(content, place / "part.pt")
            (place / "part.pt").rename(place / "whole.pt")
        return
    optimizer.consolidate()
    fate.at("consolidate")
    weights, state = get_state_dict(model, optimizer)
    fate.at("save")
    dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=place)


def resume(run: Run, model: nn.Module, optimizer: kronfac.KFAC) -> int:
    """The step to go on from."""
    newest = [[str(one) for one in checkpoints(run)[-1:]]]
    dist.broadcast_object_list(newest, src=0)
    if not newest[0]:
        return 0
    place = newest[0][0]
    if run.whole:
        content = torch.load(Path(place) / "whole.pt", weights_only=True)
        plain(model).load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        return int(content["step"])
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(content, checkpoint_id=place)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    return int(content["step"])


def plain(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


# --- training --------------------------------------------------------------------------------


def train(run: Run) -> None:
    """One rank, from the first step or the last checkpoint to the end."""
    faulthandler.register(signal.SIGUSR1)  # for a test that wonders where a rank hangs
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=run.timeout))
    rank, size = dist.get_rank(), dist.get_world_size()
    kind, fate = KINDS[run.model], Fate(run)
    model = kind.model()
    fate.watch_all(model)
    if "without DDP" not in run.scheme:
        model = DistributedDataParallel(model)
    optimizer = kronfac.KFAC(
        model,
        momentum(model),
        damping=0.01,
        factor_every=1,
        refresh_every=3,
        distribute=SCHEMES[run.scheme],
    )
    start = resume(run, model, optimizer)
    print(f"rank {rank} of {size} goes on from step {start}", flush=True)
    first, last = bounds(SAMPLES, size)[rank]
    for step in range(start, run.steps):
        fate.step = step
        x, y = (part[first:last] for part in kind.batch(step, SAMPLES))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        print(f"step {step}", flush=True)
        fate.at("between")
        if run.save_every and (step + 1) % run.save_every == 0:
            save(run, step + 1, model, optimizer, fate)
    result = {name: p.detach().clone() for name, p in plain(model).named_parameters()}
    torch.save(result, Path(run.folder) / f"result-{rank}.pt")
    if run.farewell == "late" and rank == run.doomed:
        time.sleep(3)
    if run.farewell != "none":
        dist.destroy_process_group()


if __name__ == "__main__":
    train(Run(**json.loads(sys.argv[1])))
