"""Multi-head attention from the definition, with its four projections as ordinary linear layers.

It shares no code with the library; `layer_oracles` takes statistics of the four layers.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from tests import oracles
from tests.layer_oracles import assign

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
            assign(linear.weight, values, weight)
            if bias:
                assign(linear.bias, mha.in_proj_bias[part * E : (part + 1) * E], mha.in_proj_bias)
            setattr(self, name, linear)
        self.out_proj = nn.Linear(E, E, bias=bias, dtype=mha.out_proj.weight.dtype)
        assign(self.out_proj.weight, mha.out_proj.weight, mha.out_proj.weight)
        if bias:
            assign(self.out_proj.bias, mha.out_proj.bias, mha.out_proj.bias)

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
        assign(other.in_proj_bias, mha.in_proj_bias, mha.in_proj_bias)
    other.out_proj = copy.deepcopy(mha.out_proj)
    return other
