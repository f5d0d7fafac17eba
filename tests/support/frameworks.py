"""The two steps of tests/support/plain.py under Lightning, Trainer, Accelerate and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset
from transformers import Trainer, TrainingArguments

import kronfac
from kronfac.huggingface import optimizer_cls_and_kwargs
from tests.support.cells import Cell
from tests.support.models import SAMPLES, Net, loss_of
from tests.support.plain import OPTIONS, STEPS, Recorder, Run, data_of, model_of, run_of
from tests.support.sharded import sharded_run


def dataset(cell: Cell) -> TensorDataset:
    return TensorDataset(*(torch.cat(parts) for parts in zip(*data_of(cell), strict=True)))


def loader(cell: Cell) -> DataLoader[Any]:
    return DataLoader(dataset(cell), batch_size=SAMPLES)


# --- Lightning -------------------------------------------------------------------------------


class Module(L.LightningModule):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.base = Recorder(net.parameters())

    def training_step(self, data: tuple[Tensor, Tensor], index: int) -> Tensor:
        return loss_of(self.net(data[0]), data[1])

    def configure_optimizers(self) -> kronfac.KFAC:
        self.kfac = kronfac.KFAC(self.net, self.base, **OPTIONS)
        return self.kfac


def lightning(cell: Cell, folder: Path) -> Run:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    precision: dict[str, dict[str, Any]] = {
        "float32": {"precision": "32-true"},
        "float64": {"precision": "64-true"},
        "bf16 autocast": {"precision": "bf16-mixed"},
        # With precision="16-mixed" Lightning would choose bfloat16 on CPUs.
        "fp16 autocast": {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]},
        "bf16 parameters": {"precision": "bf16-true"},
    }
    module = Module(model_of(cell))
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **precision[cell.precision],
    )
    trainer.fit(module, loader(cell))
    return run_of(module.net, module.kfac, module.base)


# --- Trainer of transformers -----------------------------------------------------------------


class InOrder(Trainer):
    """Takes the samples in their order."""

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def trainer(cell: Cell, folder: Path) -> Run:
    model = model_of(cell)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=SAMPLES,
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=cell.precision == "bf16 autocast",
        fp16=cell.precision == "fp16 autocast",
    )
    owner = InOrder(
        model,
        arguments,
        train_dataset=[{"x": x, "labels": y} for x, y in dataset(cell)],
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(model, Recorder, lr=0.0, **OPTIONS),
    )
    owner.train()
    kfac = owner.optimizer.optimizer
    return run_of(model, kfac, kfac.base)


# --- Accelerate ------------------------------------------------------------------------------


def accelerate(cell: Cell, folder: Path) -> Run:
    mixed = {"bf16 autocast": "bf16", "fp16 autocast": "fp16"}.get(cell.precision, "no")
    owner = Accelerator(cpu=True, mixed_precision=mixed)
    net = model_of(cell)
    base = Recorder(net.parameters())
    kfac = kronfac.KFAC(net, base, **OPTIONS)
    model, optimizer, data = owner.prepare(net, kfac, loader(cell))
    for x, y in data:
        owner.backward(loss_of(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return run_of(net, kfac, base)


RUNS: dict[str, Callable[[Cell, Path], Run]] = {
    "Lightning": lightning,
    "Trainer": trainer,
    "Accelerate": accelerate,
    "FSDP2": sharded_run,
}


def trainer_run(cell: Cell, folder: Path) -> Run:
    try:
        return RUNS[cell.framework](cell, folder)
    finally:  # Accelerate, and with it Trainer, keeps its precision for the whole process
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._reset_state()
