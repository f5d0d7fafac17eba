"""What the runs at real size share: one resumable loop, a line of JSON per evaluation, one thread."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from _common import interleave

import kronfac
from kronfac.train.optim.muon import muon_with_adamw

RESULTS = Path(__file__).parents[1] / "results" / "full"
WARM_UP = 0.05


@dataclass(frozen=True)
class Run:
    """What identifies a run.

    `other` is the rate of the AdamW beside Muon, `damping` K-FAC's if it is not the default.
    """

    optimizer: str
    rate: float
    steps: int
    weight_decay: float = 0.0
    other: float | None = None
    seed: int = 0
    damping: float | None = None


def optimizer_of(run: Run, model: nn.Module, **options: Any) -> Any:
    """`options` are K-FAC's, beside those of the README's line."""
    lr, decay = run.rate, run.weight_decay
    if run.optimizer == "SGD":
        return torch.optim.SGD(
            model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=decay
        )
    if run.optimizer == "Muon":
        own = {"lr": lr, "momentum": 0.95, "nesterov": True, "weight_decay": decay}
        return muon_with_adamw(model, own, {"lr": run.other, "weight_decay": decay})
    if run.optimizer == "SOAP":
        from pytorch_optimizer import SOAP

        return SOAP(model.parameters(), lr=lr, betas=(0.95, 0.95), weight_decay=decay)
    base = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    if run.damping is not None:
        options["damping"] = run.damping
    if run.optimizer == "K-FAC, whole sides":
        options["block_dim"] = None
    return kronfac.KFAC(model, base, momentum=0.9, nesterov=True, **options)


def in_bfloat16(model: nn.Module, images: Tensor) -> Tensor:
    """What a model of images makes of them under bf16 autocast, with channels last."""
    with torch.autocast("cpu", torch.bfloat16):
        scores: Tensor = model(images.contiguous(memory_format=torch.channels_last))
    return scores.float()


def share(step: int, steps: int, warm_up: float = WARM_UP) -> float:
    """Of the rate: up over the first 5 %, then linearly to zero."""
    warm = max(1, round(warm_up * steps))
    return min(1.0, (step + 1) / warm) * min(1.0, (steps - step) / (steps - warm))


def train(
    task: str,
    run: Run,
    model: nn.Module,
    optimizer: Any,
    loss_at: Callable[[int], Tensor],
    evaluate: Callable[[], Mapping[str, float]],
    every: int,
    warm_up: float = WARM_UP,
) -> None:
    """Add `evaluate()` to the task's lines every so many steps; `loss_at` depends on the step only."""
    if any(row["step"] == run.steps for row in read(task, run)):
        return
    saved = RESULTS / (f"{task}-" + "-".join(str(v) for v in asdict(run).values()) + ".pt")
    rates, first, seconds = [group["lr"] for group in optimizer.param_groups], 0, 0.0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, seconds = state["step"], state["seconds"]
    losses, started = [], time.process_time()
    for step in range(first, run.steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share(step, run.steps, warm_up)
        optimizer.zero_grad()
        loss = loss_at(step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            _write(task, run, {"step": run.steps, "diverged": step})
            return
        if (step + 1) % every == 0 or step + 1 == run.steps:
            seconds += time.process_time() - started
            model.eval()
            with torch.no_grad():
                found = {name: round(value, 4) for name, value in evaluate().items()}
            model.train()
            mean = round(sum(losses) / len(losses), 4)
            _write(task, run, {"step": step + 1, "loss": mean, **found, "cpu": round(seconds, 1)})
            state = {"model": model.state_dict(), "step": step + 1, "seconds": seconds}
            torch.save({**state, "optimizer": optimizer.state_dict()}, saved)
            losses, started = [], time.process_time()
    saved.unlink(missing_ok=True)


def read(task: str, run: Run | None = None) -> Iterator[dict[str, Any]]:
    """Lines of a task, or only of one run."""
    path, wanted = RESULTS / f"{task}.jsonl", asdict(run).items() if run else ()
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if all(row.get(key) == value for key, value in wanted):
                yield row


def cost(
    task: str, make: Callable[[Run], Callable[[int], object]], runs: list[Run], rounds: int = 1
) -> None:
    """Seconds per step, steps of all optimizers in turns, over a whole period of K-FAC's refreshes."""
    steps = {run.optimizer: _counted(make(run)) for run in runs}
    timings = interleave(steps, rounds=rounds, calls=100, warmup=3)
    base = timings[runs[0].optimizer]
    for name, timing in timings.items():
        row = {"task": task, "optimizer": name, "seconds": round(timing.spread.median, 4)}
        row["ratio"] = round(timing.ratio(base).median, 3)
        _append("costs", {**row, "threads": torch.get_num_threads()})


def _counted(step: Callable[[int], object]) -> Callable[[], object]:
    numbers = iter(range(10**6))
    return lambda: step(next(numbers))


def _write(task: str, run: Run, row: dict[str, Any]) -> None:
    _append(task, {**asdict(run), **row})


def _append(name: str, row: dict[str, Any]) -> None:
    print(row, flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
