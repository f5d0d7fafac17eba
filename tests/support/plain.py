"""Two K-FAC steps in a plain loop, and what they leave behind."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from tests.layers.watching import left_out
from tests.support.cells import Cell
from tests.support.models import Net, batch, loss_of
from tests.training import layers

STEPS = 2
OPTIONS: dict[str, Any] = {
    "damping": 0.1,
    "decay": 0.5,
    "factor_every": 1,
    "refresh_every": 1,
    "rescale": None,
    "on_missing": "raise",
}
DTYPES = {"float64": torch.float64, "bf16 parameters": torch.bfloat16}
AUTOCAST = {"bf16 autocast": torch.bfloat16, "fp16 autocast": torch.float16}
BACKENDS = {"compiled": "aot_eager", "inductor": "inductor"}


class Recorder(SGD):
    """A base optimizer that stands still and writes down the gradients that it is given."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **({"lr": 0.0} | options))
        self.steps: list[dict[nn.Parameter, Tensor]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p for group in self.param_groups for p in group["params"]]
        self.steps.append({p: p.grad.clone() for p in given if p.grad is not None})


@dataclass
class Run:
    """What a training did: preconditioned gradients of each step, and the state at the end."""

    steps: list[dict[str, Tensor]]
    stats: dict[str, Any]
    left_out: dict[str, str]
    counts: dict[str, float] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)


def dtype_of(precision: str) -> torch.dtype:
    """That of parameters and inputs."""
    return DTYPES.get(precision, torch.float32)


def model_of(cell: Cell) -> Net:
    return Net(cell.layer, cell.checkpoints).to(dtype_of(cell.precision))


def data_of(cell: Cell) -> list[tuple[Tensor, Tensor]]:
    return [batch(cell.layer, number, dtype_of(cell.precision)) for number in range(STEPS)]


def run_of(model: nn.Module, optimizer: kronfac.KFAC, base: Recorder) -> Run:
    names = {p: name for name, p in model.named_parameters()}
    run = Run(
        [{names[p]: grad for p, grad in step.items()} for step in base.steps],
        optimizer.stats(),
        left_out(optimizer),
    )
    for state in layers(optimizer).values():
        key = f"{state.name}.{state.layer.part}"
        for side, running in state.running.items():
            run.counts[f"{key}.{side}"] = float(running.count)
            run.dtypes.add(running.sum.dtype)
        run.dtypes |= {value.dtype for value in state.solution.values()}
    return run


def plain_run(cell: Cell) -> Run:
    model = model_of(cell)
    base = Recorder(model.parameters())
    scaled = cell.precision == "fp16 autocast"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    optimizer = kronfac.KFAC(model, base, **OPTIONS)
    call: Any = model
    if cell.execution in BACKENDS:
        torch._dynamo.reset()
        call = torch.compile(model, fullgraph=True, backend=BACKENDS[cell.execution])
    for x, y in data_of(cell):
        optimizer.zero_grad()
        half = AUTOCAST.get(cell.precision)
        with torch.autocast("cpu", half) if half else nullcontext():
            loss = loss_of(call(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return run_of(model, optimizer, base)


@cache
def reference(layer: str) -> Run:
    """The plain run in double precision."""
    return plain_run(Cell(layer, "float64"))
