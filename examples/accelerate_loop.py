"""K-FAC under Accelerate, on handwritten digits.

    python examples/accelerate_loop.py [--steps 100] [--precision bf16]

The only line that differs from training without K-FAC is the one that makes `optimizer`.
"""

import argparse
import itertools

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kronfac


def loader(batch: int) -> DataLoader:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32)
    data = TensorDataset(x, torch.tensor(labels))
    return DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--precision", default="no", choices=["no", "bf16", "fp16"])
    arguments = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=arguments.precision)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = kronfac.KFAC(model, base, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, arguments.steps)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, loader(32), schedule)

    losses: list[float] = []
    batches = itertools.chain.from_iterable(itertools.repeat(data))
    for x, y in itertools.islice(batches, 2 * arguments.steps):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()  # after the step: before it, it would forget micro-batches
        losses.append(loss.item())
    print(optimizer.optimizer)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
