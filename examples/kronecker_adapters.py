"""Fine-tune a trained network with Kronecker adapters, beside low-rank ones of the same size.

    python examples/kronecker_adapters.py

A perceptron learns digits, then the images are turned upside down. All of its weights are frozen, and
adapters learn the new images: W + A ⊗ B, which may change W in every direction, and W + U V of rank one
(LoRA) with no fewer parameters. K-FAC trains both. Merging leaves a plain network with the same outputs.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kronfac

STEPS, BATCH, TEST = 200, 128, 400


class LowRank(nn.Module):
    """A frozen layer and a product of two thin matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 1) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, in] to [N, out]."""
        return self.layer(x) + self.up(self.down(x))


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> None:
    trainable = [p for p in model.parameters() if p.requires_grad]
    base = torch.optim.SGD(trainable, lr=0.1)
    optimizer = kronfac.KFAC(model, base, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LinearLR(base, 1.0, 0.0, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        schedule.step()
    optimizer.detach()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def trainable(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    images, labels = images[order], labels[order]
    upright, turned = images.flatten(1), images.flip(1, 2).flatten(1)
    test = slice(0, TEST)
    model = network()
    train(model, upright[TEST:], labels[TEST:], STEPS)
    content = model.state_dict()
    print(f"upright, whole network:       {accuracy(model, upright[test], labels[test]):.1%}")
    print(f"turned, before fine-tuning:   {accuracy(model, turned[test], labels[test]):.1%}")

    kronecker = network()
    kronecker.load_state_dict(content)
    kronfac.nn.attach_adapters(kronecker, include=["0", "2"])
    low_rank = network()
    low_rank.load_state_dict(content)
    low_rank.requires_grad_(False)
    for name in ("0", "2"):
        low_rank.set_submodule(name, LowRank(low_rank.get_submodule(name)))
    for name, one in (("Kronecker", kronecker), ("low rank", low_rank)):
        train(one, turned[TEST:], labels[TEST:], STEPS)
        reached = accuracy(one, turned[test], labels[test])
        print(f"turned, {name + ':':<13}{trainable(one):>5} parameters {reached:.1%}")
    before = kronecker(turned[test])
    kronfac.nn.merge_adapters(kronecker)
    print(
        f"merging changes outputs by at most {(kronecker(turned[test]) - before).abs().max():.0e}"
    )


if __name__ == "__main__":
    main()
