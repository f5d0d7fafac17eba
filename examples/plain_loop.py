"""K-FAC in a plain loop for language models, in the manner of torchtitan.

    python examples/plain_loop.py [--steps 100]

The model is made on the meta device and filled afterwards, its blocks are checkpointed, gradients are
clipped, the learning rate warms up and falls, and half-way everything is saved and loaded with
`torch.distributed.checkpoint`. K-FAC is the line in `make_optimizer`; the optimizer comes after
`init_weights`, because `to_empty` replaces the parameters.
"""

import argparse
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

import kronfac

VOCABULARY, TOKENS, WIDTH, HEADS = 32, 16, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def forward(self, words: Tensor) -> Tensor:
        x = self.tokens(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def make_model() -> Transformer:
    with torch.device("meta"):
        model = Transformer()
    model.to_empty(device="cpu")
    model.init_weights()
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    # The loss is a mean over tokens, so that is what the statistics are told.
    return kronfac.KFAC(model, base, momentum=0.9, nesterov=True, loss_average="token")


def sentences(number: int) -> Tensor:
    """Counting by one to five from anywhere, modulo the vocabulary."""
    starts, strides = torch.randint(VOCABULARY, (number, 1)), torch.randint(1, 6, (number, 1))
    return (starts + strides * torch.arange(TOKENS + 1)) % VOCABULARY


def save_and_load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    for action in (dcp.save, dcp.load):
        weights, state = get_state_dict(model, optimizer)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            action({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5) * (1 - 0.9 * step / steps)
    )
    losses = []
    for step in range(steps):
        words = sentences(32)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step == steps // 2:
            with tempfile.TemporaryDirectory() as folder:
                save_and_load(model, optimizer, folder)
    print(optimizer)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
