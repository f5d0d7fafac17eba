"""The rules that come with the engine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.options.config import Schedules
from kronfac.protocol.transform import LayerStep, Transform
from kronfac.step.lengths import remember

#: What a layer has after its first step.
_KNOWN = ("momentum", "history", "pace", "inputs")


class Momentum(Transform):
    """Heavy ball before preconditioning: ``buf ← μ·buf + V``; Nesterov looks ahead with ``V + μ·buf``.

    Beside the buffer it keeps the sum of its weights, ``w ← μ·w + 1``, and of the squared norms,
    ``q ← μ·q + ‖V‖²``, and what ``‖V‖²`` has been so far: :mod:`kronfac.step.lengths` reads them.
    """

    takes_slices = everywhere = True

    def __init__(self, schedules: Schedules, nesterov: bool) -> None:
        self.schedules = schedules
        self.nesterov = nesterov

    def buffer_shapes(self, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        """See :meth:`Transform.buffer_shapes`."""
        numbers = {"coherence": (2,), "history": (4,), "pace": (2,), "inputs": ()}
        return {"momentum": layer.matrix_shape, **numbers}

    def __call__(self, gradient: Tensor, at: LayerStep) -> Tensor:
        """See :meth:`Transform.__call__`."""
        mu, buffers = float(self.schedules.at("momentum", at.step)), at.buffers
        square = gradient.square().sum() if at.square is None else at.square.to(gradient.dtype)
        square = square.clamp(max=_most(gradient.dtype))
        news = torch.stack([torch.ones_like(square), square])
        if "coherence" in buffers:
            buffers["coherence"].mul_(mu).add_(news)
        else:  # a checkpoint of version 0.1 has a buffer of many gradients, but not how they agreed
            buffers["coherence"] = news / (1 - mu) if "momentum" in buffers else news
        if "pace" not in buffers:
            buffers["pace"] = square.new_zeros(2)
        if "inputs" not in buffers:
            buffers["inputs"] = torch.zeros_like(square)
        if "history" not in buffers:
            buffers["history"] = square.new_zeros(4)
            if "momentum" in buffers:  # nor does it know of the steps before
                remember([buffers], square[None], [at.rate])
                buffers["history"][0] = at.step
        remember([buffers], square[None], [at.rate])
        if "momentum" in buffers:
            buffers["momentum"].mul_(mu).add_(gradient)
        else:
            buffers["momentum"] = gradient.clone(memory_format=torch.contiguous_format)
        held = buffers["momentum"]
        return gradient + mu * held if self.nesterov else held

    def apply_all(self, gradients: Sequence[Tensor], at: Sequence[LayerStep]) -> Sequence[Tensor]:
        """See :meth:`Transform.apply_all`; the results take the place of the gradients."""
        begun: dict[Hashable, list[int]] = {}
        for index, (gradient, one) in enumerate(zip(gradients, at, strict=True)):
            if all(name in one.buffers for name in _KNOWN):
                begun.setdefault((gradient.device, gradient.dtype), []).append(index)
            else:
                gradient.copy_(self(gradient, one))
        for indices in begun.values():
            mu = float(self.schedules.at("momentum", at[indices[0]].step))
            own = [at[index] for index in indices]
            self._apply([gradients[index] for index in indices], own, mu)
        return gradients

    def _apply(self, gradients: list[Tensor], at: Sequence[LayerStep], mu: float) -> None:
        buffers, rates = [one.buffers for one in at], [one.rate for one in at]
        squares = _squares(gradients, at).clamp_(max=_most(gradients[0].dtype))
        news = torch.stack([torch.ones_like(squares), squares], dim=1).unbind()
        sums = [one["coherence"] for one in buffers]
        torch._foreach_mul_(sums, mu)
        torch._foreach_add_(sums, news)
        remember(buffers, squares, rates)
        held = [one["momentum"] for one in buffers]
        torch._foreach_mul_(held, mu)
        torch._foreach_add_(held, gradients)
        if self.nesterov:
            torch._foreach_add_(gradients, held, alpha=mu)
        else:
            torch._foreach_copy_(gradients, held)


def _squares(gradients: Sequence[Tensor], at: Sequence[LayerStep]) -> Tensor:
    """Squared norms of gradients, ``[layers]``; those of which slices are here are known."""
    here = [gradient for gradient, one in zip(gradients, at, strict=True) if one.square is None]
    found = torch.stack(torch._foreach_norm(here)).square_() if here else gradients[0].new_empty(0)
    if len(here) == len(gradients):
        return found
    rest = iter(found.unbind())
    return torch.stack([next(rest) if one.square is None else one.square.to(found) for one in at])


def _most(dtype: torch.dtype) -> float:
    """A square that is far from overflow, also when it is added up."""
    return torch.finfo(dtype).max * 2.0**-20
