"""Compress a trained recurrent net sixteen times and fine-tune what is left with K-FAC.

    python examples/kronecker_compression.py

An LSTM reads handwritten digits row by row (8 steps of 8 numbers). Its matrices become sums of Kronecker
products of a sixteenth of the size, which are never formed. A trained matrix has no such structure, so
the accuracy is lost at first and comes back by fine-tuning. K-FAC preconditions the factors, which are
linear layers used at every step; AdamW does the same from the same start, for comparison.
"""

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kronfac

HIDDEN, BATCH, TEST, STEPS = 64, 128, 400, 150


class Reader(nn.Module):
    """A recurrent net that reads an image row by row and names it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, 8, 8] to scores [N, 10]."""
        return self.head(self.cell(x)[0][:, -1])


def train(
    model: nn.Module, base: torch.optim.Optimizer, images: Tensor, labels: Tensor, *, kfac: bool
) -> None:
    optimizer = kronfac.KFAC(model, base, momentum=0.9, nesterov=True) if kfac else base
    schedule = torch.optim.lr_scheduler.LinearLR(base, 1.0, 0.0, STEPS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
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


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    images, labels = images[order], labels[order]
    test, rest = (images[:TEST], labels[:TEST]), (images[TEST:], labels[TEST:])

    whole = Reader()
    train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), *rest, kfac=False)
    print(f"whole LSTM:        {matrices(whole):>6} parameters {accuracy(whole, *test):.1%}")

    small = kronfac.nn.compress(whole, 16, exclude="head")
    print(f"compressed:        {matrices(small):>6} parameters {accuracy(small, *test):.1%}")
    with_adamw = copy.deepcopy(small)
    train(with_adamw, torch.optim.AdamW(with_adamw.parameters(), lr=1e-2), *rest, kfac=False)
    print(
        f"tuned by AdamW:    {matrices(with_adamw):>6} parameters {accuracy(with_adamw, *test):.1%}"
    )
    train(small, torch.optim.SGD(small.parameters(), lr=0.1), *rest, kfac=True)
    print(f"tuned by K-FAC:    {matrices(small):>6} parameters {accuracy(small, *test):.1%}")
    print(small.cell)


if __name__ == "__main__":
    main()
