"""Recurrent nets of few parameters for benchmarks/kronecker.py: the rivals, and how all are trained.

While it trains with AdamW, every net runs through torch's own fused LSTM with the matrix that its few
parameters stand for: the same gradients, and the same time for all. Accuracy is measured with the real
layers.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kronfac
from kronfac.nn import KroneckerLSTM

INPUTS, CLASSES, BATCH = 28, 10, 64


class LowRank(nn.Module):
    """An LSTM whose matrices are products ``U V`` of two thin ones; from those of a trained layer."""

    def __init__(self, layer: nn.LSTM, budget: int) -> None:
        super().__init__()
        self.hidden_size = layer.hidden_size
        weights = [getattr(layer, f"weight_{kind}_l0").detach() for kind in ("ih", "hh")]
        # As the Kronecker layer does, the matrices share the parameters evenly.
        first = max(1, int(budget / 2 / sum(weights[0].shape)))
        rest = budget - first * sum(weights[0].shape)
        ranks = (first, int(rest / sum(weights[1].shape)))
        pairs = [nearest(w, rank) for w, rank in zip(weights, ranks, strict=True)]
        self.lefts = nn.ParameterList(u for u, _ in pairs)
        self.rights = nn.ParameterList(v for _, v in pairs)
        self.biases = nn.ParameterList(
            getattr(layer, f"bias_{kind}_l0").detach().clone() for kind in ("ih", "hh")
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Outputs at every time, the thin matrices one after the other."""
        seen = x @ self.rights[0].T @ self.lefts[0].T + self.biases[0] + self.biases[1]
        return read(seen, lambda h: h @ self.rights[1].T @ self.lefts[1].T, self.hidden_size), None


class Sparse(nn.Module):
    """An LSTM whose matrices keep one entry of so many, as compressed rows; for its time only."""

    def __init__(self, layer: nn.LSTM, factor: int) -> None:
        super().__init__()
        self.hidden_size = layer.hidden_size
        self.matrices = [
            torch.where(torch.rand(w.shape) < 1 / factor, w.detach(), 0.0).to_sparse_csr()
            for w in (layer.weight_ih_l0, layer.weight_hh_l0)
        ]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Outputs at every time."""
        first, second = self.matrices
        seen = (first @ x.flatten(0, 1).T).T.unflatten(0, x.shape[:2])
        return read(seen, lambda h: (second @ h.T).T, self.hidden_size), None


def read(seen: Tensor, product: Callable[[Tensor], Tensor], hidden: int) -> Tensor:
    """Outputs of an LSTM at every time, from products with the input and a product with the state."""
    h = c = seen.new_zeros(len(seen), hidden)
    outputs = []
    for at_time in seen.unbind(1):
        takes, keeps, content, shows = (at_time + product(h)).chunk(4, -1)
        c = torch.sigmoid(keeps) * c + torch.sigmoid(takes) * torch.tanh(content)
        h = torch.sigmoid(shows) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs, 1)


def nearest(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The nearest product of two thin matrices."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    scale = values[:rank].sqrt()
    return left[:, :rank] * scale, scale[:, None] * right[:rank]


class Reader(nn.Module):
    """A recurrent net that reads an image row by row and names it."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.head = nn.Linear(cell.hidden_size, CLASSES)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Map images [N, 28, 28] to scores [N, 10]."""
        return self.head(self.cell(x)[0][:, -1])

    def fused(self, x: Tensor) -> Tensor:
        """The same scores through torch's LSTM with matrices that are formed."""
        zeros = x.new_zeros(1, len(x), self.cell.hidden_size)  # type: ignore[arg-type]
        out, _, _ = torch.lstm(
            x, (zeros, zeros), dense(self.cell), True, 1, 0.0, self.training, False, True
        )
        return self.head(out[:, -1])


def dense(cell: nn.Module) -> list[Tensor]:
    """The two matrices and the two biases of a layer."""
    if isinstance(cell, LowRank):
        pairs = zip(cell.lefts, cell.rights, strict=True)
        return [*(left @ right for left, right in pairs), *cell.biases]
    if isinstance(cell, KroneckerLSTM):
        products: Any = [cell.inputs[0], cell.states[0]]
        return [one.dense() for one in products] + [one.bias for one in products]
    return list(cell.parameters())


def parameters(model: Reader) -> int:
    """Parameters of the recurrent layer without its biases that are not zero."""
    found = [p for p in model.cell.parameters() if p.dim() == 2]
    return sum(int(p.count_nonzero()) for p in found)


class Pruning:
    """Keeps the largest entries of a layer's matrices only, fewer and fewer (Zhu and Gupta 2017).

    In the first half of the steps the number falls from all to ``kept`` along a cubic; then it stays.
    """

    def __init__(self, cell: nn.Module, kept: int, steps: int, every: int = 20) -> None:
        self.weights = [p for p in cell.parameters() if p.dim() == 2]
        self.kept, self.until, self.every, self.step = kept, steps // 2, every, 0
        self.masks = [torch.ones_like(w, dtype=torch.bool) for w in self.weights]

    @torch.no_grad()
    def __call__(self) -> None:
        """Prune after an optimizer step."""
        self.step += 1
        if self.step == self.until or (self.step < self.until and self.step % self.every == 0):
            sizes = torch.cat([w.abs().flatten() for w in self.weights])
            progress = self.step / self.until
            number = self.kept + int((len(sizes) - self.kept) * (1 - progress) ** 3)
            bound = sizes.topk(number).values[-1]
            self.masks = [w.abs() >= bound for w in self.weights]
        for weight, mask in zip(self.weights, self.masks, strict=True):
            weight.mul_(mask)


def smaller(budget: int) -> nn.LSTM:
    """A fresh LSTM of fewer units, with at most so many parameters in its matrices."""
    hidden = int((math.sqrt(INPUTS**2 + budget) - INPUTS) / 2)
    return nn.LSTM(INPUTS, hidden, batch_first=True)


def stored(model: Reader, kind: str) -> int:
    """Bytes of the matrices in float32; a pruned one also says where its entries are.

    Compressed rows: 8 bits for the column of each entry, 16 bits for the start of each row.
    """
    entries = parameters(model)
    if kind != "pruned":
        return 4 * entries
    rows = [len(p) for p in model.cell.parameters() if p.dim() == 2]
    return 5 * entries + sum(2 * (number + 1) for number in rows)


def fit(
    model: Reader,
    images: Tensor,
    labels: Tensor,
    steps: int,
    rate: float,
    *,
    after: Callable[[], None] = lambda: None,
    kfac: bool = False,
    seed: int = 0,
) -> None:
    """Train with AdamW (or K-FAC), a warmup of 50 steps and a cosine to zero."""
    parameters = list(model.parameters())
    base: torch.optim.Optimizer
    base = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    optimizer, forward = base, model.fused
    if kfac:
        base = torch.optim.SGD(parameters, lr=rate)
        optimizer = kronfac.KFAC(model, base, momentum=0.9, nesterov=True)
        forward = model
    schedule = torch.optim.lr_scheduler.LambdaLR(
        base, lambda at: min(1, (at + 1) / 50) * 0.5 * (1 + math.cos(math.pi * at / steps))
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(forward(images[chosen]), labels[chosen]).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        after()
    if isinstance(optimizer, kronfac.KFAC):
        optimizer.detach()


@torch.no_grad()
def accuracy(model: Reader, images: Tensor, labels: Tensor) -> float:
    """Share of right names, with the real layers."""
    pairs = zip(images.split(500), labels.split(500), strict=True)
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)
    return right / len(labels)


def copied(whole: Reader, cell: nn.Module) -> Reader:
    """A net with another layer and a copy of the head."""
    model = Reader(cell)
    model.head = copy.deepcopy(whole.head)
    return model
