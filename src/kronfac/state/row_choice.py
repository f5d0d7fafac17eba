"""Whether a layer is preconditioned from its rows, as it is kept and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

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
        damping: the damping, or its share, that it was made with.
    """

    possible: bool
    momentum: bool
    chosen: bool | None = None
    solved_at: int | None = None
    damping: float = 0.0

    @property
    def keeps_buffer(self) -> bool:
        """Whether a preconditioned momentum is kept."""
        return self.possible and self.momentum and self.chosen is True

    def entry(self) -> dict[str, Any]:
        """What is saved beside the layer's buffers, once something is settled.

        Before that nothing is, so that loaders that fill what exists expect nothing of a new optimizer:
        they leave the preconditioned momentum out, and the next step makes it again.
        """
        if self.chosen is None:
            return {}
        solved = _NEVER if self.solved_at is None else self.solved_at
        return {ENTRY: torch.tensor([self.chosen, solved, self.damping], dtype=torch.float64)}

    def load(self, entry: Mapping[str, Any]) -> None:
        """Take up what :meth:`entry` has saved, or start again."""
        chosen, solved, damping = entry[ENTRY].tolist() if ENTRY in entry else (-1, _NEVER, 0.0)
        self.chosen = None if chosen < 0 else bool(chosen)
        self.damping = damping
        known = solved != _NEVER and BUFFER in entry and self.keeps_buffer
        self.solved_at = int(solved) if known else None
