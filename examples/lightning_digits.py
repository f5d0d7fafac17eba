"""K-FAC under Lightning, on handwritten digits.

    python examples/lightning_digits.py [--steps 100]

The only line that differs from training without K-FAC is the one in `configure_optimizers`.
"""

import argparse
import logging

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import kronfac


class Digits(L.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )
        self.losses: list[float] = []
        self.right: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.right.append(self.net(batch[0]).argmax(1) == batch[1])

    def configure_optimizers(self) -> dict:
        base = torch.optim.SGD(self.net.parameters(), lr=0.1)
        optimizer = kronfac.KFAC(self.net, base, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, self.steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def loaders() -> tuple[DataLoader, DataLoader]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    order = torch.randperm(len(x))
    data = TensorDataset(x[order], torch.tensor(labels)[order])
    train, test = torch.utils.data.random_split(data, [0.8, 0.2])
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.seed_everything(0, verbose=False)
    module = Digits(steps)
    train, test = loaders()
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="auto",
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train)
    trainer.test(module, test, verbose=False)
    print(trainer.optimizers[0])
    print(f"test accuracy {torch.cat(module.right).float().mean():.1%}")
    print(f"loss {module.losses[0]:.3f} -> {module.losses[-1]:.3f}")


if __name__ == "__main__":
    main()
