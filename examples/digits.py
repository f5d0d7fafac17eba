"""K-FAC against SGD on handwritten digits: who is first to 98 % test accuracy?

    python examples/digits.py [--plot digits.png] [--seeds 5]

Both have the same network, data, batch size and shape of schedule (linear decay to zero). Learning
rates and schedule lengths were chosen for each by `--tune`, which tries the grid below on other
seeds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kronfac

TARGET = 0.98
BATCH = 64
GRID = {
    "SGD": [(lr, epochs) for lr in (0.1, 0.2, 0.3) for epochs in (6, 9, 12)],
    "K-FAC": [(lr, epochs) for lr in (0.03, 0.05, 0.1) for epochs in (2, 3, 4)],
}
CHOSEN = {"SGD": (0.2, 9), "K-FAC": (0.05, 4)}


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, 3, padding=1, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64 * 4, 10),
    )


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)


def kfac(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return kronfac.KFAC(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        damping=1e-4,
        momentum=0.9,
        nesterov=True,
        rescale="unit",
        solver="cholesky",
        factor_every=10,
        refresh_every=50,
    )


Maker = Callable[[nn.Module, float], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "SGD": sgd,
    "K-FAC": kfac,
}


@dataclass
class Curve:
    """Test accuracy at a number of steps and of seconds spent training (tests are not timed)."""

    steps: list[int]
    seconds: list[float]
    accuracy: list[float]

    def first(self, values: list, target: float):
        """Value at which the target was reached, or None."""
        reached = [v for v, a in zip(values, self.accuracy, strict=True) if a >= target]
        return reached[0] if reached else None


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return images[500:], labels[500:], images[:500], labels[:500]


def train(make: Maker, lr: float, epochs: int, seed: int, every: int = 5) -> Curve:
    images, labels, test_images, test_labels = load()
    torch.manual_seed(seed)
    model = make_network()
    optimizer = make(model, lr)
    total = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    curve, spent, step = Curve([], [], []), 0.0, 0
    while step < total:
        for batch in torch.randperm(len(images)).split(BATCH):
            if len(batch) < BATCH or step == total:
                break
            started = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
            spent += time.perf_counter() - started
            step += 1
            if step % every == 0 or step == total:
                with torch.no_grad():
                    accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
                curve.steps.append(step)
                curve.seconds.append(spent)
                curve.accuracy.append(accuracy)
    return curve


def tune() -> None:
    for name, settings in GRID.items():
        for lr, epochs in settings:
            curves = [train(MAKERS[name], lr, epochs, seed) for seed in range(100, 103)]
            final = statistics.mean(c.accuracy[-1] for c in curves)
            steps = [c.first(c.steps, TARGET) for c in curves]
            print(f"{name:6} lr {lr:<5} epochs {epochs:<3} accuracy {final:.2%}  to target {steps}")


def compare(seeds: int) -> dict[str, list[Curve]]:
    # Seeds take turns between the optimizers, so that a slow moment of the machine hits both.
    curves: dict[str, list[Curve]] = {name: [] for name in MAKERS}
    for seed in range(seeds):
        for name in MAKERS:
            curves[name].append(train(MAKERS[name], *CHOSEN[name], seed=seed))
    return curves


def report(curves: dict[str, list[Curve]]) -> None:
    seeds = len(curves["SGD"])
    print(f"Digits: 1,297 training images, batch {BATCH}, medians over {seeds} seeds\n")
    goal = f"{TARGET:.0%}"
    heads = ("steps", "ms/step", f"steps to {goal}", f"seconds to {goal}", "reached", "final")
    print(f"{'':6}" + " ".join(f"{head:>{max(8, len(head))}}" for head in heads))
    for name, runs in curves.items():
        steps, seconds = runs[0].steps[-1], statistics.median(c.seconds[-1] for c in runs)
        found = [c for c in runs if c.first(c.steps, TARGET) is not None]
        cells = [
            str(steps),
            f"{1e3 * seconds / steps:.1f}",
            "never",
            "never",
            f"{len(found)}/{seeds}",
        ]
        if found:
            cells[2] = f"{statistics.median(c.first(c.steps, TARGET) for c in found):.0f}"
            cells[3] = f"{statistics.median(c.first(c.seconds, TARGET) for c in found):.2f}"
        cells.append(f"{statistics.median(c.accuracy[-1] for c in runs):.1%}")
        widths = [max(8, len(head)) for head in heads]
        print(f"{name:6}" + " ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))


def plot(curves: dict[str, list[Curve]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    colours = {"SGD": "#8a8a8a", "K-FAC": "#c0392b"}
    for name, runs in curves.items():
        for number, curve in enumerate(runs):
            label = name if number == 0 else None
            error = [100 * (1 - a) for a in curve.accuracy]
            axes[0].plot(curve.steps, error, color=colours[name], alpha=0.7, lw=1.2, label=label)
            axes[1].plot(curve.seconds, error, color=colours[name], alpha=0.7, lw=1.2)
    for axis, label in zip(axes, ("steps", "seconds"), strict=True):
        axis.axhline(100 * (1 - TARGET), color="black", lw=0.8, ls=":")
        axis.set(xlabel=label, yscale="log")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("test error, %")
    axes[0].set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=140)
    print(f"\nCurves: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plot", default="digits.png", help="where to save the picture")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tune", action="store_true", help="try the grid instead")
    arguments = parser.parse_args()
    if arguments.tune:
        tune()
        return
    curves = compare(arguments.seeds)
    report(curves)
    plot(curves, arguments.plot)


if __name__ == "__main__":
    main()
