"""What a step of each method costs: time beside SGD's, state, bytes on the wire, decompositions.

Kinds of steps are timed by themselves, in turns with SGD's, and added up by the method's own intervals:
`plain`, `factor` (statistics) and `busy` (statistics and a refresh). Needs an idle machine.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from _common import interleave
from _family import FORMS, OTHERS, SKIPPED, STEPS, Row, find, keep, kind_of, options_of, setting
from _models import WORKLOADS
from _trials import Trial
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from traffic import fake_world, keep_gradients

from kronfac.distributed.comm.traffic import ring_bytes
from kronfac.options.config import Schedules
from kronfac.step.schedule import Clock
from kronfac.train.launch.ranks import current
from kronfac.train.recipe import files as recipe_files
from kronfac.train.recipe.options import methods, starting_line
from kronfac.train.run.clock import TrainingClock
from kronfac.train.run.setup import build as build_run
from kronfac.train.run.setup import load_data
from kronfac.train.run.stepping import Stepper

#: Models of random batches on which overheads are promised; the tasks give seconds of training.
PROMISED = ("resnet20", "transformer")
#: Ranks of the world in which bytes are counted.
RANKS = 8
NEVER = 10**9
KINDS = {"busy": (1, 1), "factor": (1, NEVER), "plain": (NEVER, NEVER)}


def intervals(name: str) -> tuple[int, int]:
    """Steps from one factor step to the next, and from one refresh to the next."""
    defaults = methods()[kind_of(name)].method.defaults  # type: ignore[attr-defined]
    return defaults.factor_every, defaults.refresh_every


def kinds(name: str) -> list[str]:
    """The kinds of steps that a method has at its own intervals."""
    if name in OTHERS:
        return ["plain"]
    factor, refresh = intervals(name)
    return ["busy", *["factor"] * (refresh > factor), *["plain"] * (factor > 1)]


def counts(name: str, steps: int) -> dict[str, int]:
    """How many of so many first steps are of each kind, early refreshes included."""
    if name in OTHERS:
        return {"plain": steps}
    found = dict.fromkeys(kinds(name), 0)
    factor, refresh = intervals(name)
    clock = Clock(Schedules(1.0, factor, refresh, 0.5), early_refresh=True)
    last: int | None = None
    for clock.step in range(steps):
        renews = clock.refresh_due(last)
        found["busy" if renews else "factor" if clock.factor_due() else "plain"] += 1
        if clock.refresh_on_grid(last):
            last = clock.step
        if clock.factor_due():
            clock.mark_factor()
    return found


def mean(name: str, values: dict[str, float]) -> float:
    """The mean step at a method's own intervals, in the long run."""
    if name in OTHERS:
        return values["plain"]
    factor, refresh = intervals(name)
    statistics = values.get("factor", values["busy"])
    plain = values.get("plain", statistics)
    return plain + (statistics - plain) / factor + (values["busy"] - statistics) / refresh


# --- steps ---------------------------------------------------------------------------------------


def promised_step(workload: str, name: str, kind: str) -> tuple[Callable[[], None], Any]:
    """A training step on one of the promised models, and the optimizer."""
    model, (inputs, targets), loss_of = WORKLOADS[workload]()
    optimizer = build(name, model, workload, kind)

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(inputs)
        if getattr(optimizer, "needs_observe", False):
            optimizer.observe(outputs)
        loss_of(outputs, targets).backward()
        optimizer.step()

    return step, optimizer


def build(name: str, model: nn.Module, workload: str, kind: str) -> Any:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    line = starting_line(kind_of(name)) | (FORMS[name][1] if name in FORMS else {})
    base = torch.optim.SGD(model.parameters(), lr=1e-4)
    line |= dict(zip(("factor_every", "refresh_every"), KINDS[kind], strict=True))
    line |= {"early_refresh": False}
    line |= {"loss_average": "token"} if workload == "transformer" else {}
    return methods()[kind_of(name)](model, base, **{k: v for k, v in line.items() if k != "lr"})


def task_step(task: str, name: str, kind: str) -> tuple[Callable[[], None], Any]:
    """A training step of a recipe on its first batch, and the optimizer."""
    options = options_of(task, name) | {"lr": 1e-4}
    if name not in OTHERS:
        options |= dict(zip(("factor_every", "refresh_every"), KINDS[kind], strict=True))
        options |= {"early_refresh": False}
    one = Trial(task, kind_of(name), STEPS[task], 0, tuple(options.items()), alone=True)
    job = one.recipe().job(one.optimizer)
    setup = build_run(job, current(), torch.device("cpu"), source_of(task))
    stepper = Stepper(setup, TrainingClock(setup.device, setup.optimizer))
    inputs, targets = next(iter(setup.batches.iterate(0, 1)))
    setup.plain.train()
    return lambda: stepper.take(0, inputs, targets, timed=False), setup.optimizer


@functools.cache
def source_of(task: str) -> Any:
    return load_data(recipe_files.load(task).job(), None)


# --- measuring -----------------------------------------------------------------------------------


def cost(names: Iterable[str], tasks: Iterable[str], rows: list[Row], repeats: int) -> None:
    """Time all optimizers; rows that are there stay."""
    for place in (*PROMISED, *tasks):
        for name in names:
            if name == "sgd" or (place in PROMISED and name in ("muon", "soap")):
                continue  # benchmarks/overhead.py has these
            key = {"stage": "cost", "task": place, "optimizer": name}
            key |= {"setting": setting(place, name)}
            if (place, name) not in SKIPPED and not find(rows, **key):
                keep(rows, key | measured(place, name, repeats))


def measured(place: str, name: str, repeats: int) -> Row:
    """Overheads over SGD of each kind of step and of the mean one; on promised models also the rest."""
    make = promised_step if place in PROMISED else task_step
    calls, optimizer = {"sgd": make(place, "sgd", "plain")[0]}, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in kinds(name):
            calls[kind], made = make(place, name, kind)
            optimizer = optimizer or made  # of the kind that has everything
        timings = interleave(calls, rounds=repeats, warmup=2)
    over = {one: timing.ratio(timings["sgd"]).median - 1 for one, timing in timings.items()}
    del over["sgd"]
    row: Row = {
        "over": {one: round(value, 4) for one, value in over.items()},
        "overhead": round(mean(name, over), 4),
        "sgd_ms": round(1e3 * timings["sgd"].spread.median, 2),
        "state": state_bytes(optimizer),
    }
    if place in PROMISED and name not in OTHERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row |= {"decompositions": decompositions(calls["busy"])}
            row |= sent_bytes(place, name)
    if place in PROMISED and name == "cgfac":
        row |= kept_rows(optimizer, len(WORKLOADS[place]().batch[0]))
    return row


def state_bytes(optimizer: Any) -> int:
    """Bytes of all tensors that a checkpoint would hold, of one optimizer or of several in one."""
    leaves, _ = torch.utils._pytree.tree_flatten(optimizer.state_dict())
    return sum(one.numel() * one.element_size() for one in leaves if isinstance(one, torch.Tensor))


def kept_rows(optimizer: Any, samples: int) -> Row:
    """Bytes that layers with rows keep of a batch, and ``N(d_in + d_out)`` numbers for each of them."""
    kept: dict[int, int] = {}
    expected = 0
    for state in optimizer.layers:
        if "a" in state.block.statistics:
            sums = [running.sum for running in state.running.values()]
            for one in (*sums, *state.solution.values()):
                storage = one.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
            *batch, d_out, d_in = state.layer.matrix_shape
            expected += math.prod(batch) * samples * (d_in + d_out) * 4
    return {"kept": sum(kept.values()), "rows": expected}


class Decompositions(TorchDispatchMode):
    """Counts calls of what decomposes, inverts or solves."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        solves = name.startswith(("linalg_", "_linalg_", "cholesky", "lu_", "geqrf", "inverse"))
        self.count += solves and not name.startswith("linalg_vector_norm")
        return func(*args, **(kwargs or {}))


def decompositions(step: Callable[[], None]) -> int:
    """How many a step with statistics and a refresh has."""
    with Decompositions() as counted:
        step()
    return counted.count


def sent_bytes(workload: str, name: str) -> Row:
    """Bytes that the first of eight ranks sends at a mean step under comm-opt, and by a closed form."""
    with fake_world(RANKS, 0):
        model, (inputs, targets), loss_of = WORKLOADS[workload](batch_size=4)
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, keep_gradients)
        base = torch.optim.SGD(model.parameters(), lr=1e-6)
        own = {"factor_every": 1, "refresh_every": 2, "distribute": "comm-opt"}
        own |= FORMS[name][1] if name in FORMS else {}
        optimizer = methods()[kind_of(name)](ddp, base, early_refresh=False, **own)
        sent = []
        try:
            for _ in range(3):
                optimizer.zero_grad()
                outputs = ddp(inputs)
                if optimizer.needs_observe:
                    optimizer.observe(outputs)
                loss_of(outputs, targets).backward()
                optimizer.step()
                total = optimizer.stats()["sent"]
                sent.append(sum(total[phase] for phase in ("reduce", "share", "spread")))
        except RuntimeError:  # numbers that nobody sent need not have a solution
            return {}
        finally:
            layers = [state.layer for state in optimizer.layers]
            optimizer.detach()
    steps = {"factor": sent[1] - sent[0], "busy": sent[2] - sent[1], "plain": 0.0}
    found = {"sent": round(mean(name, {kind: steps[kind] for kind in kinds(name)}), 1)}
    if kind_of(name) not in ("eva", "mkor", "adafisher"):
        return found
    return found | {"expected": round(vectors(layers) / intervals(name)[0], 1)}


def vectors(layers: Iterable[Any]) -> float:
    """Bytes sent of a vector for each side of each layer; of a norm, of all its parameters."""
    numbers = 0
    for layer in layers:
        *batch, d_out, d_in = layer.matrix_shape
        numbers += math.prod(batch) * (d_out * d_in if layer.unit_wise else d_out + d_in)
    return ring_bytes("all_reduce", 4 * numbers, RANKS)
