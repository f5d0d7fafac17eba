"""Two optimizers for one model, each with its part of the parameters."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from kronfac.optimizer.base import Preconditioned


class Composite:
    """Two optimizers, each with its part of one model, that look like one."""

    def __init__(self, first: Optimizer, second: Optimizer | None) -> None:
        self.members = [one for one in (first, second) if one is not None]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both."""
        return [group for one in self.members for group in one.param_groups]

    def step(self) -> None:
        """Let both step."""
        for one in self.members:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of both."""
        for one in self.members:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"members": [one.state_dict() for one in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both."""
        for one, state in zip(self.members, state_dict["members"], strict=True):
            one.load_state_dict(state)


def kfac_of(optimizer: object) -> Preconditioned | None:
    """The K-FAC optimizer that this is or contains, if there is one."""
    if isinstance(optimizer, Composite):
        return next((one for one in optimizer.members if isinstance(one, Preconditioned)), None)
    return optimizer if isinstance(optimizer, Preconditioned) else None
