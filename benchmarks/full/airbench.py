"""A network for fast runs of CIFAR-10, with 94 % after 8 epochs of Muon: how few does K-FAC need?

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/full/airbench.py [epochs] [Muon] [K-FAC] ...

Network, data and Muon's settings are those of airbench94 (github.com/KellerJordan/cifar10-airbench;
the code is our own): 2 M parameters; a fixed 2 x 2 convolution that whitens patches; three pairs of 3 x 3
convolutions, each near the identity at first, with a pool and batch norms without scale; a head whose
outputs are divided by its width. Batch 2,000, images flipped every other epoch and shifted by up to 2
pixels, label smoothing 0.2, a linear decay to zero, no warm-up, bf16 autocast for all. Muon: 0.24 with a
momentum of 0.6 and filters scaled to a norm before each step; Nesterov's SGD for biases (0.053) and the
head (0.67). K-FAC is the README's line for all parameters, at its default rate or another, with a
damping of `Relative(1)` (`K-FAC-1`) or an absolute one (`K-FAC-1e-4`), and with a head as torch makes
it, whose outputs are not divided (`K-FAC-head`). Test images count with their mirror images and shifts
by one pixel, as there. An epoch takes four minutes on one core. Lines in
`results/full/airbench.jsonl`, one an epoch; a run that was stopped resumes from its last one.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _loop import Run, in_bfloat16, optimizer_of, train
from torch import Tensor, nn

import kronfac
from kronfac.train import data
from kronfac.train.optim.composite import Composite
from kronfac.train.optim.muon import FlatMuon

BATCH, SHIFT, EPOCHS = 2000, 2, 2
PER_EPOCH = 50_000 // BATCH
BIAS_RATE, HEAD_RATE, DECAY = 0.053, 0.67, 0.004
RUNS = {
    "Muon": Run("Muon", 0.24, 0, other=BIAS_RATE),
    "K-FAC": Run("K-FAC", 0.1, 0),
    "K-FAC-0.05": Run("K-FAC", 0.05, 0),
    "K-FAC-1e-4": Run("K-FAC", 0.1, 0, damping=1e-4),
    "K-FAC-head": Run("K-FAC, usual head", 0.1, 0),
    "K-FAC-1": Run("K-FAC, share 1", 0.1, 0),
}


class Norm(nn.BatchNorm2d):
    """Without a scale, with a short memory."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-12, momentum=0.4)
        self.weight.requires_grad_(False)


def convolution(d_in: int, d_out: int) -> nn.Conv2d:
    """The first of its filters pass their input."""
    made = nn.Conv2d(d_in, d_out, 3, padding=1, bias=False)
    nn.init.dirac_(made.weight.data[:d_in])
    return made


def pair(d_in: int, d_out: int) -> list[nn.Module]:
    first = [convolution(d_in, d_out), nn.MaxPool2d(2), Norm(d_out), nn.GELU()]
    return [*first, convolution(d_out, d_out), Norm(d_out), nn.GELU()]


class Small(nn.Module):
    """Divides by a number."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        return x / self.divisor


def head(width: int, usual: bool) -> list[nn.Module]:
    """Weights with a standard deviation of 1, and outputs divided by the width; or as torch has them."""
    last = nn.Linear(width, 10, bias=False)
    if usual:
        return [last]
    last.weight.data.div_(last.weight.data.std())
    return [Small(width), last]


def network(images: Tensor, usual_head: bool) -> nn.Sequential:
    """With the whitening convolution made of some images."""
    whiten = nn.Conv2d(3, 24, 2)
    patches = F.unfold(images, 2).transpose(1, 2).flatten(0, 1)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + 5e-4).sqrt()).T.view(12, 3, 2, 2)
    whiten.weight = nn.Parameter(torch.cat([filters, -filters]), requires_grad=False)
    body = [*pair(24, 64), *pair(64, 256), *pair(256, 256)]
    end = [nn.MaxPool2d(3), nn.Flatten(), *head(256, usual_head)]
    return nn.Sequential(whiten, nn.GELU(), *body, *end)


class ScaledMuon(FlatMuon):
    """Filters are scaled to a norm of one, in root mean square over outputs, before a step is added."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        with torch.no_grad():
            for weight in self.weights:
                weight.mul_(len(weight) ** 0.5 / weight.norm())
        return super().step(closure)


def optimizer_for(run: Run, model: nn.Sequential) -> Any:
    if run.optimizer != "Muon":
        options = {"damping": kronfac.Relative(1.0)} if run.optimizer == "K-FAC, share 1" else {}
        return optimizer_of(run, model, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    filters = [p for p in trained if p.dim() == 4]
    biases, last = [p for p in trained if p.dim() == 1], [p for p in trained if p.dim() == 2]
    groups: Iterable[dict[str, Any]] = [
        {"params": biases, "lr": BIAS_RATE, "weight_decay": DECAY / BIAS_RATE},
        {"params": last, "lr": HEAD_RATE, "weight_decay": DECAY / HEAD_RATE},
    ]
    own = ScaledMuon(
        filters, lr=run.rate, momentum=0.6, nesterov=True, weight_decay=0.0, ns_steps=3
    )
    return Composite(own, torch.optim.SGD(groups, momentum=0.85, nesterov=True))


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image by up to two pixels, into what is mirrored at its edges."""
    padded = F.pad(images, (SHIFT,) * 4, "reflect")
    moves = torch.randint(2 * SHIFT + 1, (2, len(images), 1), generator=generator)
    rows, columns = (move + torch.arange(images.shape[-1]) for move in moves)
    numbers = torch.arange(len(images))[:, None, None]
    return padded[numbers, :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def make(run: Run) -> tuple[Any, Any, Callable[[int], Tensor], Callable[[], Mapping[str, float]]]:
    torch.manual_seed(run.seed)
    source = data.load("cifar10")
    whole = torch.arange(5000)
    model = network(source.train_batch(whole)[0], "usual head" in run.optimizer)
    model = model.to(memory_format=torch.channels_last)
    flips = torch.rand(50_000, generator=torch.Generator().manual_seed(run.seed)) < 0.5

    logits = partial(in_bfloat16, model)

    def loss_at(step: int) -> Tensor:
        epoch, number = divmod(step, PER_EPOCH)
        order = torch.randperm(50_000, generator=torch.Generator().manual_seed(run.seed + epoch))
        indices = order[number * BATCH :][:BATCH]
        x, y = source.train_batch(indices)
        mirrored = flips[indices] ^ (epoch % 2 == 1)
        x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
        generator = torch.Generator().manual_seed(10**6 * (run.seed + 1) + step)
        return F.cross_entropy(logits(shifted(x, generator)), y, label_smoothing=0.2)

    def evaluate() -> Mapping[str, float]:
        right = plain = 0
        for indices in torch.arange(source.num_test).split(500):
            x, y = source.test_batch(indices)
            padded = F.pad(x, (1,) * 4, "reflect")
            views = [x, padded[..., :-2, :-2], padded[..., 2:, 2:]]
            own = [logits(view) + logits(view.flip(-1)) for view in views]
            right += int(((2 * own[0] + own[1] + own[2]).argmax(1) == y).sum())
            plain += int((logits(x).argmax(1) == y).sum())
        total = source.num_test / 100
        return {"accuracy": right / total, "plain": plain / total}

    return model, optimizer_for(run, model), loss_at, evaluate


def main(*names: str) -> None:
    epochs = int(names[0]) if names and names[0].isdigit() else EPOCHS
    for name in [name for name in names if not name.isdigit()] or ("Muon", "K-FAC"):
        run = replace(RUNS[name], steps=epochs * PER_EPOCH)
        train("airbench", run, *make(run), every=PER_EPOCH, warm_up=0.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
