"""Compress a trained recurrent net by Kronecker products, beside low rank and pruning of equal size.

    python benchmarks/kronecker.py [--steps 600] [--seeds 1]

An LSTM reads Fashion-MNIST row by row (28 steps of 28 numbers). Its two matrices are replaced by the
nearest Kronecker product, by the nearest product of two thin matrices, or keep their largest entries
only; each then has as many parameters as the Kronecker layer and is fine-tuned alike (AdamW, the same
steps). Thakker et al. (2019) promise 16 to 38 times fewer parameters at nearly the same accuracy.
"""

import argparse
import copy
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _common import interleave, machine_line, table, write_json
from torch import Tensor, nn

from kronfac.nn import compress
from kronfac.train import data

HIDDEN, BATCH, TRAIN, TEST = 128, 128, 20_000, 4_000
FACTORS = (15.9, 31)


class Reader(nn.Module):
    """A recurrent net that reads an image row by row and names it."""

    def __init__(self, cell: nn.Module | None = None) -> None:
        super().__init__()
        self.cell = nn.LSTM(28, HIDDEN, batch_first=True) if cell is None else cell
        self.head = nn.Linear(HIDDEN, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, 28, 28] to scores [N, 10]."""
        return self.head(self.cell(x)[0][:, -1])


def matrices(model: Reader) -> int:
    """Parameters of the recurrent layer without its biases."""
    return sum(p.numel() for p in model.cell.parameters() if p.dim() == 2)


def fit(
    model: Reader,
    images: Tensor,
    labels: Tensor,
    steps: int,
    rate: float,
    after: Callable[[], None] = lambda: None,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        after()


@torch.no_grad()
def accuracy(model: Reader, images: Tensor, labels: Tensor) -> float:
    right = [
        (model(x).argmax(1) == y).sum()
        for x, y in zip(images.split(500), labels.split(500), strict=True)
    ]
    return float(sum(right)) / len(labels)


class LowRank(nn.LSTM):
    """An LSTM whose matrices are products of two thin ones, computed through torch's own cell."""

    def __init__(self, layer: nn.LSTM, budget: int) -> None:
        super().__init__(layer.input_size, layer.hidden_size, batch_first=True)
        sizes = [getattr(layer, f"weight_{kind}_l0").shape for kind in ("ih", "hh")]
        share = budget / sum(rows * columns for rows, columns in sizes)
        self.load_state_dict(layer.state_dict())
        for kind, (rows, columns) in zip(("ih", "hh"), sizes, strict=True):
            weight = getattr(layer, f"weight_{kind}_l0").detach()
            rank = max(1, int(share * rows * columns / (rows + columns)))
            left, values, right = torch.linalg.svd(weight, full_matrices=False)
            delattr(self, f"weight_{kind}_l0")
            scale = values[:rank].sqrt()
            setattr(self, f"left_{kind}", nn.Parameter(left[:, :rank] * scale))
            setattr(self, f"right_{kind}", nn.Parameter(scale[:, None] * right[:rank]))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        """See :class:`torch.nn.LSTM`."""
        weights = [self.left_ih @ self.right_ih, self.left_hh @ self.right_hh]
        zeros = x.new_zeros(1, len(x), self.hidden_size)
        all_weights = [*weights, self.bias_ih_l0, self.bias_hh_l0]
        out, h, c = torch.lstm(
            x, (zeros, zeros), all_weights, True, 1, 0.0, self.training, False, True
        )
        return out, (h, c)


def pruned(layer: nn.LSTM, budget: int) -> tuple[nn.LSTM, Callable[[], None]]:
    """A copy with its largest entries, as many as the budget, and what keeps the others at zero."""
    layer = copy.deepcopy(layer)
    weights = [layer.weight_ih_l0, layer.weight_hh_l0]
    sizes = torch.cat([w.detach().abs().flatten() for w in weights])
    bound = sizes.topk(budget).values[-1]
    masks = [w.detach().abs() >= bound for w in weights]

    @torch.no_grad()
    def mask() -> None:
        for weight, kept in zip(weights, masks, strict=True):
            weight.mul_(kept)

    mask()
    return layer, mask


def compare(steps: int, seed: int) -> list[dict[str, Any]]:
    source = data.load("fashion-mnist")
    images, labels = source.train_batch(torch.arange(TRAIN))
    test_images, test_labels = source.test_batch(torch.arange(TEST))
    images, test_images = images.squeeze(1), test_images.squeeze(1)
    torch.manual_seed(seed)
    whole = Reader()
    fit(whole, images, labels, 2 * steps, 3e-3)
    rows = [{"kind": "whole", "factor": 1, "parameters": matrices(whole)}]
    rows[0] |= {"after": accuracy(whole, test_images, test_labels), "seed": seed}
    print(rows[0], flush=True)
    for factor in FACTORS:
        kronecker = compress(whole, factor, exclude="head")
        budget = matrices(kronecker)
        cell, mask = pruned(whole.cell, budget)
        others: dict[str, tuple[Reader, Callable[[], None]]] = {
            "Kronecker": (kronecker, lambda: None),
            "low rank": (Reader(LowRank(whole.cell, budget)), lambda: None),
            "pruned": (Reader(cell), mask),
        }
        for kind, (model, after) in others.items():
            model.head.load_state_dict(whole.head.state_dict())
            before = accuracy(model, test_images, test_labels)
            fit(model, images, labels, steps, 3e-3, after)
            used = budget if kind == "pruned" else matrices(model)
            row = {"kind": kind, "factor": factor, "parameters": used, "before": before}
            row |= {"after": accuracy(model, test_images, test_labels), "seed": seed}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def inference() -> list[dict[str, Any]]:
    """Milliseconds of one product with a batch, dense and Kronecker."""
    rows = []
    with torch.no_grad():
        for size in (256, 1024, 2048):
            dense = nn.Linear(size, size)
            product = compress(dense, 16)
            x = torch.randn(64, size)
            found = interleave(
                {"dense": lambda d=dense, x=x: d(x), "product": lambda p=product, x=x: p(x)},
                rounds=20,
                calls=20,
                warmup=5,
            )
            rows.append(
                {
                    "size": size,
                    "dense_ms": 1e3 * found["dense"].spread.median,
                    "product_ms": 1e3 * found["product"].spread.median,
                    "ratio": found["product"].ratio(found["dense"]).median,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    print(machine_line())
    rows = [row for seed in range(arguments.seeds) for row in compare(arguments.steps, seed)]
    shown = [
        [
            f"{row['kind']} / {rows[0]['parameters'] / row['parameters']:.0f}",
            f"{row['parameters']:,}",
            f"{row['before']:.1%}" if "before" in row else "",
            f"{row['after']:.1%}",
        ]
        for row in rows
    ]
    print(table(["kind / times smaller", "parameters", "before tuning", "after"], shown))
    times = inference()
    cells = [
        [
            f"{t['size']} × {t['size']}",
            f"{t['dense_ms']:.3f}",
            f"{t['product_ms']:.3f}",
            f"{t['ratio']:.2f}",
        ]
        for t in times
    ]
    print(table(["matrix, batch 64", "dense ms", "product ms", "ratio"], cells))
    write_json("kronecker", {"rows": rows, "inference": times})


if __name__ == "__main__":
    main()
