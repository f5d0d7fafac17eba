"""Running a closure a second time without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kronfac.capture.random_state import random_state, set_random_state


class RandomState:
    """Where the random number generators of the CPU and of a model's devices stand."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._others = {
            device: random_state(device)
            for device in set(devices)
            if device.type not in ("cpu", "meta")
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same random numbers inside once more; afterwards go on where things stood."""
        now = RandomState(self._others)
        self._restore()
        try:
            yield
        finally:
            now._restore()

    def _restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in self._others.items():
            set_random_state(device, state)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put all buffers, such as running statistics of norms, back as they were."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in kept:
            with torch.no_grad():
                buffer.copy_(value)
            module._buffers[name] = buffer


@contextmanager
def gradients_kept(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Start without gradients and put them back as they were: the same tensors, the same numbers.

    Numbers are copied too, since gradients may be views into memory that another pass writes to.
    """
    kept = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    for parameter, _, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad, value in kept:
            if grad is not None and value is not None:
                with torch.no_grad():
                    grad.copy_(value)
            parameter.grad = grad


@contextmanager
def gradients_replaced(values: Mapping[nn.Parameter, Tensor | None]) -> Iterator[None]:
    """Let other tensors stand in for gradients, for what reads a layer's gradient as a matrix."""
    kept = {parameter: parameter.grad for parameter in values}
    for parameter, value in values.items():
        parameter.grad = value
    try:
        yield
    finally:
        for parameter, grad in kept.items():
            parameter.grad = grad
