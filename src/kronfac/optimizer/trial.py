"""What a step does with its closure beside running it once.

The quadratic model runs it again before the base optimizer's step, Levenberg-Marquardt damping after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronfac.optimizer.replay import RandomState, buffers_kept, gradients_kept, gradients_replaced
from kronfac.optimizer.snapshot import Snapshot
from kronfac.rescale.quadratic import Products, QuadraticModel, Vectors, inner
from kronfac.step.pipeline import ParamGroups, Preconditioner

Closure = Callable[[], Any]


class Trial:
    """One step's further runs of its closure; without need for any it does nothing.

    Made before the closure's first run, whose random numbers the others repeat.
    """

    def __init__(
        self,
        preconditioner: Preconditioner,
        base: Optimizer,
        groups: ParamGroups,
        closure: Closure | None,
    ) -> None:
        self._preconditioner = preconditioner
        self._stepper = base
        self._groups = groups
        self._closure = closure
        damping = preconditioner.schedules.adaptive("damping")
        adaptive = damping is not None and not preconditioner.detached
        self._model = None if preconditioner.detached else preconditioner.quadratic
        self._damping = damping if adaptive and damping.due(preconditioner.clock.step) else None
        self._reason = "rescale='quadratic'" if self._model is not None else ""
        if adaptive:
            self._reason = "damping=LevenbergMarquardt(...)"
        self._loss = math.nan
        self._gradient: dict[nn.Parameter, Tensor] = {}
        self._before: dict[nn.Parameter, Tensor] = {}
        self._random: RandomState | None = None
        preconditioner.observer.called = False
        if closure is not None and self._again:
            self._random = RandomState(p.device for p in self._parameters())

    @property
    def _again(self) -> bool:
        return self._model is not None or self._damping is not None

    def begin(self, loss: Any, run: Callable[[], Any]) -> Any:
        """Check that there is what will be needed, and keep what the step overwrites.

        If the loss says that training has diverged since the last look, go back there first. ``run``
        evaluates the closure, and the loss there is returned.
        """
        if not self._reason:
            return loss
        if self._closure is None:
            raise RuntimeError(
                f"{self._reason} evaluates the loss again: call step(closure) with a closure that "
                "clears the gradients, computes the loss, calls backward() and returns the loss."
            )
        if self._model is not None and not self._preconditioner.observer.called:
            raise RuntimeError(
                "rescale='quadratic' has observed nothing: call optimizer.observe(outputs, "
                "likelihood=...) in the closure, between the forward pass and backward()."
            )
        if self._damping is not None:
            loss = self._look(loss, run)
        if self._model is not None and any(map(_is_sparse, self._moving())):
            raise RuntimeError(
                "rescale='quadratic' cannot write its update into a sparse gradient: build the "
                "embedding with sparse=False, or choose another rescale."
            )
        if self._again:
            self._gradient = {p: _dense(p.grad) for p in self._moving()}
        if self._damping is not None:
            self._before = {p: p.detach().clone() for p in self._gradient}
            self._damping.good = None  # before there is another
            self._damping.good = Snapshot(self._preconditioner, self._stepper, self._parameters())
        return loss

    def _look(self, loss: Any, run: Callable[[], Any]) -> Any:
        """Read the loss; if it has surged, undo what was done since the last look and try again."""
        assert self._damping is not None
        self._loss = self._mean(_number(loss, self._reason))
        if self._damping.good is None or not self._damping.surges(self._loss):
            return loss
        self._damping.good.restore()
        self._preconditioner.count("damping_rejected")
        self._damping.reject()
        self._preconditioner.capture.clear()
        self._random = RandomState(p.device for p in self._parameters())
        loss = run()
        self._loss = self._mean(_number(loss, self._reason))
        return loss

    def choose_update(self) -> None:
        """Put the negative update of the quadratic model in place of the gradients."""
        model = self._model
        if model is None or not self._gradient:
            return
        with self._preconditioner.phases("quadratic"):
            self._write_update(model)

    def _write_update(self, model: QuadraticModel) -> None:
        directions = model.directions({p: _dense(p.grad) for p in self._gradient})
        products = Products(directions, self._preconditioner.options)
        observer = self._preconditioner.observer
        observer.products = products
        try:
            self._run_again()
        finally:
            observer.products = None
        damping = float(
            self._preconditioner.schedules.at("damping", self._preconditioner.clock.step)
        )
        matrix = self._preconditioner.coordinator.mean(products.matrix())
        update = model.choose(directions, self._gradient, matrix, damping)
        for parameter, value in update.items():
            assert parameter.grad is not None
            parameter.grad.copy_(-value)

    def judge(self) -> None:
        """Compare what the step did to the loss with what the model predicted, and adapt γ."""
        if self._damping is None:
            return
        change = {p: p.detach() - before for p, before in self._before.items()}
        if not any(bool(value.any()) for value in change.values()):
            return  # a learning rate of zero says nothing about the damping
        with self._preconditioner.phases("damping"):
            predicted = float(inner(change, self._gradient)) + self._curvature(change) / 2
            predicted = self._mean(predicted)  # the same to the last bit, since it decides
            after = self._mean(_number(self._run_again(), self._reason))
        if self._damping.rejects(self._loss, after, predicted):
            assert self._damping.good is not None
            self._damping.good.restore()
            self._preconditioner.count("damping_rejected")
            self._damping.reject()
            return
        step = self._preconditioner.clock.step
        verdict = self._damping.judge(self._loss, after - self._loss, predicted, step)
        self._preconditioner.count(f"damping_{verdict}")

    def _curvature(self, change: Vectors) -> float:
        """``δᵀCδ``: exact if the quadratic model knows it, else the blocks' own."""
        if self._model is not None:
            return self._model.curvature_along(change)
        total = 0.0
        for state in self._preconditioner.layers.values():
            if not state.is_worker:
                continue
            with gradients_replaced({p: change.get(p) for p in state.layer.parameters}):
                solved = state.solved_at is not None and state.has_gradient
                if solved and state.solution is not None:
                    total += float(state.block.quadratic(state.solution, state.view.gradient()))
        own = torch.tensor(total, dtype=torch.float64, device="cpu")
        coordinator = self._preconditioner.coordinator
        return float(coordinator.add_up_layers(own, self._preconditioner.model))

    def _mean(self, value: float) -> float:
        """The mean over ranks, each of which has a part of the batch."""
        own = torch.tensor([value], dtype=torch.float64, device="cpu")
        return float(self._preconditioner.coordinator.mean(own))

    def _run_again(self) -> Any:
        assert self._closure is not None
        assert self._random is not None
        preconditioner = self._preconditioner
        with (
            preconditioner.capture.paused(),
            buffers_kept(preconditioner.model),
            gradients_kept(self._parameters()),
            self._random.again(),
            torch.enable_grad(),
        ):
            return self._closure()

    def _moving(self) -> list[nn.Parameter]:
        """Parameters that the base optimizer will move, by gradients of this step."""
        trained = [p for group in self._groups for p in group["params"]]
        return [p for p in trained if p.requires_grad and p.grad is not None]

    def _parameters(self) -> dict[nn.Parameter, None]:
        trained = [p for group in self._groups for p in group["params"]]
        return dict.fromkeys([*self._preconditioner.model.parameters(), *trained])


def _is_sparse(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def _dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_dense() if grad.is_sparse else grad.detach().clone()


def _number(loss: Any, reason: str) -> float:
    if loss is None:
        raise RuntimeError(f"{reason} compares losses, but the closure returned None: return it.")
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
