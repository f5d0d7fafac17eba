"""All of CIFAR-10 with ResNet-20: accuracy after short schedules for K-FAC, Muon and SGD.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/full/cifar10.py [epochs] [optimizer[:decay] ...]
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/full/cifar10.py cost

50,000 images, random flips and 4-pixel crops, batch 128, bf16 autocast and channels last for all (about
a third of plain float32's time on one core), a warm-up of 5 % and a linear decay to zero over 5 epochs
unless told otherwise; about two minutes per epoch on one core. K-FAC is the README's line at its
default rate, at 0.3 (`K-FAC-0.3`), or with an absolute damping as in the recipe (`K-FAC-1e-4`). SGD's
rate is the best of four on a smaller task (`results/tuning/cifar10-sgd.json`), Muon's and SOAP's the best
of three with ResNet-8 on the same images (`results/suite.jsonl`). Weight decay is 5e-4 for SGD; the
others shrink weights by as much per step at their peak: rate × decay = 1e-3; `K-FAC:0.03` has a weight
decay of 0.03. Published for ResNet-20: 91.25 % after some 180 epochs of SGD. Each epoch is a line in
`results/full/cifar10.jsonl`; a run that was stopped resumes from its last one.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _loop import Run, cost, in_bfloat16, optimizer_of, train
from torch import Tensor

from kronfac.train import data, models

BATCH = 128
PER_EPOCH = 50_000 // BATCH
STEPS = 5 * PER_EPOCH
RUNS = {
    "K-FAC": Run("K-FAC", 0.1, STEPS, weight_decay=1e-2),
    "K-FAC-1e-4": Run("K-FAC", 0.1, STEPS, weight_decay=1e-2, damping=1e-4),
    "K-FAC-0.3": Run("K-FAC", 0.3, STEPS, weight_decay=1e-2 / 3),
    "Muon": Run("Muon", 0.1, STEPS, weight_decay=1e-2, other=1e-2),
    "SGD": Run("SGD", 0.2, STEPS, weight_decay=5e-4),
    "SOAP": Run("SOAP", 0.01, STEPS, weight_decay=1e-1),
}


def make(run: Run) -> tuple[Any, Any, Callable[[int], Tensor], Callable[[], Mapping[str, float]]]:
    torch.manual_seed(run.seed)
    source = data.load("cifar10")
    model = models.build("resnet20", num_classes=10, sample_shape=(3, 32, 32))
    model = model.to(memory_format=torch.channels_last)
    changes = (data.Flip(), data.Crop(4))

    logits = partial(in_bfloat16, model)

    def loss_at(step: int) -> Tensor:
        epoch, number = divmod(step, PER_EPOCH)
        order = torch.randperm(50_000, generator=torch.Generator().manual_seed(run.seed + epoch))
        x, y = source.train_batch(order[number * BATCH :][:BATCH])
        generator = torch.Generator().manual_seed(10**6 * (run.seed + 1) + step)
        for change in changes:
            x = change.apply(x, change.draw(len(x), x.shape[1:], generator))
        return F.cross_entropy(logits(x), y)

    def evaluate() -> Mapping[str, float]:
        right = 0
        for indices in torch.arange(source.num_test).split(500):
            x, y = source.test_batch(indices)
            right += int((logits(x).argmax(1) == y).sum())
        return {"accuracy": 100 * right / source.num_test}

    return model, optimizer_of(run, model), loss_at, evaluate


def one_step(run: Run) -> Callable[[int], object]:
    _, optimizer, loss_at, _ = make(run)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_at(number).backward()
        optimizer.step()

    return step


def main(*names: str) -> None:
    if names == ("cost",):
        cost("cifar10", one_step, [RUNS[name] for name in ("SGD", "Muon", "K-FAC")])
        return
    epochs = int(names[0]) if names and names[0].isdigit() else 5
    for name in [name for name in names if not name.isdigit()] or ("K-FAC", "Muon", "SGD"):
        optimizer, _, decay = name.partition(":")
        run = replace(RUNS[optimizer], steps=epochs * PER_EPOCH)
        if decay:
            run = replace(run, weight_decay=float(decay))
        train("cifar10", run, *make(run), every=PER_EPOCH)


if __name__ == "__main__":
    main(*sys.argv[1:])
