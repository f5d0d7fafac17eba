"""What preconditioning norms and embeddings does to training, beside preconditioning matrices alone.

    python benchmarks/layers.py [--seeds 2]

Two small problems with the defaults of a drop-in user: a convolutional network with batch norms on
handwritten digits over SGD, and the transformer of `_models.py` over AdamW as a byte-level language model
on the source text of Python's own library. The number is the mean over seeds of the loss on data that was
not trained on, after a short run with a linear decay of the learning rate.
"""

import argparse
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _common import machine_line, table, write_json
from _models import Transformer, token_cross_entropy
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kronfac

NORMS = [nn.BatchNorm2d, nn.LayerNorm]
SETTINGS: dict[str, list[type[nn.Module]] | None] = {
    "base alone": None,
    "matrices": [*NORMS, nn.Embedding],
    "matrices, embeddings": NORMS,
    "matrices, norms": [nn.Embedding],
    "all (default)": [],
}
RATES = {"digits": (0.03, 0.1, 0.3), "bytes": (1e-3, 3e-3)}
STEPS = {"digits": 90, "bytes": 120}
Batches = Iterator[tuple[Tensor, Tensor]]


def normed_network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 2)):
        convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


def digits(seed: int) -> tuple[Batches, tuple[Tensor, Tensor]]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[500:], order[:500]
    source = torch.Generator().manual_seed(seed)

    def batches() -> Batches:
        while True:
            chosen = train[torch.randint(len(train), (64,), generator=source)]
            yield x[chosen], y[chosen]

    return batches(), (x[test], y[test])


def python_text(seed: int) -> tuple[Batches, tuple[Tensor, Tensor]]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    raw = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:2_000_000]
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    source, held_out = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)

    def draw(
        start: int, stop: int, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        places = torch.randint(start, stop - 65, (count,), generator=generator)
        windows = torch.stack([text[place : place + 65] for place in places])
        return windows[:, :-1], windows[:, 1:]

    limit = len(text) * 9 // 10

    def batches() -> Batches:
        while True:
            yield draw(0, limit, 32, source)

    return batches(), draw(limit, len(text), 128, held_out)


Problem = tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[..., Tensor], str]
PROBLEMS: dict[str, Problem] = {
    "digits": (normed_network, digits, F.cross_entropy, "batch"),
    "bytes": (Transformer, python_text, token_cross_entropy, "token"),
}


def run(problem: str, exclude: list[type[nn.Module]] | None, rate: float, seed: int) -> float:
    """Train once and return the loss on held-out data."""
    make, data, loss, average = PROBLEMS[problem]
    torch.manual_seed(seed)
    model = make()
    if problem == "digits":
        base: Any = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True)
    else:
        base = torch.optim.AdamW(model.parameters(), lr=rate)
    optimizer = base
    if exclude is not None:
        present = {type(module) for module in model.modules()}
        exclude = [kind for kind in exclude if kind in present]
        optimizer = kronfac.KFAC(model, base, exclude=exclude or None, loss_average=average)
    steps = STEPS[problem]
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, steps)
    batches, (x, y) = data(seed)
    for _ in range(steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
        decay.step()
    model.eval()
    with torch.no_grad():
        return float(loss(model(x), y))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    seeds = parser.parse_args().seeds
    print(machine_line())
    results: dict[str, Any] = {}
    for problem, rates in RATES.items():
        rows, found = [], {}
        for name, exclude in SETTINGS.items():
            if problem == "digits" and "embeddings" in name:
                continue  # it has none
            losses = [
                [run(problem, exclude, rate, seed) for seed in range(seeds)] for rate in rates
            ]
            found[name] = losses
            means = [statistics.fmean(one) for one in losses]
            rows.append([name, *(f"{mean:.4f}" for mean in means), f"{min(means):.4f}"])
        print(f"\n{problem}: held-out loss after {STEPS[problem]} steps, mean of {seeds} seeds")
        print(table(["preconditioned", *(f"lr {rate:g}" for rate in rates), "best"], rows))
        results[problem] = {"rates": rates, "steps": STEPS[problem], "losses": found}
    write_json("layers", results)


if __name__ == "__main__":
    main()
