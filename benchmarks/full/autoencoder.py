"""The MNIST autoencoder 784-1000-500-250-30 and back at full size, beside published results.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/full/autoencoder.py [optimizer] [epochs] [tanh|relu]

All 60,000 images, batch 1,000, binary cross-entropy summed over pixels, no weight decay; a bit more than
a minute per epoch on one core. Published with K-BFGS (both tuned, 500 s on a GPU; every epoch is in the
notebook beside its code, github.com/renyiryry/kbfgs_neurips2020_public): K-FAC has a training loss of
52.90 and a test loss of 57.60 at epoch 75, K-BFGS 52.42 and 58.27 at epoch 120. Those networks have
ReLU; `tanh`, the classic one, is what was run here first, `relu` is the same network as theirs. Ours
is the README's line at its default rate with a linear decay over all epochs. Each epoch is a line in
`results/full/autoencoder-<optimizer>.jsonl` (or `-relu.jsonl`); a stopped run resumes from its last one.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from suite.nets import autoencoder
from suite.optimizers import ENTRIES
from suite.tasks import TASKS

from kronfac.train import data

BATCH = 1000
RATES = {"K-FAC": 0.1, "Muon": 0.03, "SOAP": 0.003, "AdamW": 1e-3}
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}
RESULTS = Path(__file__).parents[1] / "results" / "full"


def pixels() -> tuple[Tensor, Tensor]:
    source = data.load("mnist")
    train = source.train_batch(torch.arange(source.num_train))[0]
    test = source.test_batch(torch.arange(source.num_test))[0]
    return tuple((x.flatten(1) * 0.3081 + 0.1307).clamp(0, 1) for x in (train, test))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)


@torch.no_grad()
def mean_loss(model: nn.Module, x: Tensor) -> float:
    return sum(float(loss_of(model, part)) for part in x.split(BATCH)) / len(x.split(BATCH))


def main(name: str = "K-FAC", length: str = "20", kind: str = "tanh") -> None:
    torch.manual_seed(0)
    train, test = pixels()
    epochs = int(length)
    model = autoencoder(784, 1000, 500, 250, 30, activation=ACTIVATIONS[kind])
    task = TASKS["autoencoder 1000-30"]
    optimizer: Any = ENTRIES[name].make(model, RATES[name], task)
    rates = [group["lr"] for group in optimizer.param_groups]
    title = f"autoencoder-{name.lower()}" + ("-relu" if kind == "relu" else "")
    log, saved = RESULTS / f"{title}.jsonl", RESULTS / f"{title}.pt"
    log.parent.mkdir(parents=True, exist_ok=True)
    first, seconds = 0, 0.0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, seconds = state["epoch"], state["seconds"]
    steps = len(train) // BATCH
    for epoch in range(first, epochs):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        started = time.perf_counter()
        for number, indices in enumerate(order.split(BATCH)):
            step = epoch * steps + number
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(1.0, (step + 1) / 10) * (1 - step / (epochs * steps))
            optimizer.zero_grad()
            loss_of(model, train[indices]).backward()
            optimizer.step()
        seconds += time.perf_counter() - started
        row = {
            "epoch": epoch + 1,
            "of": epochs,
            "train": round(mean_loss(model, train), 3),
            "test": round(mean_loss(model, test), 3),
            "seconds": round(seconds, 1),
        }
        print(row, flush=True)
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        state = {"model": model.state_dict(), "epoch": epoch + 1, "seconds": seconds}
        torch.save({**state, "optimizer": optimizer.state_dict()}, saved)
    saved.unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
