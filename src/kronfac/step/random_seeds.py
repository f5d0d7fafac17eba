"""Random numbers of methods that draw, alike on all ranks and after a resume."""

from __future__ import annotations

import torch
from torch import Tensor


class RandomSeeds:
    """A generator of our own, whose state is saved; it never touches torch's."""

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None

    def allocate(self) -> None:
        """Make the generator, for loaders that fill what exists."""
        if self._generator is None:
            self._generator = torch.Generator(device="cpu").manual_seed(0)

    def draw(self) -> int:
        """A seed for this step."""
        self.allocate()
        return int(torch.randint(2**62, (), generator=self._generator, device="cpu"))

    def entry(self) -> Tensor | None:
        """What is saved, once something was drawn."""
        return None if self._generator is None else self._generator.get_state()

    def resume(self, state: Tensor | None) -> None:
        """Continue from what was saved; without it, start again."""
        self._generator = None
        if state is not None:
            self._generator = torch.Generator(device="cpu")
            self._generator.set_state(state.detach().cpu().to(torch.uint8))
