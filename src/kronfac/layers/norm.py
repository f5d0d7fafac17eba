"""Normalisation layers: per-sample gradients, channel by channel.

A norm computes ``y = w·x̂ + b`` for each channel separately, with ``x̂`` the normalised input. What is
observed is each sample's gradient ``u = (Σ g·x̂, Σ g)`` over its positions, which needs both sides of the
call. The matrix of a layer with ``C`` channels is ``[C, 1, 2]``, or ``[C, 1, 1]`` without a bias.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronfac.layers.channel_sums import ChannelSums
from kronfac.layers.layer import Layer
from kronfac.layers.norm_sums import normalised_sums, products_and_sums, saved_by_norm
from kronfac.layers.rows import Rows
from kronfac.layers.shards import plain_type
from kronfac.linalg import devices


class NormLayer(Layer):
    """What all norms share."""

    unit_wise = True
    keeps_inputs = True

    @property
    def geometry(self) -> Hashable:
        """See :attr:`Layer.geometry`."""
        return epsilon_of(self.module), getattr(self.module, "num_groups", None)

    def keep(self, value: Any) -> Any:
        """Copy the input if autograd does not protect it: where the norm itself works on a copy."""
        kept = super().keep(value)
        if isinstance(kept, Tensor) and _works_on_copy(self.module, kept, self.factor_dtype):
            return kept.clone()
        return kept

    def keep_call(self, inputs: Sequence[Any], product: Tensor) -> list[Any]:
        """See :meth:`Layer.keep_call`: what autograd keeps of the call, if that can be had."""
        plain = type(product) is Tensor and bool(inputs) and type(inputs[0]) is Tensor
        saved = saved_by_norm(product) if plain else None
        if saved is None or saved[0].shape != inputs[0].shape:
            return super().keep_call(inputs, product)
        return list(saved)

    def inputs(self, args: tuple[Any, ...]) -> Rows | None:
        """Nothing is observed on the input side alone."""
        return None

    def outputs(self, grad: Tensor, args: tuple[Any, ...] = ()) -> Rows:
        """Per-sample gradients, as rows ``[C, N, 1, 2]``."""
        x = args[0].detach().to(self.factor_dtype)
        return self._sums(grad.detach().to(self.factor_dtype), x, args[1:])

    def _sums(self, grad: Tensor, x: Tensor, known: Sequence[Tensor]) -> ChannelSums:
        """Sums over positions; ``known`` is what else :meth:`keep_call` has kept."""
        gradients = self._per_sample(grad) if self.bias_trains else None
        if gradients is grad:
            gradients = grad.clone()  # it is kept, and may be overwritten
        return ChannelSums(self._weight_gradient(grad, x), gradients, bias=self.bias_trains)

    @abstractmethod
    def _weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """``Σ g·x̂`` over a sample's positions, ``[N, C]``."""

    @abstractmethod
    def _per_sample(self, values: Tensor) -> Tensor:
        """Sum over positions: shape of the input ``-> [N, C]``."""

    def _weight_shape(self) -> tuple[int, ...]:
        return self.weight.numel(), 1, 1

    def _to_matrix(self, grad: Tensor) -> Tensor:
        return grad.reshape(-1, 1, 1)

    def _weight_place(self, grad: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        return grad, matrix.reshape(grad.shape)


class ChannelNormLayer(NormLayer):
    """Channels in dimension 1 and positions after it: ``[N, C, *spatial]``."""

    def _per_sample(self, values: Tensor) -> Tensor:
        return values if values.dim() == 2 else values.flatten(2).sum(2)


class BatchNormLayer(ChannelNormLayer):
    """Normalised with mean and variance of the whole batch, which are treated as constants."""

    module: nn.BatchNorm2d

    def _sums(self, grad: Tensor, x: Tensor, known: Sequence[Tensor]) -> ChannelSums:
        dense = x.dim() > 2 and x.is_contiguous() and grad.is_contiguous()
        if not dense or len(known) != 2:
            return super()._sums(grad, x, known)
        mean, scale = (one.to(self.factor_dtype) for one in known)
        products, gradients = products_and_sums(grad.flatten(2), x.flatten(2))
        return ChannelSums(products, gradients, (mean, scale), bias=self.bias_trains)

    def _weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        few = devices.wants_few_kernels(x.device)
        return (self._by_norm if few else self._by_sums)(grad, x)

    def _by_norm(self, grad: Tensor, x: Tensor) -> Tensor:
        """In as few kernels as possible."""
        normalised = F.batch_norm(x, None, None, training=True, eps=self.module.eps)
        return self._per_sample(normalised.mul_(grad))

    def _by_sums(self, grad: Tensor, x: Tensor) -> Tensor:
        """``Σ g·x̂ = scale·(Σ g·x - mean·Σ g)``, without any of the maps ``x̂ = (x - mean)·scale``.

        A CPU adds much faster than it writes maps. Sums of samples are added in double precision, since
        the difference, as that of ``mean(x²)`` and ``mean²``, is small beside both where means are large.
        """
        count = x.numel() / x.shape[1]
        squares = x.square() if x.dim() == 2 else torch.linalg.vector_norm(x.flatten(2), dim=2) ** 2
        mean = self._per_sample(x).double().sum(0) / count
        variance = (squares.double().sum(0) / count - mean.square()).clamp_(min=0)
        scale = torch.rsqrt(variance + self.module.eps)
        products = self._per_sample(x * grad).double() - mean * self._per_sample(grad)
        return (products * scale).to(x.dtype)


class GroupNormLayer(ChannelNormLayer):
    """Normalised over groups of channels."""

    module: nn.GroupNorm

    def _weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        normalised = F.group_norm(x, self.module.num_groups, eps=self.module.eps)
        return self._per_sample(grad * normalised)


class InstanceNormLayer(ChannelNormLayer):
    """Normalised over the positions of each channel; an unbatched ``[C, *spatial]`` is one sample."""

    module: nn.InstanceNorm2d

    def outputs(self, grad: Tensor, args: tuple[Any, ...] = ()) -> Rows:
        """See :meth:`NormLayer.outputs`."""
        x = args[0]
        if x.dim() == self._spatial_dims() + 1:
            x, grad = x.unsqueeze(0), grad.unsqueeze(0)
        return super().outputs(grad, (x,))

    def _spatial_dims(self) -> int:
        dims = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}
        return next(n for kind, n in dims.items() if isinstance(self.module, kind))

    def _weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        normalised = F.instance_norm(x, eps=self.module.eps)
        return self._per_sample(grad * normalised)


class TrailingNormLayer(NormLayer):
    """The weight covers the last dimensions: ``[N, *shared, *weight.shape]``."""

    def ungrouped_outputs(self, grad: Tensor, args: tuple[Any, ...] = ()) -> Rows:
        """See :meth:`Layer.ungrouped_outputs`."""
        shape = (-1, *self.weight.shape)
        return self.outputs(grad.reshape(shape), (args[0].reshape(shape),))

    def _per_sample(self, values: Tensor) -> Tensor:
        shared = values.shape[: values.dim() - self.weight.dim()]
        samples = shared[0] if shared else 1
        return values.reshape(samples, math.prod(shared[1:]), self.weight.numel()).sum(1)


class LayerNormLayer(TrailingNormLayer):
    """Normalised over the last dimensions, with their mean removed."""

    module: nn.LayerNorm

    def _sums(self, grad: Tensor, x: Tensor, known: Sequence[Tensor]) -> ChannelSums:
        few = devices.wants_few_kernels(x.device)
        if not few or len(known) != 2 or x.dim() == self.weight.dim():
            return super()._sums(grad, x, known)
        shape = x.shape[0], math.prod(x.shape[1 : x.dim() - self.weight.dim()])
        mean, scale = (one.to(self.factor_dtype).reshape(*shape, 1) for one in known)
        grad, x = (one.reshape(*shape, self.weight.numel()) for one in (grad, x))
        sums = normalised_sums(grad, x, mean, scale, self.bias_trains)
        return ChannelSums(*sums, bias=self.bias_trains)

    def _weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        normalised = F.layer_norm(x, self.module.normalized_shape, eps=self.module.eps)
        return self._per_sample(grad * normalised)


class RMSNormLayer(TrailingNormLayer):
    """Divided by the root of the mean square over the last dimensions."""

    def _weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        normalised = F.rms_norm(x, tuple(self.weight.shape), eps=epsilon_of(self.module))
        return self._per_sample(grad * normalised)


def _works_on_copy(module: nn.Module, x: Tensor, dtype: torch.dtype) -> bool:
    """Norms of other libraries, half precision and strided memory: the norm may not keep its input."""
    foreign = not plain_type(module).__module__.startswith("torch.")
    kind = x.device.type
    narrowed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    half = x.dtype != dtype or narrowed
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    return (
        foreign or half or (x.dim() == 4 and not dense) or (x.dim() != 4 and not x.is_contiguous())
    )


def epsilon_of(module: nn.Module) -> float | None:
    """The number that a norm adds to its variance, under the names in use."""
    value = getattr(module, "eps", None)
    return getattr(module, "variance_epsilon", None) if value is None else value


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module of another library behaves as a root-mean-square norm, tested by a trial run.

    Many code bases define their own (Llama's, T5's, with ``w`` or ``1 + w``).
    """
    own = dict(module.named_parameters())
    weight = own.get("weight")
    if "Norm" not in plain_type(module).__name__ or len(own) != 1 or weight is None:
        return False
    if weight.dim() != 1 or epsilon_of(module) is None or weight.device.type == "meta":
        return False
    # On the CPU whatever the default device is, which may have no generator.
    generator = torch.Generator("cpu").manual_seed(0)
    x, scale = (
        (1 + torch.rand(*shape, generator=generator, device="cpu")).to(weight.device, weight.dtype)
        for shape in ((2, 3, weight.numel()), weight.shape)
    )
    twin = object.__new__(plain_type(module))
    vars(twin).update(vars(module))
    twin._parameters = {"weight": nn.Parameter(scale, requires_grad=False)}
    twin._buffers = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
    try:
        with torch.no_grad():
            found = plain_type(module).forward(twin, x)
    except Exception:  # not a norm after all
        return False
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return False
    expected = F.rms_norm(x, tuple(weight.shape), eps=epsilon_of(module))
    return any(
        torch.allclose(found, expected * s, rtol=0.02, atol=1e-3) for s in (scale, 1 + scale)
    )
