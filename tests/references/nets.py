"""What slow references see of a layer, by plain autograd, and how they train a net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests import oracles


class Seen(NamedTuple):
    """A batch at one layer: rows `a [N, S, d_in]` and `g [N, S, d_out]`, and gradients of samples.

    `g` and `U [N, d_out, d_in]` are of each sample's own loss, not divided by anything.
    """

    a: Tensor
    g: Tensor
    U: Tensor

    @property
    def V(self) -> Tensor:
        """The gradient of the mean loss."""
        return self.U.mean(0)

    @property
    def F(self) -> Tensor:
        """The empirical Fisher."""
        flat = self.U.flatten(1)
        return flat.T @ flat / len(flat)


def sample_losses(outputs: Tensor) -> Tensor:
    """One loss for each sample."""
    return (outputs - 1).square().flatten(1).sum(1)


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if isinstance(one, nn.Linear | nn.Conv2d)]


def see(model: nn.Module, layer: nn.Module, x: Tensor) -> Seen:
    """Run a batch and look at one layer."""
    outputs, (call,) = oracles.run_layer(model, layer, x)
    losses = sample_losses(outputs)
    (g,) = torch.autograd.grad(losses.sum(), call.z, retain_graph=True)
    U = torch.stack([oracles._parameter_gradient(layer, loss) for loss in losses])
    a, g = oracles.layer_rows(layer, call.x, g)
    return Seen(a, g, U.unflatten(1, (-1, a.shape[-1])))


#: From what a layer has seen and the number of the step to what replaces its gradient.
Rule = Callable[[Seen, int], Tensor]


def train(model: nn.Module, rules: list[Rule], batches: list[Tensor], lr: float) -> None:
    """Plain descent along what each layer's rule makes of its gradient."""
    layers = layers_of(model)
    for number, x in enumerate(batches):
        seen = [see(model, layer, x) for layer in layers]
        for layer, rule, one in zip(layers, rules, seen, strict=True):
            step = lr * rule(one, number)
            with torch.no_grad():
                if layer.bias is not None:
                    layer.bias -= step[:, -1]
                    step = step[:, :-1]
                layer.weight -= step.reshape(layer.weight.shape)


#: Nets whose factors have full rank at every batch, so that there is one eigenbasis only.
NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)
    ),
    "sequence": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
}
SHAPES = {"linear": (4,), "conv": (2, 4, 4), "sequence": (3, 4)}


def net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[kind]()


def batches(kind: str, count: int, samples: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(samples, *SHAPES[kind], generator=generator) for _ in range(count)]


def assert_trains_alike(
    optimizer: Any, other: nn.Module, rules: list[Rule], data: list[Tensor], lr: float
) -> None:
    """An optimizer and slow rules take two equal nets to the same parameters."""
    for x in data:
        optimizer.zero_grad()
        sample_losses(optimizer.model(x)).mean().backward()
        optimizer.step()
    train(other, rules, data, lr)
    for fast, slow in zip(optimizer.model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-10)
