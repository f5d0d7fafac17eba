"""``rescale="quadratic"``: learning rate and momentum from a quadratic model of the loss.

With ``V = [v, d]``, ``v`` the preconditioned gradient and ``d`` the last update, the next update is
``V w`` with ``w = -(VᵀCV + γVᵀV)⁻¹ Vᵀ∇L``. The curvature ``C`` is the generalised Gauss-Newton matrix,
of which only ``VᵀCV`` is needed: two Jacobian products per forward and the likelihood's Hessian, in
closed form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.capture.fisher import Likelihood, hessian_product
from kronfac.options.config import Options
from kronfac.statistics.running import count_dtype

Vectors = Mapping[nn.Parameter, Tensor]

#: Larger multiples of the last update are not trusted.
MAX_MOMENTUM = 10.0
#: Longer updates are not taken: their square would overflow in single precision.
MAX_LENGTH = 1e18


class QuadraticModel:
    """Chooses updates, and keeps the last one and its coefficients."""

    def __init__(self) -> None:
        self.last: dict[nn.Parameter, Tensor] = {}
        self.learning_rate, self.momentum = 0.0, 0.0
        #: ``δᵀCδ`` of the last update δ.
        self.curvature = math.nan

    def directions(self, steps: Vectors) -> list[Vectors]:
        """``[v, d]``, or ``[v]`` when there has been no update."""
        if not self.last:
            return [steps]
        return [steps, {p: self._last(p) for p in steps}]

    def _last(self, parameter: nn.Parameter) -> Tensor:
        last = self.last.get(parameter)
        return torch.zeros_like(parameter) if last is None else last

    def choose(
        self,
        directions: Sequence[Vectors],
        gradient: Vectors,
        products: Tensor,
        damping: float,
    ) -> Vectors:
        """Return the update ``V w``, given ``VᵀCV``."""
        gram = torch.stack([torch.stack([inner(a, b) for b in directions]) for a in directions])
        slopes = torch.stack([inner(direction, gradient) for direction in directions])
        curvature = products.to("cpu", torch.float64)
        damped = curvature + damping * gram.to("cpu", torch.float64)
        precision = max(torch.finfo(value.dtype).eps for value in gradient.values())
        weights = best_weights(damped.tolist(), slopes.tolist(), precision)
        used = torch.tensor(weights[: len(directions)], dtype=torch.float64, device="cpu")
        self.learning_rate, self.momentum = -weights[0], weights[1]
        self.curvature = float(used @ curvature @ used)
        update = {p: value * weights[0] for p, value in directions[0].items()}
        if weights[1] != 0:
            for p, value in directions[1].items():
                update[p].add_(value, alpha=weights[1])
        if not float(inner(update, update)) < MAX_LENGTH**2:
            self.learning_rate = self.momentum = self.curvature = 0.0
            update = {p: torch.zeros_like(value) for p, value in update.items()}
        self.last = update
        return update

    def allocate(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make a last update of zeros where there is none, for loaders that fill what exists."""
        for parameter in parameters:
            if parameter.requires_grad:
                self.last.setdefault(parameter, torch.zeros_like(parameter).detach())

    def resume(self, entries: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Continue from what was saved, by parameter; without it, start again."""
        self.last = {
            p: entry["update"].detach().to(p.device, p.dtype, copy=True)
            for p, entry in entries.items()
            if "update" in entry
        }

    @property
    def coefficients(self) -> dict[str, float]:
        """Learning rate ``-w₀`` and momentum ``w₁`` of the last update."""
        return {"learning_rate": self.learning_rate, "momentum": self.momentum}

    def curvature_along(self, change: Vectors) -> float:
        """``δᵀCδ`` of the part of a change that lies along the last update."""
        last = {p: self._last(p) for p in change}
        length = float(inner(last, last))
        share = float(inner(change, last)) / length if length > 0 else 0.0
        return share**2 * self.curvature


class Products:
    """``VᵀCV`` of the forwards of one closure, divided as the loss is."""

    def __init__(
        self,
        directions: Sequence[Vectors],
        options: Options,
    ) -> None:
        self._directions = directions
        self._average = options.loss_average
        self._sum: Tensor | None = None
        self._count: float | Tensor = 0.0

    def add(self, outputs: Tensor, likelihood: Likelihood, weights: Tensor) -> None:
        """Add one forward; ``weights`` say which loss terms count."""
        pushed = [one.to(weights.dtype) for one in jacobian_products(outputs, self._directions)]
        scores = outputs.detach().to(weights.dtype)
        bent = [weights[..., None] * hessian_product(scores, likelihood, one) for one in pushed]
        kind = count_dtype(scores.device)
        found = torch.stack([torch.stack([(a * b).sum(dtype=kind) for b in bent]) for a in pushed])
        self._sum = found if self._sum is None else self._sum + found.to(self._sum.device)
        if self._average == "token":
            self._count = self._count + weights.sum(dtype=kind).to(self._sum.device)
        elif self._average == "batch":
            self._count = self._count + outputs.shape[0]
        else:
            self._count = 1.0 if self._average is None else float(self._average)

    def matrix(self) -> Tensor:
        """Return ``VᵀCV``."""
        if self._sum is None:
            raise RuntimeError(
                "rescale='quadratic' needs optimizer.observe(outputs, likelihood=...) between the "
                "forward pass and backward() at every run of the closure."
            )
        return self._sum / self._count


def jacobian_products(outputs: Tensor, directions: Sequence[Vectors]) -> list[Tensor]:
    """``J v`` for directions in the space of parameters, by differentiating ``Jᵀu`` after ``u``."""
    parameters = list(directions[0])
    with torch.enable_grad():
        dummy = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(
            outputs, parameters, dummy, create_graph=True, allow_unused=True
        )
    used = [(p, one) for p, one in zip(parameters, pulled, strict=True) if one is not None]
    if len(used) < len(parameters) and _hides_parameters(outputs):
        raise RuntimeError(
            "rescale='quadratic' cannot differentiate through a reentrant activation checkpoint: call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )
    if not used:
        return [torch.zeros_like(outputs) for _ in directions]
    pushed = []
    for direction in directions:
        (found,) = torch.autograd.grad(
            [one for _, one in used],
            dummy,
            [direction[p].to(one.dtype) for p, one in used],
            retain_graph=True,
        )
        pushed.append(found)
    return pushed


def _hides_parameters(outputs: Tensor) -> bool:
    """Whether a reentrant checkpoint is in the graph: parameters inside it are not part of the graph."""
    found, waiting = set(), [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        if "CheckpointFunction" in node.name():
            return True
        found.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def best_weights(
    curvature: Sequence[Sequence[float]], slopes: Sequence[float], precision: float
) -> tuple[float, float]:
    """Minimise ``½wᵀMw + bᵀw``; where that has no answer, along the first direction.

    Two directions have no answer if they are parallel to working precision, or if it would be a momentum
    beyond :data:`MAX_MOMENTUM`: small batches that contradict each other give momenta of hundreds.
    Nothing moves if the first direction is not finite, and ``-1`` is the answer without curvature.
    """
    first = curvature[0][0]
    if not (math.isfinite(first) and math.isfinite(slopes[0])):
        return 0.0, 0.0
    if len(slopes) == 2:
        mixed, second = curvature[0][1], curvature[1][1]
        size = first * second
        determinant = size - mixed * mixed
        if first > 0 and second > 0 and determinant > 10 * precision * size:
            weights = (
                (mixed * slopes[1] - second * slopes[0]) / determinant,
                (mixed * slopes[0] - first * slopes[1]) / determinant,
            )
            if math.isfinite(weights[0]) and abs(weights[1]) <= MAX_MOMENTUM:
                return weights
    if first <= 0:
        return -1.0, 0.0
    weight = -slopes[0] / first
    return (weight if math.isfinite(weight) else 0.0), 0.0


def inner(left: Vectors, right: Vectors) -> Tensor:
    """``⟨left, right⟩`` over all parameters, on the device of the first."""
    device = next(iter(left.values())).device
    total = torch.zeros((), dtype=count_dtype(device), device=device)
    for parameter, one in left.items():
        kind = torch.promote_types(one.dtype, torch.float32)
        one, other = one.to(kind), right[parameter].to(kind)
        if kind.is_complex:
            one, other = torch.view_as_real(one), torch.view_as_real(other)
        products = one * other
        total = total + products.sum(dtype=count_dtype(one.device)).to(total)
    return total
