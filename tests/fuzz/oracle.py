"""K-FAC by its definition: dense, slow, in float64, on a plain net without the library."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz import rows
from tests.fuzz.cases import Case
from tests.fuzz.layers import Layer, find_layers
from tests.fuzz.nets import out_of_place
from tests.fuzz.statistics import fold


class Oracle:
    """A net that is trained as the library should train it."""

    def __init__(self, case: Case) -> None:
        self.case, self.options = case, case.options
        net, _ = case.make()
        self.net = out_of_place(net)
        self.base = case.make_base(self.net)
        self.layers = find_layers(self.net, case)  # type: ignore[arg-type]
        self.t = 0
        self.last_factor: int | None = None

    @property
    def damping(self) -> float:
        value = self.options["damping"]
        return float(value(self.t) if callable(value) else value)

    def _early(self) -> bool:
        """Whether a long first interval takes statistics and refreshes here as well."""
        long = self.options["refresh_every"] >= 10 and self.t < self.options["refresh_every"]
        return long and self.t in (1, 2, 4, 8)

    def _due(self, last: int | None, every: str) -> bool:
        return last is None or self.t - last >= self.options[every]

    def step(self) -> None:
        """One step of training."""
        parts = self.case.batch(self.t)
        on_grid = self._due(self.last_factor, "factor_every")
        if on_grid or self._early():
            net: Any = self.net
            passes = [rows.see(net, self.case, p, self.t, i) for i, p in enumerate(parts)]
            for layer in self.layers:
                fold(self.case, layer, passes)
            self.last_factor = self.t if on_grid else self.last_factor
        self.base.zero_grad()
        for micro, part in enumerate(parts):
            self.net.set_moment(self.t, micro)  # type: ignore[operator]
            part.loss(self.net(part.x)).backward()
        if (bound := self.options.get("max_grad_norm")) is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), bound)
        with torch.no_grad():
            self._precondition()
        self.base.step()
        self.t += 1

    def _precondition(self) -> None:
        updates = []
        for layer in self.layers:
            A, G = layer.input_factor(), layer.G.value()
            ready = G is not None if layer.kind == "norm" else A is not None
            ready = ready and (G is not None or self.options["fisher"] == "forward")
            on_grid = self._due(layer.last_refresh, "refresh_every")
            if ready and (on_grid or self._early()):
                layer.solved = (A, G, self.damping)
                layer.solved_tokens = layer.seen_tokens
                layer.last_refresh = self.t if on_grid else layer.last_refresh
            if layer.weight.grad is None:
                continue
            u = self._with_momentum(layer, layer.gradient())
            if layer.solved is not None:
                updates.append((layer, u, self._solve(layer, u)))
        for layer, _, v in updates:
            layer.write(v)

    def _with_momentum(self, layer: Layer, V: Tensor) -> Tensor:
        mu = self.options.get("momentum", 0.0)
        if not mu:
            return V
        layer.momentum = V if layer.momentum is None else mu * layer.momentum + V
        return V + mu * layer.momentum if self.options["nesterov"] else layer.momentum

    # --- solving ------------------------------------------------------------------------------

    def _solve(self, layer: Layer, u: Tensor) -> Tensor:
        assert layer.solved is not None
        A, G, damping = layer.solved
        power = self.options.get("power", 1.0)
        if layer.kind == "norm":
            assert G is not None
            return torch.stack(
                [_power(F, self.damping, power) @ x for F, x in zip(G, u, strict=True)]
            )
        if u.dim() == 3:
            assert A is not None
            sides = [None] * len(u) if G is None else list(G)
            groups = zip(A, sides, u, strict=True)
            return torch.stack([self._solve_matrix(*group, damping, power) for group in groups])
        v = self._solve_matrix(A, G, u, damping, power)
        if layer.kind == "embedding":
            v = torch.where(layer.solved_tokens, v, u)  # type: ignore[arg-type]
        return v

    def _solve_matrix(
        self, A: Tensor | None, G: Tensor | None, u: Tensor, damping: float, power: float
    ) -> Tensor:
        assert A is not None
        A = self._narrow(A)
        G = torch.eye(len(u), dtype=u.dtype) if G is None else self._narrow(G)
        if self.options["solver"] in ("auto", "eigen"):  # a change of damping acts at once
            return (_power(torch.kron(G, A), self.damping, power) @ u.flatten()).view_as(u)
        means = A.diagonal().mean(), G.diagonal().mean()
        pi = math.sqrt(means[0] / means[1]) if min(means) > 0 else 1.0
        left = G + math.sqrt(damping) / pi * torch.eye(len(G), dtype=u.dtype)
        right = A + math.sqrt(damping) * pi * torch.eye(len(A), dtype=u.dtype)
        return torch.linalg.inv(left) @ u @ torch.linalg.inv(right)

    def _narrow(self, factor: Tensor) -> Tensor:
        """A side that is too wide keeps its diagonal."""
        return factor.diagonal().diag() if len(factor) > self.options["max_dim"] else factor


def _power(matrix: Tensor, damping: float, power: float) -> Tensor:
    """``(matrix + γI)⁻ᵖ``."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values.clamp(min=0) + damping).pow(-power).diag() @ vectors.T
