"""Layers that have a gradient but were not observed: named, and never passed over in silence."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from kronfac.capture.capture import Capture
from kronfac.capture.compiled import anything_compiled
from kronfac.layers.shards import local
from kronfac.options.advice import warn_caller
from kronfac.options.config import Options
from kronfac.state.layer_state import LayerState
from kronfac.statistics.forward_pass import Pass


class Unobserved:
    """Warns of each such layer once, or raises."""

    def __init__(self, options: Options, capture: Capture) -> None:
        self.options = options
        self.capture = capture
        self._warned: set[str] = set()

    def report(self, states: Iterable[LayerState]) -> None:
        """Look at what the step that is being taken has observed."""
        known = (state for state in states if state.has_curvature and state.observed)
        trained = [state for state in known if state.has_gradient]
        missing = [state for state in trained if _is_missing(state)]
        if missing and len(missing) == len(trained):
            self._explain_nothing(missing)
        if self.options.on_missing == "ignore":
            return
        # A gradient of zeros belongs to a layer that was not used; looking at it makes the host wait.
        new = [state for state in missing if state.name not in self._warned]
        self._tell([state.name for state in new if _is_nonzero(state.layer.weight.grad)])

    def report_unseen(self, states: Iterable[LayerState]) -> None:
        """The same for layers that no rank has observed."""
        found = [state for state in states if state.has_gradient]
        if found and not self.capture.hooks_work and anything_compiled():
            self._explain_nothing(found)
        if self.options.on_missing != "ignore":
            self._tell([state.name for state in found if state.name not in self._warned])

    def check_outputs(self, method: str, passes: Iterable[Pass]) -> None:
        """Raise if a method has to know the model's outputs and was not shown them."""
        if any(one.output_gradient is None for one in passes):
            raise RuntimeError(
                f"{method} needs the model's outputs and the loss's gradient at them: call "
                "optimizer.observe(outputs) between each forward pass and backward()."
            )

    def _tell(self, names: list[str]) -> None:
        if not names:
            return
        message = (
            f"nothing was captured for {', '.join(map(repr, names))} although there is a gradient: "
            "the module's forward was not called in training mode (its weight may be used directly). "
            "Such a gradient passes as it is; name the layer in exclude to accept that."
        )
        if self.options.on_missing == "raise":
            raise RuntimeError(message)
        self._warned.update(names)
        warn_caller(message)

    def _explain_nothing(self, missing: list[LayerState]) -> None:
        """Raise if it is known why no layer at all was observed."""
        if self.options.sampled:
            raise RuntimeError(
                f"fisher={self.options.fisher!r} has observed nothing: call "
                "optimizer.observe(outputs, likelihood=...) between the forward pass and backward()."
            )
        if not self.capture.hooks_work and anything_compiled():
            names = ", ".join(repr(state.name) for state in missing)
            raise RuntimeError(
                f"nothing was captured for {names}: a compiled model does not notice hooks that are "
                "added later. Build the optimizer before the first compiled call, or call "
                "torch.compiler.reset() after it is built."
            )


def _is_missing(state: LayerState) -> bool:
    sources = {one.source for one in state.block.statistics.values()}
    inputs, outputs = state.input_pending.has_inputs, state.pending.has_outputs
    return ("input" in sources and not inputs) or ("output" in sources and not outputs)


def _is_nonzero(grad: Tensor | None) -> bool:
    return grad is not None and bool(local(grad).any())
