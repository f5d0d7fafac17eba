"""The two steps of tests/support/plain.py on two ranks, which share model and batch by FSDP2."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import kronfac
from tests.distributed.ranks import run
from tests.layers.watching import left_out
from tests.sharded.harness import ignore_advice, whole
from tests.support.cells import Cell
from tests.support.models import loss_of
from tests.support.plain import AUTOCAST, OPTIONS, Recorder, Run, data_of, model_of
from tests.training import layers

RANKS = 2


def sharded_run(cell: Cell, folder: Path) -> Run:
    """What both ranks leave behind: each layer's state is with its owner."""
    first, *others = run(RANKS, on_rank, cell)
    for other in others:
        first.counts |= other.counts
        first.dtypes |= other.dtypes
        for name in ("dropped", "failures"):
            first.stats[name] |= {key: n for key, n in other.stats[name].items() if n}
        first.stats["without_solution"] += other.stats["without_solution"]
    return first


def on_rank(rank: int, cell: Cell) -> Run:
    ignore_advice()
    model: Any = model_of(cell)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    names = {p: name for name, p in model.named_parameters()}
    base = Recorder(model.parameters())
    scaled = cell.precision == "fp16 autocast"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    optimizer = kronfac.KFAC(model, base, **OPTIONS)
    half = AUTOCAST.get(cell.precision)
    for batch in data_of(cell):
        x, y = (part.chunk(RANKS)[dist.get_rank()] for part in batch)
        optimizer.zero_grad()
        with torch.autocast("cpu", half) if half else nullcontext():
            loss = loss_of(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    steps = [{names[p]: whole(grad) for p, grad in step.items()} for step in base.steps]
    found = Run(steps, optimizer.stats(), left_out(optimizer))
    for state in layers(optimizer).values():
        for side, running in state.running.items():
            if running.count is not None:
                found.counts[f"{state.name}.{state.layer.part}.{side}"] = float(running.count)
                found.dtypes.add(running.sum.dtype)
        found.dtypes |= {value.dtype for value in (state.solution or {}).values()}
    return found
