"""Checkpoints of earlier versions still load, and training goes on as it did then.

``before-methods.pt`` was written before methods had options of their own: the model and the optimizer
after four steps, and the model after three more.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kronfac
from tests.distributed.equivalence import double_precision

HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        y = self.norm(h)
        mixed = self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = self.head(h + mixed).mean(1)
        return out


def step(model: nn.Module, optimizer: kronfac.KFAC, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randint(5, (6, 5), generator=generator)
    x = torch.cat([torch.arange(5).repeat(2, 1), drawn])  # every token, every time
    y = torch.randint(3, (8,), generator=generator)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_a_checkpoint_from_before_methods_had_options_of_their_own() -> None:
    saved = torch.load(HERE / "before-methods.pt", weights_only=True)
    with double_precision():
        model = Net()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        options = {"momentum": 0.9, "factor_every": 1, "refresh_every": 3, "damping": 0.03}
        optimizer = kronfac.KFAC(model, base, rescale="graft", **options)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for number in range(4, 7):
            step(model, optimizer, number)
        torch.testing.assert_close(dict(model.state_dict()), saved["later"], rtol=1e-9, atol=1e-11)
