"""Hyperparameters of an optimizer that may change during training."""

from __future__ import annotations

from typing import Any

import torch

from kronfac.adaptive.damping import LevenbergMarquardt, as_schedule
from kronfac.adaptive.interval import Interval, StaleInterval, as_intervals
from kronfac.adaptive.relative import Relative
from kronfac.capture.grad_scaler import calling_scaler
from kronfac.options.config import Number, check_scaler, is_adaptive
from kronfac.step.pipeline import Preconditioner
from kronfac.step.validation import (
    check_curvature,
    check_lever,
    check_mean_curvature,
    check_relative,
    check_stagger,
)


class Hyperparameters:
    """Attributes that can be read and set."""

    _preconditioner: Preconditioner

    @property
    def damping(self) -> Number | LevenbergMarquardt | Relative:
        """The damping γ as it was given; ``stats()["damping"]`` is its value now."""
        given: Number | LevenbergMarquardt | Relative = self._given("damping")
        return given

    @damping.setter
    def damping(self, value: Number | LevenbergMarquardt | Relative) -> None:
        preconditioner, schedule = self._preconditioner, as_schedule(value)
        check_lever(is_adaptive(schedule), preconditioner.options.rescale)
        check_curvature(is_adaptive(schedule), preconditioner.layers.values())
        share_of = value.to if isinstance(value, Relative) else None
        check_relative(share_of, preconditioner.options.rescale)
        check_mean_curvature(share_of, preconditioner.layers.values())
        self._set("damping", schedule)

    @property
    def factor_every(self) -> Interval:
        """Steps between updates of the statistics."""
        given: Interval = self._given("factor_every")
        return given

    @factor_every.setter
    def factor_every(self, value: Interval) -> None:
        if isinstance(value, StaleInterval) and value == self.refresh_every:
            self._set("factor_every", self._get("refresh_every"))
        else:
            self._set("factor_every", as_intervals(value, self.refresh_every)[0])

    @property
    def refresh_every(self) -> Interval:
        """Steps between renewals of the solutions; ``stats()["refresh_every"]`` is its value now."""
        given: Interval = self._given("refresh_every")
        return given

    @refresh_every.setter
    def refresh_every(self, value: Interval) -> None:
        factor, refresh = as_intervals(self.factor_every, value)
        check_stagger(self._preconditioner.options.stagger, is_adaptive(refresh))
        self._preconditioner.schedules.set("factor_every", factor)
        self._set("refresh_every", refresh)

    @property
    def decay(self) -> Number:
        """Weight of the old statistics at each update."""
        value: Number = self._get("decay")
        return value

    @decay.setter
    def decay(self, value: Number) -> None:
        self._set("decay", value)

    @property
    def momentum(self) -> Number:
        """Heavy ball before preconditioning; it may change if it was not 0 at first."""
        value: Number = self._get("momentum")
        return value

    @momentum.setter
    def momentum(self, value: Number) -> None:
        if value and not self._preconditioner.options.momentum:
            raise ValueError(
                f"momentum={value!r} cannot be set later on an optimizer without it; build it with "
                "momentum=0.9, for example."
            )
        self._set("momentum", value)

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler whose factor is in the gradients that are observed."""
        return self._preconditioner.capture.scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        check_scaler(scaler)
        self._preconditioner.capture.scaler = scaler

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False: gradients arrive unscaled. A scaler that asks is the one whose factor we observe."""
        scaler = calling_scaler()
        if scaler is not None and self._preconditioner.coordinator.separate_gradients:
            raise RuntimeError(
                "a gradient scaler looks at gradients before they are averaged, so that ranks would "
                "not skip the same steps: with distribute='layer-parallel', wrap the model in "
                "DistributedDataParallel to use one."
            )
        if scaler is not None and scaler is not self.grad_scaler:
            self._preconditioner.capture.adopt(scaler)
        return False

    def _get(self, name: str) -> Any:
        return self._preconditioner.schedules.get(name)

    def _given(self, name: str) -> Any:
        return self._preconditioner.schedules.given(name)

    def _set(self, name: str, value: Any) -> None:
        preconditioner = self._preconditioner
        preconditioner.schedules.set(name, value)
        preconditioner.reschedule()
