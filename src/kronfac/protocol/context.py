"""What a block is told beside its own tensors: while it observes, and when it solves."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kronfac.options.config import ShareOf
from kronfac.protocol.statistic import Tensors


@dataclass(frozen=True)
class Context:
    """What is known while rows or gradients are observed.

    Args:
        solution: the solution in use, ``None`` before the first; all of it where the layer is worked
            on, elsewhere the tensors that statistics are expressed in.
        outputs: the model's outputs in this forward pass, ``[N, ...]``, for methods that need them
            (:attr:`Method.needs_observe`).
        output_gradient: the loss's gradient at them. Like the rows of outputs it is that of the loss as
            it was, a mean over the batch perhaps: the statistic's ``degree`` says how to scale it.
    """

    solution: Tensors | None = None
    outputs: Tensor | None = None
    output_gradient: Tensor | None = None


def number_of(name: str) -> int:
    """A number by which the random numbers of things of different names differ, in every process."""
    return zlib.crc32(name.encode())


#: Nothing is known.
NOTHING = Context()


@dataclass(frozen=True)
class Given:
    """What one part is solved from, or what a rank's own rows are compressed with.

    Args:
        means: means of its own statistics; gathered rows as they are.
        damping: the damping γ, or the share ρ of the curvature if ``relative``.
        outlines: outlines of the means of all statistics (:meth:`Block.outline`).
        previous: the solution in use, if there is one: where to start from, or what to update.
        solved: what parts before this one have found now.
        shards: by gathered statistic, how many rows each rank contributed.
        counts: by statistic, what its mean is divided by: their product is the decayed sum. That of
            gathered rows is N over all ranks, however many rows a sample has.
        step: number of completed steps.
        relative: what the damping is a share of, the ``"mean"`` eigenvalue or the ``"trace"``
            (:attr:`Block.knows_trace`), if it is one.
        seed: of the layer's random numbers at this step, alike on all ranks (:attr:`Block.draws`).
        rank_generator: this rank's own random numbers while it compresses rows, if the block draws.
        unchecked: solve without a look at the result (:meth:`Block.solve_batch`).
    """

    means: Tensors
    damping: float
    outlines: Tensors = field(default_factory=dict)
    previous: Tensors | None = None
    solved: Tensors = field(default_factory=dict)
    shards: Mapping[str, Sequence[int]] = field(default_factory=dict)
    counts: Mapping[str, float | Tensor] = field(default_factory=dict)
    step: int = 0
    relative: ShareOf | None = None
    seed: int = 0
    rank_generator: torch.Generator | None = None
    unchecked: bool = False

    def generator(self, part: str) -> torch.Generator:
        """Random numbers of one part, drawn on the CPU: whoever solves it has the same."""
        return torch.Generator(device="cpu").manual_seed(self.seed ^ number_of(part))

    def latest(self, name: str) -> Tensor:
        """The newest value of a tensor of the solution."""
        if name in self.solved:
            return self.solved[name]
        assert self.previous is not None, f"{name!r} was never solved"
        return self.previous[name]
