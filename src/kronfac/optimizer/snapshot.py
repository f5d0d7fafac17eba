"""Where training stood before a step, so that the step can be undone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kronfac.step.pipeline import Preconditioner


class Snapshot:
    """Copies of parameters, buffers, the base optimizer's state and what our rules keep."""

    def __init__(
        self, preconditioner: Preconditioner, base: Optimizer, parameters: Iterable[nn.Parameter]
    ) -> None:
        self._preconditioner = preconditioner
        self._stepper = base
        self._parameters = [(p, p.detach().clone()) for p in parameters]
        self._kept = [
            (module, name, buffer.detach().clone())
            for module in preconditioner.model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._saved_state = {p: _copied(state) for p, state in base.state.items()}
        self._rules = {s: _copied(s.buffers) for s in preconditioner.layers.values()}
        quadratic = preconditioner.quadratic
        self._last = None if quadratic is None else dict(quadratic.last)

    @torch.no_grad()
    def restore(self) -> None:
        """Go back there; the snapshot may be used again."""
        for target, value in self._parameters:
            target.copy_(value)
        for module, name, value in self._kept:
            module.get_buffer(name).copy_(value)
        self._stepper.state.clear()
        for parameter, state in self._saved_state.items():
            self._stepper.state[parameter] = _copied(state)
        for layer, buffers in self._rules.items():
            layer.buffers = _copied(buffers)
        if self._preconditioner.quadratic is not None and self._last is not None:
            self._preconditioner.quadratic.last = dict(self._last)


def _copied(state: Any) -> dict[Any, Any]:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }
