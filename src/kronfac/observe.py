"""``optimizer.observe(...)``: output gradients that do not come from the labels."""

from __future__ import annotations

import torch
from torch import Tensor

from kronfac.capture import Capture
from kronfac.compiled import keeping_buffers
from kronfac.config import Fisher, check_count
from kronfac.fisher import check_likelihood, exact_gradients, sampled_gradient, term_mask
from kronfac.hooks import observing
from kronfac.quadratic import Products
from kronfac.statistics import count_dtype


class Observer:
    """Sends gradients of the model's own likelihood back to the layers of the last forward."""

    def __init__(self, capture: Capture, fisher: Fisher) -> None:
        self.capture = capture
        self.fisher = fisher
        #: Whether there was a call since this was last set to false.
        self.called = False
        #: What the quadratic model collects in its own run of the closure.
        self.products: Products | None = None
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
        if not options.sampled and options.rescale != "quadratic":
            raise ValueError(
                "observe() is for fisher='mc' or 'exact' and for rescale='quadratic', "
                f"not {self.fisher!r}, which needs no call."
            )
        check_likelihood(likelihood)
        check_count("samples", samples)
        if outputs.dim() < 2:
            raise ValueError(
                f"outputs have shape {tuple(outputs.shape)}; give [N, ..., C] with samples first "
                "and classes or values last."
            )
        self.called = True
        if self.products is not None:
            self._collect(self.products, outputs, likelihood, mask, ignore_index)
        if self.capture.is_paused or not options.sampled or not self.capture.due:
            return
        if not self.capture.edges and not self.capture.calls.products:
            raise RuntimeError(
                "observe() found no forward pass to observe: call it once after each forward in "
                "training mode and before backward()."
            )
        scores = _scores(outputs)
        weights = term_mask(scores, mask, ignore_index)
        self._share_terms(weights)
        if self.fisher == "exact":
            draws, share = exact_gradients(scores, likelihood), 1.0  # type: ignore[arg-type]
        else:
            source = generator or self._generator(scores.device)
            draws = (sampled_gradient(scores, likelihood, source) for _ in range(samples))  # type: ignore[arg-type]
            share = 1 / samples
        with keeping_buffers():
            for number, gradient in enumerate(draws):
                self._send(outputs, gradient * weights[..., None], number, share)
        self.capture.edges.clear()
        self.capture.calls.clear()

    @staticmethod
    def _collect(
        products: Products,
        outputs: Tensor,
        likelihood: str,
        mask: Tensor | None,
        ignore_index: int | None,
    ) -> None:
        if not outputs.requires_grad:
            raise RuntimeError(
                "observe() got outputs without a graph: give what the model returned, not a "
                "detached copy, and run the forward pass with gradients enabled."
            )
        weights = term_mask(_scores(outputs), mask, ignore_index)
        products.add(outputs, likelihood, weights)  # type: ignore[arg-type]

    def _share_terms(self, weights: Tensor) -> None:
        """Tell the passes how many loss terms they have, by their share of the samples."""
        passes = {edge.seen: None for edge in self.capture.edges}
        passes |= {seen: None for _, seen in self.capture.calls.products.values()}
        terms = weights.sum(dtype=count_dtype(weights.device))
        samples = max(1, sum(seen.samples for seen in passes))
        for seen in passes:
            seen.terms = terms * (seen.samples / samples)

    def _send(self, outputs: Tensor, gradient: Tensor, draw: int, share: float) -> None:
        gradient = gradient.to(outputs.dtype)
        self._send_compiled(outputs, gradient, draw, share)
        if not self.capture.edges:
            return
        edges = [edge.gradient for edge in self.capture.edges]
        found = torch.autograd.grad(outputs, edges, gradient, retain_graph=True, allow_unused=True)
        with observing(outputs.device):
            for edge, grad in zip(self.capture.edges, found, strict=True):
                if grad is not None:
                    grad, kept = edge.view.restore(grad), tuple(edge.kept)
                    self.capture.observe_output(
                        edge.state, edge.seen, grad, kept, draw, share, scaled=False
                    )

    def _send_compiled(self, outputs: Tensor, gradient: Tensor, draw: int, share: float) -> None:
        """Compiled products have no outputs to ask for; their backward reports as it passes."""
        products = self.capture.calls.products.values()
        weights = list(dict.fromkeys(state.layer.weight for state, _ in products))
        if not weights:
            return
        self.capture.draw = (draw, share)
        try:
            torch.autograd.grad(outputs, weights, gradient, retain_graph=True, allow_unused=True)
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


def _scores(outputs: Tensor) -> Tensor:
    """Outputs in at least single precision, without their graph."""
    scores = outputs.detach()
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
