"""The models that benchmarks run on, each with a random batch and its loss.

`WORKLOADS[name](batch_size=..., seed=...)` returns `(model, batch, loss_fn)`; the loss of a step is
`loss_fn(model(inputs), targets)` with `inputs, targets = batch`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from suite.nets import Llama
from torch import Tensor, nn
from torch.nn import functional as F

from kronfac.train.models import MLP, CifarResNet
from kronfac.train.models.transformer import TransformerBlock


class Workload(NamedTuple):
    """What one training step needs."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]
    loss_fn: Callable[[Tensor, Tensor], Tensor]


class Transformer(nn.Module):
    """A small GPT-like language model with learned positions and an untied head.

    Unlike the program's GPT it has the exact GELU and torch's default initialisation, by which the
    recorded results were made.
    """

    def __init__(
        self,
        vocab: int = 256,
        length: int = 64,
        d_model: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        self.positions = nn.Embedding(length, d_model)
        self.blocks = nn.Sequential(
            *(
                TransformerBlock(d_model, num_heads, causal=True, gelu="none", eps=1e-5)
                for _ in range(num_layers)
            )
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token numbers [N, S] to logits [N, S, vocab]."""
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions(places))))


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens; logits [N, S, vocab], targets [N, S]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def resnet20_workload(batch_size: int = 128, seed: int = 0) -> Workload:
    """ResNet-20 on random 32x32 images in 10 classes."""
    torch.manual_seed(seed)
    batch = torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))
    return Workload(CifarResNet(20), batch, F.cross_entropy)


def transformer_workload(batch_size: int = 32, seed: int = 0) -> Workload:
    """The transformer on random sequences of 64 tokens, predicting the next one."""
    torch.manual_seed(seed)
    text = torch.randint(256, (batch_size, 65))
    return Workload(Transformer(), (text[:, :-1], text[:, 1:]), token_cross_entropy)


def llama_workload(batch_size: int = 32, seed: int = 0) -> Workload:
    """A decoder whose queries, keys and values, and gates, are layers of their own."""
    torch.manual_seed(seed)
    text = torch.randint(256, (batch_size, 65))
    model = Llama(dim=128, depth=4, heads=4, tied=False)
    return Workload(model, (text[:, :-1], text[:, 1:]), token_cross_entropy)


def mlp_workload(batch_size: int = 128, seed: int = 0) -> Workload:
    """The perceptron on random vectors of 784 numbers in 10 classes."""
    torch.manual_seed(seed)
    batch = torch.randn(batch_size, 784), torch.randint(10, (batch_size,))
    return Workload(MLP(10, (784,), hidden=(1024, 1024)), batch, F.cross_entropy)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "resnet20": resnet20_workload,
    "transformer": transformer_workload,
    "llama": llama_workload,
    "mlp": mlp_workload,
}
