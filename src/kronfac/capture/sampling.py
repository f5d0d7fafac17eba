"""``optimizer.observe(...)``: output gradients that do not come from the labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from kronfac.capture.capture import Capture
from kronfac.capture.compiled import keeping_buffers
from kronfac.capture.fisher import Likelihood, exact_gradients, sampled_gradient, term_mask
from kronfac.capture.hooks import observing
from kronfac.capture.loss_gradient import watch_outputs
from kronfac.capture.sampling_arguments import advise, check_arguments, check_graph, graph_error
from kronfac.layers.shards import whole
from kronfac.options.advice import Advice
from kronfac.options.config import Fisher
from kronfac.statistics.running import count_dtype


class Collector(Protocol):
    """Something else that wants the outputs of each forward."""

    def add(self, outputs: Tensor, likelihood: Likelihood, weights: Tensor) -> None:
        """Take one forward; ``weights`` say which loss terms count."""


class Observer:
    """Sends gradients of the model's own likelihood back to the layers of the last forward."""

    def __init__(self, capture: Capture, fisher: Fisher, needs_outputs: bool = False) -> None:
        self.capture = capture
        self.fisher = fisher
        #: Whether the method looks at the model's outputs and the loss's gradient at them.
        self.needs_outputs = needs_outputs
        self.advice = Advice()
        #: Whether there was a call since this was last set to false.
        self.called = False
        #: What the quadratic model collects in its own run of the closure.
        self.products: Collector | None = None
        self._generators: dict[torch.device, torch.Generator] = {}
        self._saved_state: list[Tensor] = []

    def observe(
        self,
        outputs: Tensor,
        likelihood: str,
        mask: Tensor | None,
        ignore_index: int | None,
        samples: int,
        generator: torch.Generator | None,
    ) -> None:
        """Observe all layers; a no-op on steps that take no statistics.

        Uses ``torch.autograd.grad``: no ``.grad`` is touched and nothing is reduced over ranks. Losses
        of single terms are not averaged here, so micro-batches need no common divisor.
        """
        options = self.capture.options
        if not self.needs_outputs and not options.sampled and options.rescale != "quadratic":
            raise ValueError(
                "observe() is for fisher='mc' or 'exact', for rescale='quadratic' and for methods that "
                f"look at outputs; fisher={self.fisher!r} needs no call."
            )
        check_arguments(outputs, likelihood, mask, ignore_index, samples, generator)
        self.called = True
        if self.products is not None:
            self._collect(self.products, outputs, likelihood, mask, ignore_index)
        if self.capture.is_paused or not self.capture.due:
            return
        if self.needs_outputs:
            check_graph(outputs)
            watch_outputs(self.capture, outputs)
        if not options.sampled:
            return
        if not self.capture.edges and not self.capture.calls.products:
            raise RuntimeError(
                "observe() found no forward pass to observe: call it once after each forward in "
                "training mode and before backward()."
            )
        check_graph(outputs)
        outputs = whole(outputs)
        advise(self.advice, self.fisher, outputs, likelihood, samples)
        scores = _scores(outputs)
        weights = term_mask(scores, mask, ignore_index)
        self._share_terms(weights)
        if self.fisher == "exact":
            draws, share = exact_gradients(scores, likelihood), 1.0  # type: ignore[arg-type]
        else:
            source = generator or self._generator(scores.device)
            draws = (sampled_gradient(scores, likelihood, source) for _ in range(int(samples)))  # type: ignore[arg-type]
            share = 1 / samples
        with keeping_buffers():
            for number, gradient in enumerate(draws):
                self._send(outputs, gradient * weights[..., None], number, share)
        self.capture.edges.clear()
        self.capture.calls.clear()

    @staticmethod
    def _collect(
        products: Collector,
        outputs: Tensor,
        likelihood: str,
        mask: Tensor | None,
        ignore_index: int | None,
    ) -> None:
        check_graph(outputs)
        weights = term_mask(_scores(outputs), mask, ignore_index)
        products.add(outputs, likelihood, weights)  # type: ignore[arg-type]

    def _share_terms(self, weights: Tensor) -> None:
        """Tell the passes how many loss terms they have, by their share of the samples."""
        passes = {edge.forward_pass: None for edge in self.capture.edges}
        passes |= {forward_pass: None for _, forward_pass in self.capture.calls.products.values()}
        terms = weights.sum(dtype=count_dtype(weights.device))
        samples = max(1, sum(forward_pass.samples for forward_pass in passes))
        for forward_pass in passes:
            forward_pass.terms = terms * (forward_pass.samples / samples)

    def _send(self, outputs: Tensor, gradient: Tensor, draw: int, share: float) -> None:
        gradient = gradient.to(outputs.dtype)
        self._send_compiled(outputs, gradient, draw, share)
        if not self.capture.edges:
            return
        edges = [edge.gradient for edge in self.capture.edges]
        found = _back(outputs, edges, gradient)
        with observing(outputs.device):
            for edge, grad in zip(self.capture.edges, found, strict=True):
                if grad is not None:
                    grad, kept = edge.view.restore(grad), tuple(edge.kept)
                    self.capture.observe_output(
                        edge.state, edge.forward_pass, grad, kept, draw, share, scaled=False
                    )

    def _send_compiled(self, outputs: Tensor, gradient: Tensor, draw: int, share: float) -> None:
        """Compiled products have no outputs to ask for; their backward reports as it passes."""
        products = self.capture.calls.products.values()
        weights = list(dict.fromkeys(state.layer.weight_in_use for state, _ in products))
        if not weights:
            return
        self.capture.draw = (draw, share)
        try:
            _back(outputs, weights, gradient)
        finally:
            self.capture.draw = None

    # --- random numbers -------------------------------------------------------------------------

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            generator = torch.Generator(device=device)
            if self._saved_state:
                generator.set_state(self._saved_state[0])
            else:
                generator.manual_seed(torch.initial_seed())
            self._generators[device] = generator
        return self._generators[device]

    def allocate(self, device: torch.device) -> None:
        """Make the generator that sampling will use."""
        if self.fisher == "mc":
            self._generator(device)

    def random_state(self) -> Tensor | None:
        """State of our generator, if one has been used or loaded."""
        for generator in self._generators.values():
            return generator.get_state()
        return self._saved_state[0] if self._saved_state else None

    def set_random_state(self, state: Tensor) -> None:
        """Continue from a saved state."""
        self._saved_state[:] = [state.detach().cpu().clone()]
        self._generators.clear()


def _back(
    outputs: Tensor, targets: Sequence[Tensor] | Sequence[GradientEdge], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the targets, with a sentence about when to call if the graph is gone."""
    try:
        return torch.autograd.grad(outputs, targets, gradient, retain_graph=True, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise graph_error() from error


def _scores(outputs: Tensor) -> Tensor:
    """Outputs in at least single precision, without their graph."""
    scores = outputs.detach()
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
