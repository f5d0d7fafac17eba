"""One outermost forward, and what is known of its samples and loss terms."""

from __future__ import annotations

import torch
from torch import Tensor

from kronfac.layers.shards import is_dtensor, whole
from kronfac.statistics.running import count_dtype


class Pass:
    """One outermost forward: its number of samples, and of loss terms once that is known.

    ``first`` is the number of its first sample among those of the step on this rank.
    """

    def __init__(self, samples: int, first: int = 0, step: int = 0) -> None:
        self.samples = samples
        self.first = first
        self.step = step
        self.terms: Tensor | None = None
        #: Dimensions and width of scores whose gradient is seen at the product that made them only.
        self.hidden_scores: tuple[int, int] | None = None
        #: The model's outputs and the loss's gradient at them, if the method asks for them.
        self.outputs: Tensor | None = None
        self.output_gradient: Tensor | None = None

    def count_terms(self, grad: Tensor) -> None:
        """Loss terms are the output positions that receive a gradient: masked ones receive none."""
        entries = grad.detach() != 0
        # Ranks with other classes add up how many entries a position has: torch adds booleans as well.
        reached = whole(entries.sum(-1)) != 0 if is_dtensor(entries) else entries.any(-1)
        self.terms = reached.sum(dtype=count_dtype(grad.device))
        self.hidden_scores = None

    def see_scores(self, dims: int, width: int, grad: Tensor | None) -> None:
        """The gradient of the scores; ``None`` if it stays in a graph, since the loss is there too."""
        if grad is None:
            self.hidden_scores = (dims, width)
        else:
            self.count_terms(grad)

    def count_hidden_terms(self, grad: Tensor) -> None:
        """The same for a product's output, if that is what the scores are: the last one comes first."""
        if self.hidden_scores == (grad.dim(), grad.shape[-1]):
            self.count_terms(grad)

    def see_outputs(self, outputs: Tensor) -> None:
        """Keep what the model returned."""
        self.outputs = outputs.detach().to(torch.promote_types(outputs.dtype, torch.float32))

    def see_output_gradient(self, grad: Tensor) -> None:
        """Add the gradient of one backward pass at the outputs."""
        assert self.outputs is not None
        found = grad.detach().to(self.outputs.dtype)
        before = self.output_gradient
        self.output_gradient = found if before is None else before + found

    def divide_gradient(self, scale: Tensor) -> None:
        """Take a factor out of the gradient at the outputs."""
        if self.output_gradient is not None:
            self.output_gradient = self.output_gradient / scale.to(self.output_gradient.device)


class Passes:
    """Makes the passes of a step, which number its samples."""

    def __init__(self) -> None:
        self._implicit: dict[int, Pass] = {}
        self.begin(0)

    def begin(self, step: int) -> None:
        """Count the samples of a step from its first one on."""
        self._step, self._samples = step, 0

    def new(self, samples: int) -> Pass:
        """The next pass of the step."""
        made = Pass(samples, self._samples, self._step)
        self._samples += samples
        return made

    def implicit(self, index: int, samples: int) -> Pass:
        """The n-th pass of layers that are called outside the model's forward."""
        if index not in self._implicit:
            self._implicit[index] = self.new(samples)
        return self._implicit[index]

    def forget_implicit(self) -> None:
        """Begin such passes again."""
        self._implicit.clear()
