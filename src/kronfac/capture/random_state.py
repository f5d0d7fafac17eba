"""State of the random numbers that a device draws, read and put back without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """State of a device's default generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Put a device's default generator back into a state."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)
