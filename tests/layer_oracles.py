"""Slow, obvious float64 references for embeddings, norm layers and transposed linear layers.

They share no code with the library. A `loss` is a function of a model that returns the scalar to
differentiate, so that the same loss can be taken of a model and of its reference. `divisor` is what
that loss was divided by (samples, unmasked terms, or one for a sum).

The trick throughout is to replace a module by one from which its statistics can be read off:
- attention becomes four ordinary `nn.Linear` and einsums (`attention_oracle`);
- a transposed linear layer becomes an `nn.Linear`;
- a norm layer gets one copy of its weight and bias for every sample, so that autograd gives the
  gradient of every sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests import oracles

Loss = Callable[[nn.Module], Tensor]


# --- watching and replacing modules ----------------------------------------------------------


@contextmanager
def recorded(module: nn.Module) -> Iterator[list[oracles.LayerCall]]:
    """Every call of a module inside, in order."""
    calls: list[oracles.LayerCall] = []

    def remember(_: nn.Module, args: tuple[Tensor, ...], z: Tensor) -> Tensor:
        calls.append(oracles.LayerCall(args[0].detach().clone(), z))
        return z.clone()

    handle = module.register_forward_hook(remember)
    try:
        yield calls
    finally:
        handle.remove()


def calls_with_gradients(
    model: nn.Module, name: str, loss: Loss
) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """The module, its input and the gradient of its output, for each call of a named module."""
    module = model.get_submodule(name)
    with recorded(module) as calls:
        value = loss(model)
    grads = torch.autograd.grad(value, [call.z for call in calls], materialize_grads=True)
    return [(module, call.x, g) for call, g in zip(calls, grads, strict=True)]


def replaced(model: nn.Module, name: str, make: Callable[[Any], nn.Module]) -> nn.Module:
    """A copy of the model in which the named module is what `make` makes of it."""
    model = copy.deepcopy(model)
    if not name:
        return make(model)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, make(model.get_submodule(name)))
    return model


# --- linear layers, however they are stored --------------------------------------------------


def linear_factors(
    model: nn.Module,
    names: str | list[str],
    loss: Loss,
    divisor: float | None,
    sharing: oracles.Sharing = "expand",
) -> tuple[Tensor, Tensor]:
    """A and G of a linear layer over all its calls; several names share one weight."""
    names = [names] if isinstance(names, str) else names
    calls = [call for name in names for call in calls_with_gradients(model, name, loss)]
    rows = [oracles.layer_rows(*call) for call in calls]
    if sharing == "expand":  # rows need no grouping
        rows = [tuple(side.reshape(1, -1, side.shape[-1]) for side in pair) for pair in rows]  # type: ignore[misc]
    a, g = (torch.cat(side, dim=-2) for side in zip(*rows, strict=True))
    return oracles.kfac_factors(a, g, sharing, divisor)


def linear_gradient(model: nn.Module, name: str, loss: Loss) -> Tensor:
    """The gradient of a linear layer as its matrix V."""
    model.zero_grad()
    loss(model).backward()
    gradient = oracles.matrix_gradient(model.get_submodule(name))
    model.zero_grad()
    return gradient


def linear_step(
    model: nn.Module,
    name: str,
    loss: Loss,
    gamma: float,
    divisor: float | None,
    sharing: oracles.Sharing = "expand",
    solve: Callable[..., Tensor] = oracles.eigen_step,
) -> Tensor:
    """What K-FAC makes of V in one step."""
    A, G = linear_factors(model, name, loss, divisor, sharing)
    return solve(A, G, linear_gradient(model, name, loss), gamma)


def as_linear(conv: Any) -> nn.Linear:
    """A layer with the weight `[in, out]` as an ordinary linear layer."""
    rows, columns = conv.weight.shape
    linear = nn.Linear(rows, columns, bias=conv.bias is not None, dtype=conv.weight.dtype)
    assign(linear.weight, conv.weight.T, conv.weight)
    if conv.bias is not None:
        assign(linear.bias, conv.bias, conv.bias)
    return linear


def assign(target: nn.Parameter, value: Tensor, original: Tensor) -> None:
    """Copy numbers, and whether they are trained."""
    with torch.no_grad():
        target.copy_(value)
    target.requires_grad_(original.requires_grad)


# --- embeddings ------------------------------------------------------------------------------


def embedding_factors(
    model: nn.Module, name: str, loss: Loss, divisor: float | None
) -> tuple[Tensor, Tensor, int]:
    """A (diagonal, as a matrix), G, and the number of rows, token by token over all calls."""
    layer: Any = model.get_submodule(name)
    counts = torch.zeros(layer.num_embeddings, dtype=torch.float64)
    G = torch.zeros(layer.embedding_dim, layer.embedding_dim, dtype=torch.float64)
    for _, tokens, grads in calls_with_gradients(model, name, loss):
        for token, g in zip(tokens.flatten().tolist(), grads.flatten(0, -2), strict=True):
            if token == layer.padding_idx:
                continue
            counts[token] += 1
            G += torch.outer(g, g)
    rows = int(counts.sum())
    return (counts / rows).diag(), (divisor or 1.0) * G, rows


def embedding_step(
    A: Tensor, G: Tensor | None, V: Tensor, gamma: float, solve: Any = oracles.eigen_step
) -> Tensor:
    """The solution for seen tokens, the raw gradient for the others; V is `[dim, tokens]`."""
    step = solve(A, G, V, gamma)
    unseen = A.diag() == 0
    step[:, unseen] = V[:, unseen].double()
    return step


# --- norm layers -----------------------------------------------------------------------------


def normalized(norm: Any, x: Tensor) -> Tensor:
    """The input of a norm layer's weight, from the definition; batch norm in training mode."""
    if isinstance(norm, nn.modules.batchnorm._BatchNorm):
        dims = [d for d in range(x.dim()) if d != 1]
        return _standardized(x, dims, norm.eps)
    if isinstance(norm, nn.modules.instancenorm._InstanceNorm):
        return _standardized(x, list(range(2, x.dim())), norm.eps)
    if isinstance(norm, nn.GroupNorm):
        grouped = x.reshape(len(x), norm.num_groups, -1)
        return _standardized(grouped, [2], norm.eps).reshape(x.shape)
    if isinstance(norm, nn.LayerNorm):
        return _standardized(x, list(range(-len(norm.normalized_shape), 0)), norm.eps)
    dims = list(range(-norm.weight.dim(), 0))  # root mean square
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return x / (x.square().mean(dims, keepdim=True) + eps).sqrt()


def _standardized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()


class PerSampleNorm(nn.Module):
    """A norm layer with a copy of its parameters for every entry of dimension 0."""

    def __init__(self, norm: Any, samples: int) -> None:
        super().__init__()
        self.norm = norm
        self.channels_first = isinstance(
            norm,
            nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm | nn.GroupNorm,
        )
        self.copies = nn.ParameterList(_copies(p, samples) for p in norm_parameters(norm))

    def forward(self, x: Tensor) -> Tensor:
        norm, trained = self.norm, norm_parameters(self.norm)
        z = normalized(norm, x) * self._spread(self._of(norm.weight, trained), x)
        bias = getattr(norm, "bias", None)
        return z if bias is None else z + self._spread(self._of(bias, trained), x)

    def _of(self, parameter: Tensor, trained: list[nn.Parameter]) -> Tensor:
        """The copies of a trained parameter, or a frozen one as it is: `[N or 1, *shape]`."""
        for original, copies in zip(trained, self.copies, strict=True):
            if original is parameter:
                return copies
        return parameter[None]

    def _spread(self, parameter: Tensor, x: Tensor) -> Tensor:
        """Put the parameter's dimensions where the input has them."""
        missing = [1] * (x.dim() - parameter.dim())
        if self.channels_first:
            return parameter.reshape(*parameter.shape, *missing)
        return parameter.reshape(len(parameter), *missing, *parameter.shape[1:])


def _copies(parameter: Tensor, samples: int) -> nn.Parameter:
    return nn.Parameter(parameter.detach().expand(samples, *parameter.shape).clone())


def norm_parameters(norm: Any) -> list[nn.Parameter]:
    """What is trained of weight and bias, in this order."""
    both = [norm.weight, getattr(norm, "bias", None)]
    return [p for p in both if p is not None and p.requires_grad]


def norm_sample_gradients(model: nn.Module, name: str, loss: Loss, samples: int) -> Tensor:
    """Gradient of every sample, summed over its positions and all calls: `[N, C, 1 or 2]`."""
    copied = replaced(model, name, lambda norm: PerSampleNorm(norm, samples))
    copies = list(copied.get_submodule(name).copies)
    grads = torch.autograd.grad(loss(copied), copies, materialize_grads=True)
    return torch.stack([g.flatten(1) for g in grads], dim=-1).double()


def norm_fisher(u: Tensor, divisor: float | None) -> Tensor:
    """`F_c = divisor · Σₙ uₙuₙᵀ`, one small matrix per channel: `[C, p, p]`."""
    fisher = torch.zeros(u.shape[1], u.shape[2], u.shape[2], dtype=torch.float64)
    for sample in u:
        for channel, vector in enumerate(sample):
            fisher[channel] += torch.outer(vector, vector)
    return (divisor or 1.0) * fisher


def norm_step(fisher: Tensor, gradient: Tensor, gamma: float) -> Tensor:
    """`(F_c + γI)⁻¹ (grad_w, grad_b)` per channel; the gradient is `[C, p]`."""
    identity = torch.eye(fisher.shape[-1], dtype=torch.float64)
    steps = [
        torch.linalg.solve(matrix + gamma * identity, vector.double())
        for matrix, vector in zip(fisher, gradient, strict=True)
    ]
    return torch.stack(steps)


def norm_exact_fisher(
    model: nn.Module, name: str, outputs: Callable[[nn.Module], Tensor]
) -> Tensor:
    """Each channel's block of the dense GGN of a mean of cross entropies, one output at a time."""
    norm = model.get_submodule(name)
    logits = outputs(model)
    blocks = []
    for f in logits:
        rows = [torch.autograd.grad(value, norm_parameters(norm), retain_graph=True) for value in f]
        jacobian = torch.stack([torch.stack([g.flatten() for g in row], -1) for row in rows])
        hessian = oracles.loss_hessian(f, "categorical")
        blocks.append(torch.einsum("icp,ij,jcq->cpq", jacobian, hessian, jacobian))
    return torch.stack(blocks).mean(0)


# --- averages over time ----------------------------------------------------------------------


def decayed(first: Tensor, newest: Tensor, decay: float, counts: tuple[float, float]) -> Tensor:
    """The mean of a statistic after two batches that count that much."""
    old, new = decay * counts[0], counts[1]
    return (old * first + new * newest) / (old + new)
