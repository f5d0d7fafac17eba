"""The layers of a net that are preconditioned, by definition, and what is kept for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.blocks import Conv1D
from tests.fuzz.cases import Case
from tests.fuzz.nets import Net

MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)
NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


@dataclass
class Mean:
    """A decayed ``sum/count``; when nothing is counted any more, the last mean stays."""

    sum: Tensor | None = None
    count: float = 0.0
    last: Tensor | None = None

    def decay(self, decay: float) -> None:
        if self.sum is not None:
            self.sum, self.count = self.sum * decay, self.count * decay

    def add(self, total: Tensor, count: float) -> None:
        self.sum = total if self.sum is None else self.sum + total
        self.count += count

    def value(self) -> Tensor | None:
        if self.sum is not None and self.count > 0:
            self.last = self.sum / self.count
        return self.last


@dataclass
class Layer:
    """A weight with its bias, the modules that use it, and what is known of it."""

    kind: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    view: Callable[[Tensor], Tensor]
    bias_view: Callable[[Tensor], Tensor] = lambda bias: bias
    names: list[str] = field(default_factory=list)
    A: Mean = field(default_factory=Mean)
    G: Mean = field(default_factory=Mean)
    #: Tokens that were ever seen, now and at the last refresh.
    seen_tokens: Tensor | None = None
    solved_tokens: Tensor | None = None
    solved: tuple[Tensor | None, Tensor | None, float] | None = None
    last_refresh: int | None = None
    momentum: Tensor | None = None

    @property
    def has_bias(self) -> bool:
        return self.bias is not None and self.bias.requires_grad

    def input_factor(self) -> Tensor | None:
        """A; a token that was ever seen counts as at least one row."""
        A = self.A.value()
        if A is None or self.kind != "embedding":
            return A
        assert self.seen_tokens is not None
        least = self.seen_tokens / self.A.count if self.A.count > 0 else torch.zeros_like(A[0])
        return torch.maximum(A.diagonal(), least).diag()

    def gradient(self) -> Tensor:
        """V: ``[*b, d_out, d_in]``, or ``[C, 1 or 2]`` of a norm."""
        assert self.weight.grad is not None
        matrix = self.view(self.weight.grad)
        if not self.has_bias:
            return matrix.clone()
        assert self.bias is not None
        assert self.bias.grad is not None
        column = self.bias_view(self.bias.grad).reshape(*matrix.shape[:-1], 1)
        return torch.cat([matrix, column], -1)

    def write(self, matrix: Tensor) -> None:
        if self.has_bias:
            assert self.bias is not None
            target = self.bias_view(self.bias.grad)  # type: ignore[arg-type]
            target.copy_(matrix[..., -1].reshape(target.shape))
            matrix = matrix[..., :-1]
        self.view(self.weight.grad).copy_(matrix)  # type: ignore[arg-type]


# --- which layers there are ------------------------------------------------------------------


def find_layers(net: Net, case: Case) -> list[Layer]:
    """The layers that are preconditioned."""
    found: list[Layer] = []
    for name, module in net.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            found += _projections(name, module)
        elif (layer := _layer(name, module)) is not None:
            _join(found, layer)
    unused_kinds = {"forward": ("norm",)}.get(case.options["fisher"], ())
    if case.options["rescale"] in ("unit", "orthogonal"):
        unused_kinds = ("norm", "embedding")
    return [one for one in found if one.weight.requires_grad and one.kind not in unused_kinds]


def _layer(name: str, module: Any) -> Layer | None:
    if isinstance(module, nn.Embedding):
        return Layer("embedding", module.weight, None, lambda w: w.T, names=[name])
    if isinstance(module, NORMS):
        bias = getattr(module, "bias", None)
        return Layer("norm", module.weight, bias, lambda w: w.view(-1, 1), torch.flatten, [name])
    if isinstance(module, Conv1D):
        return Layer("matrix", module.weight, module.bias, lambda w: w.T, names=[name])
    if isinstance(module, MATRICES):
        groups = getattr(module, "groups", 1)

        def view(weight: Tensor) -> Tensor:
            matrix = weight.flatten(1)
            return matrix if groups == 1 else matrix.unflatten(0, (groups, -1))

        return Layer("matrix", module.weight, module.bias, view, names=[name])
    return None


def _join(found: list[Layer], layer: Layer) -> None:
    """A weight that is there already: a further use, or one that is not observed."""
    for index, other in enumerate(found):
        if other.weight is layer.weight:
            if other.kind == layer.kind and other.bias is layer.bias:
                other.names += layer.names
            elif other.kind == "embedding":  # the linear role has the curvature
                found[index] = layer
            return
    found.append(layer)


def _projections(name: str, attention: Any) -> list[Layer]:
    E, found = attention.embed_dim, []
    for index, part in enumerate("qkv"):
        third = slice(index * E, (index + 1) * E)

        def cut(packed: Tensor, third: slice = third) -> Tensor:
            return packed[third]

        packed = attention.in_proj_weight is not None
        weight = attention.in_proj_weight if packed else getattr(attention, f"{part}_proj_weight")
        view = cut if packed else torch.Tensor.detach
        twin = f"{name}.{part}_proj"
        found.append(Layer("matrix", weight, attention.in_proj_bias, view, cut, [twin]))
    return found
