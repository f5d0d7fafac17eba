"""All of CIFAR-10 with ResNet-20: accuracy after a schedule of 5 epochs for K-FAC, Muon and SGD.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/full/cifar10.py [optimizer ...]
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/full/cifar10.py cost

50,000 images, random flips and 4-pixel crops, batch 128, bf16 autocast and channels last for all (a
third of the time of float32 on one core), a warm-up of 5 % and a linear decay to zero; about 15 minutes
a run on one core. K-FAC is the README's line at its default rate. SGD's rate is the best of four on a
smaller task (`results/tuning/cifar10-sgd.json`) and Muon's the best of three on the same images
(`results/suite.jsonl`). Weight decay is 5e-4 for SGD; the others shrink weights by as much per step at
their peak: rate × decay = 1e-3. Published for ResNet-20: 91.25 % after some 180 epochs of SGD.
Each epoch is a line in `results/full/cifar10.jsonl`; a run that was stopped resumes from its last one.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from _loop import Run, cost, optimizer_of, train
from torch import Tensor

from kronfac.train import data, models

BATCH, EPOCHS = 128, 5
PER_EPOCH = 50_000 // BATCH
STEPS = EPOCHS * PER_EPOCH
RUNS = {
    "K-FAC": Run("K-FAC", 0.1, STEPS, weight_decay=1e-2),
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

    def logits(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x.contiguous(memory_format=torch.channels_last)).float()

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
    for name in names or ("K-FAC", "Muon", "SGD"):
        train("cifar10", RUNS[name], *make(RUNS[name]), every=PER_EPOCH)


if __name__ == "__main__":
    main(*sys.argv[1:])
