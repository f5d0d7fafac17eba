"""Compress a trained recurrent net sixteen times and fine-tune what is left with K-FAC.

    python examples/kronecker_compression.py [--hidden 64] [--whole-steps 500] [--steps 200]

An LSTM reads handwritten digits row by row (8 steps of 8 numbers). Its matrices become sums of Kronecker
products of a sixteenth of the size, which are never formed. A trained matrix has no such structure, so
the accuracy is lost at first and comes back by fine-tuning. K-FAC preconditions the factors, which are
linear layers used at every step.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kronfac

BATCH, TEST = 64, 400


class Reader(nn.Module):
    """A recurrent net that reads an image row by row and names it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, 8, 8] to scores [N, 10]."""
        return self.head(self.cell(x)[0][:, -1])


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int, *, kfac: bool) -> None:
    base: torch.optim.Optimizer
    optimizer = base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kfac:
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = kronfac.KFAC(model, base, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LinearLR(base, 1.0, 0.0, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        schedule.step()
    if isinstance(optimizer, kronfac.KFAC):
        optimizer.detach()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def matrices(model: Reader) -> int:
    """Entries of the recurrent layer's matrices."""
    return sum(p.numel() for p in model.cell.parameters() if p.dim() == 2)


def show(name: str, model: Reader, images: Tensor, labels: Tensor) -> None:
    reached = accuracy(model, images, labels)
    print(f"{name + ':':<16}{matrices(model):>6} parameters {reached:.1%}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=64, help="width of the LSTM's state")
    parser.add_argument("--whole-steps", type=int, default=500, help="training of the whole LSTM")
    parser.add_argument("--steps", type=int, default=200, help="fine-tuning of the compressed one")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    images, labels = images[order], labels[order]
    test, rest = (images[:TEST], labels[:TEST]), (images[TEST:], labels[TEST:])

    whole = Reader(given.hidden)
    train(whole, *rest, given.whole_steps, kfac=False)
    show("whole LSTM", whole, *test)
    small = kronfac.nn.compress(whole, 16, exclude="head")
    show("compressed", small, *test)
    train(small, *rest, given.steps, kfac=True)
    show("fine-tuned", small, *test)
    for name, product in (("input", small.cell.inputs[0]), ("state", small.cell.states[0])):
        print(f"{name}: {product.extra_repr()}")


if __name__ == "__main__":
    main()
