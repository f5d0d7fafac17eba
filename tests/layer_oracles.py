"""Slow, obvious float64 references for embeddings, norm layers, attention and transposed linear layers.

They share no code with the library. A `loss` is a function of a model that returns the scalar to
differentiate, so that the same loss can be taken of a model and of its reference. `divisor` is what
that loss was divided by (samples, unmasked terms, or one for a sum).

The trick throughout is to replace a module by one from which its statistics can be read off:
- attention becomes four ordinary `nn.Linear` and einsums, written from the definition;
- a transposed linear layer becomes an `nn.Linear`;
- a norm layer gets one copy of its weight and bias for every sample, so that autograd gives the
  gradient of every sample.
"""

from __future__ import annotations

import copy
import math
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
    _assign(linear.weight, conv.weight.T, conv.weight)
    if conv.bias is not None:
        _assign(linear.bias, conv.bias, conv.bias)
    return linear


def _assign(target: nn.Parameter, value: Tensor, original: Tensor) -> None:
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


# --- attention -------------------------------------------------------------------------------

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class ReferenceAttention(nn.Module):
    """Multi-head attention from the definition: four linear layers, always on `[N, L, E]`."""

    def __init__(self, mha: Any) -> None:
        super().__init__()
        E, bias = mha.embed_dim, mha.in_proj_bias is not None
        self.heads, self.batch_first = mha.num_heads, mha.batch_first
        self.bias_k, self.bias_v, self.add_zero_attn = mha.bias_k, mha.bias_v, mha.add_zero_attn
        for part, name in enumerate(PROJECTIONS[:3]):
            weight = getattr(mha, f"{name}_weight")
            if weight is None:
                weight = mha.in_proj_weight
                values = weight[part * E : (part + 1) * E]
            else:
                values = weight
            linear = nn.Linear(values.shape[1], E, bias=bias, dtype=values.dtype)
            _assign(linear.weight, values, weight)
            if bias:
                _assign(linear.bias, mha.in_proj_bias[part * E : (part + 1) * E], mha.in_proj_bias)
            setattr(self, name, linear)
        self.out_proj = nn.Linear(E, E, bias=bias, dtype=mha.out_proj.weight.dtype)
        _assign(self.out_proj.weight, mha.out_proj.weight, mha.out_proj.weight)
        if bias:
            _assign(self.out_proj.bias, mha.out_proj.bias, mha.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        lone = query.dim() == 2
        query, key, value = (self._samples_first(x) for x in (query, key, value))
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        N, L, S = len(q), q.shape[1], k.shape[1]
        scores_added = torch.zeros(N, self.heads, L, S, dtype=q.dtype)
        if attn_mask is not None:
            added = _as_added(attn_mask, q.dtype)
            if added.dim() == 3:
                added = added.reshape(N, self.heads, L, S)
            scores_added = scores_added + added
        if key_padding_mask is not None:
            added = _as_added(key_padding_mask, q.dtype).reshape(N, 1, 1, S)
            scores_added = scores_added + added
        if self.bias_k is not None:
            k = torch.cat([k, self.bias_k.expand(N, 1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(N, 1, -1)], dim=1)
        if self.add_zero_attn:
            k = torch.cat([k, torch.zeros_like(k[:, :1])], dim=1)
            v = torch.cat([v, torch.zeros_like(v[:, :1])], dim=1)
        free = torch.zeros(N, self.heads, L, k.shape[1] - S, dtype=q.dtype)
        scores_added = torch.cat([scores_added, free], dim=-1)

        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (q, k, v))  # [N, L, heads, depth]
        scores = torch.einsum("nlhd,nshd->nhls", q, k) / math.sqrt(q.shape[-1]) + scores_added
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        mixed = torch.einsum("nhls,nshd->nlhd", weights, v).flatten(2)
        out = self.out_proj(mixed)
        if lone:
            out, weights = out[0], weights[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        if average_attn_weights:
            weights = weights.mean(-3)
        return out, weights if need_weights else None

    def _samples_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)


def _as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: True means that a position must not be looked at."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -math.inf)
    return mask


def attention_gradients(mha: Any) -> dict[str, Tensor]:
    """`.grad` of `nn.MultiheadAttention` as the matrix V of each of its four projections."""
    E, matrices = mha.embed_dim, {}
    bias = mha.in_proj_bias is not None and mha.in_proj_bias.requires_grad
    for part, name in enumerate(PROJECTIONS[:3]):
        third = slice(part * E, (part + 1) * E)
        weight = getattr(mha, f"{name}_weight")
        grad = mha.in_proj_weight.grad[third] if weight is None else weight.grad
        if bias:
            grad = torch.cat([grad, mha.in_proj_bias.grad[third, None]], dim=1)
        matrices[name] = grad.clone()
    matrices["out_proj"] = oracles.matrix_gradient(mha.out_proj).clone()
    return matrices


def with_separate_weights(mha: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """The same numbers in `q_proj_weight`, `k_proj_weight` and `v_proj_weight`."""
    E, bias = mha.embed_dim, mha.in_proj_bias is not None
    other: Any = nn.MultiheadAttention(
        E, mha.num_heads, bias=bias, kdim=E + 1, vdim=E + 1, batch_first=mha.batch_first
    )
    other.kdim = other.vdim = E
    q, k, v = (nn.Parameter(w.detach().clone()) for w in mha.in_proj_weight.chunk(3))
    other.q_proj_weight, other.k_proj_weight, other.v_proj_weight = q, k, v
    if bias:
        _assign(other.in_proj_bias, mha.in_proj_bias, mha.in_proj_bias)
    other.out_proj = copy.deepcopy(mha.out_proj)
    return other


# --- averages over time ----------------------------------------------------------------------


def decayed(first: Tensor, newest: Tensor, decay: float, counts: tuple[float, float]) -> Tensor:
    """The mean of a statistic after two batches that count that much."""
    old, new = decay * counts[0], counts[1]
    return (old * first + new * newest) / (old + new)
