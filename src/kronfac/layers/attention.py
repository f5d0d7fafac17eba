"""nn.MultiheadAttention: three input projections, and the output projection as a Linear layer.

Its forward is one function that calls no submodule, so nothing inside can be hooked. On steps that take
statistics its output is therefore replaced by that of :func:`attend`, the same mathematics with every
product observed. On all other steps torch's own path runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronfac.layers.layer import Layer, See
from kronfac.layers.linear import LinearLayer

PARTS = ("query", "key", "value")
OUTPUT = "output"


class AttentionProjection(LinearLayer):
    """The projection of queries, keys or values: a weight of its own, or a third of a packed one."""

    module: nn.MultiheadAttention

    def __init__(self, name: str, module: nn.MultiheadAttention, part: str) -> None:
        self.packed = module.in_proj_weight is not None
        self.index = PARTS.index(part)
        weight_name = "in_proj_weight" if self.packed else f"{part[0]}_proj_weight"
        super().__init__(
            f"{name}.{part}" if name else part,
            module,
            weight_name=weight_name,
            bias_name="in_proj_bias",
            part=part,
        )

    @staticmethod
    def split(
        see: See, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> Any:
        """See :meth:`Layer.split`."""
        assert isinstance(module, nn.MultiheadAttention)
        if not is_plain(module):
            return output  # its forward was replaced by the user, and that has to stay
        return attend(module, see, *args, **kwargs)

    def _own_bias(self, bias: Tensor) -> Tensor:
        return self._third(bias)

    def _weight_shape(self) -> tuple[int, ...]:
        rows, *columns = self.weight.shape  # a part of a sharded weight is not to be taken
        return (rows // 3 if self.packed else rows, *columns)

    def _to_matrix(self, grad: Tensor) -> Tensor:
        return self._own_weight(grad)

    def _own_weight(self, weight: Tensor) -> Tensor:
        return self._third(weight) if self.packed else weight

    def _third(self, packed: Tensor) -> Tensor:
        width = packed.shape[0] // 3
        return packed[self.index * width : (self.index + 1) * width]


def projections(name: str, module: nn.MultiheadAttention) -> list[Layer]:
    """The layers of an attention module, without its output projection, which is its own module."""
    return [AttentionProjection(name, module, part) for part in PARTS]


def output_projections(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """The output projections of a model, and the attention modules that compute them.

    Attention modules read the projection's weight and never call the projection itself.
    """
    found: dict[nn.Module, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and is_plain(module):
            found.setdefault(module.out_proj, []).append(module)
    return found


def is_plain(module: nn.MultiheadAttention) -> bool:
    """Whether the module computes what :func:`attend` does."""
    replaced = "forward" in vars(module)
    return type(module).forward is nn.MultiheadAttention.forward and not replaced


def splits_attention(module: nn.Module, layer: Layer) -> bool:
    """Whether a layer's products are found inside a call of an attention module."""
    inside = isinstance(module, nn.MultiheadAttention) and layer.module is not module
    return inside or isinstance(layer, AttentionProjection)


def attend(
    module: nn.MultiheadAttention,
    see: See,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,  # only a hint in torch: the mask says the same
) -> tuple[Tensor, Tensor | None]:
    """The module's forward, showing its four products.

    Rows are ``[N, T, E]``, grouped by sample, or those of one sample, ``[T, E]``.
    """
    batched = query.dim() == 3
    inputs: tuple[Tensor, ...] = (query, key, value)
    if batched and not module.batch_first:
        inputs = tuple(x.transpose(0, 1) for x in inputs)
    projected = []
    for part, x, weight, bias in zip(PARTS, inputs, *_parameters(module), strict=True):
        product = see(part, (x,), F.linear(x, weight, bias))
        projected.append(product if batched else product.unsqueeze(0))
    q, k, v = projected
    if not batched and key_padding_mask is not None:
        key_padding_mask = key_padding_mask.unsqueeze(0)
    mask = _merged_mask(module, q, k, attn_mask, key_padding_mask)
    k, v, mask = _with_extra_positions(module, k, v, mask)
    q, k, v = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    dropout = module.dropout if module.training else 0.0
    weights: Tensor | None = None
    if need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.mT
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    mixed = mixed.transpose(1, 2).flatten(2)
    mixed = mixed if batched else mixed.squeeze(0)
    out = F.linear(mixed, module.out_proj.weight, module.out_proj.bias)
    out = see(OUTPUT, (mixed,), out)
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not batched:
        return out, None if weights is None else weights.squeeze(0)
    out = out.transpose(0, 1).contiguous()  # torch's memory order, which users may rely on
    return out.transpose(0, 1) if module.batch_first else out, weights


def _parameters(
    module: nn.MultiheadAttention,
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    bias = module.in_proj_bias
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if module.in_proj_weight is not None:
        return module.in_proj_weight.chunk(3), biases
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    assert all(isinstance(weight, Tensor) for weight in weights)
    return weights, biases


def _merged_mask(
    module: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
) -> Tensor | None:
    """Both masks as one that is added to the scores, ``[N or 1, H or 1, T or 1, S]``."""
    merged: Tensor | None = None
    if attn_mask is not None:
        merged = _additive(attn_mask, q.dtype)
        if merged.dim() == 3:
            merged = merged.unflatten(0, (-1, module.num_heads))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q.dtype)[:, None, None, :]
        merged = padding if merged is None else merged + padding
    if merged is None:
        return None
    return merged.expand(*(1,) * (4 - merged.dim()), *merged.shape)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


def _with_extra_positions(
    module: nn.MultiheadAttention, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Append the learned key and value, and the zero ones; no mask covers them."""
    extra: list[tuple[Tensor, Tensor]] = []
    shape = (k.shape[0], 1, k.shape[-1])
    if module.bias_k is not None and module.bias_v is not None:
        extra.append((module.bias_k.expand(shape), module.bias_v.expand(shape)))
    if module.add_zero_attn:
        extra.append((k.new_zeros(shape), v.new_zeros(shape)))
    for more_k, more_v in extra:
        k, v = torch.cat([k, more_k.to(k.dtype)], 1), torch.cat([v, more_v.to(v.dtype)], 1)
    if mask is not None:
        mask = F.pad(mask, (0, len(extra)))
    return k, v, mask
