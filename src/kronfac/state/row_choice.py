"""Whether a layer is preconditioned from its rows, as it is kept and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Name of the preconditioned momentum among a layer's buffers, and of the choice in a checkpoint.
BUFFER, ENTRY = "preconditioned_momentum", "row_form"
_NEVER = -1


@dataclass
class RowChoice:
    """What is settled of a layer that may be preconditioned from its rows.

    Args:
        possible: whether it may be in this process; several ranks have only some of the rows each.
        momentum: whether there is a momentum, whose preconditioned form is then kept.
        chosen: what the first step has shown; ``None`` before it.
        solved_at: the step whose solution the preconditioned momentum was made with, if there is one.
    """

    possible: bool
    momentum: bool
    chosen: bool | None = None
    solved_at: int | None = None

    @property
    def keeps_buffer(self) -> bool:
        """Whether a preconditioned momentum is kept, or may yet be."""
        return self.possible and self.momentum and self.chosen is not False

    def entry(self, buffers: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Any]:
        """What is saved beside the layer's buffers.

        Loaders that fill what exists do not know yet what is chosen, and expect the preconditioned
        momentum: where there is none, zeros stand for it.
        """
        chosen = -1 if self.chosen is None else int(self.chosen)
        solved = _NEVER if self.solved_at is None else self.solved_at
        found: dict[str, Any] = {ENTRY: torch.tensor([chosen, solved], dtype=torch.int64)}
        if self.momentum and "momentum" in buffers and BUFFER not in buffers:
            like = buffers["momentum"]
            found[BUFFER] = torch.zeros(shape, dtype=like.dtype, device="cpu")
        return found

    def load(self, entry: Mapping[str, Any]) -> None:
        """Take up what :meth:`entry` has saved, or start again."""
        chosen, solved = entry[ENTRY].tolist() if ENTRY in entry else (-1, _NEVER)
        self.chosen = None if chosen < 0 else bool(chosen)
        known = solved != _NEVER and BUFFER in entry and self.keeps_buffer
        self.solved_at = solved if known else None
