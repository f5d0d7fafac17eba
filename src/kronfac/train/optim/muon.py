"""Muon on hidden matrices, AdamW on everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronfac.train.optim.composite import Composite


class FlatMuon(torch.optim.Muon):
    """torch's Muon, which takes matrices, on weights of any rank: rows are output channels."""

    def __init__(self, weights: Iterable[nn.Parameter], **options: Any) -> None:
        self.weights = list(weights)
        super().__init__([_as_matrix(weight) for weight in self.weights], **options)

    @property
    def matrices(self) -> list[nn.Parameter]:
        """Views of the weights, in their order."""
        return [matrix for group in self.param_groups for matrix in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Hand the gradients of the weights to their views, and step."""
        for matrix, weight in zip(self.matrices, self.weights, strict=True):
            matrix.grad = None if weight.grad is None else _rows(weight, weight.grad)
        return super().step(closure)  # type: ignore[no-untyped-call]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of weights and views."""
        super().zero_grad(set_to_none)
        for weight in self.weights:
            weight.grad = None


def muon_with_adamw(
    model: nn.Module, options: Mapping[str, Any], other_options: Mapping[str, Any]
) -> Composite:
    """Muon on the weights of hidden layers, AdamW on embeddings, output layer, norms and biases."""
    hidden = hidden_weights(model)
    known = set(hidden)
    rest = [p for p in model.parameters() if p not in known and p.requires_grad]
    members: list[Optimizer] = []
    if hidden:
        members.append(FlatMuon(hidden, **options))
    if rest:
        members.append(torch.optim.AdamW(rest, **other_options))
    return Composite(members[0], members[1] if len(members) > 1 else None)


def hidden_weights(model: nn.Module) -> list[nn.Parameter]:
    """Weights of linear and recurrent layers and convolutions, but embeddings and the output layer."""
    layers = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase)
    own = [
        dict(m.named_parameters(recurse=False)) for m in model.modules() if isinstance(m, layers)
    ]
    found = [p for params in own for name, p in params.items() if name.startswith("weight")]
    embedded = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    output = next((w for w in reversed(found) if w.dim() == 2), None)
    chosen = [w for w in found if w.requires_grad and w not in embedded and w is not output]
    return list(dict.fromkeys(chosen))


def _as_matrix(weight: nn.Parameter) -> nn.Parameter:
    """A matrix that shares the weight's memory: a step on one is a step on the other."""
    matrix = nn.Parameter(_rows(weight, weight.detach()))
    assert matrix.data_ptr() == weight.data_ptr()
    return matrix


def _rows(weight: Tensor, values: Tensor) -> Tensor:
    """``values`` as one row per output channel, in the order in which ``weight`` lies in memory.

    The order of columns does not matter to Muon.
    """
    strides = weight.stride()
    inner = sorted(range(1, weight.dim()), key=lambda dim: -strides[dim])
    return values.permute(0, *inner).reshape(len(weight), -1)
