"""Closures that forget something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.options.advice import Advice


class Closures:
    """Runs a step's closure, and warns of one without ``backward()`` or ``zero_grad()``.

    Whether gradients were cleared is seen by their versions, without reading a number: a gradient that
    is still the tensor that the last step has left, and that was written to once, was added to.
    """

    def __init__(self, advice: Advice) -> None:
        self._advice = advice
        self._in_use = False
        #: A gradient as the last step has left it, and its version then.
        self._left: tuple[Tensor, int] | None = None

    def run(self, closure: Callable[[], Any] | None, groups: Iterable[Mapping[str, Any]]) -> Any:
        """Return what the closure returns."""
        assert closure is not None
        self._in_use = True
        found = self._left
        untouched = found is not None and found[0]._version == found[1]
        with torch.enable_grad():
            loss = closure()
        parameters = _trained(groups)
        if loss is not None and all(p.grad is None for p in parameters):
            self._advice.give(
                "backward",
                "the closure has left no gradients, so this step changes nothing: call loss.backward() "
                "in it, after the gradients were cleared.",
            )
        added = found is not None and untouched and found[0]._version == found[1] + 1
        if added and found is not None and any(p.grad is found[0] for p in parameters):
            self._advice.give(
                "zero_grad",
                "the closure has added to the gradients of the last step, which were preconditioned "
                "already: call optimizer.zero_grad() in it, before backward().",
            )
        return loss

    def end_step(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Remember how a step leaves the gradients, if closures are used; the smallest one will do."""
        if self._in_use and not self._advice.knows("zero_grad"):
            grads = [
                p.grad for p in _trained(groups) if p.grad is not None and not p.grad.is_sparse
            ]
            least = min(grads, key=Tensor.numel, default=None)
            self._left = None if least is None else (least, least._version)


def _trained(groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
    return [p for group in groups for p in group["params"]]
