"""Observing a model that runs under ``torch.compile``, without a break in its graph.

A compiler cannot follow hooks that keep books. It sees calls of opaque operators instead, marked as
having effects, so that they are neither dropped nor reordered; when the graph runs, they call back into
the capture, which they know by number. A product's input is observed by one operator, which returns a
ticket; the ticket is saved for the backward, where a second operator presents it together with the
gradient. So two forwards before one backward, and several backwards, keep apart.

Whether anything is observed is one boolean, so that there are two graphs: with these calls and without.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._library.effects import EffectType

from kronfac.hooks import first_tensor

if TYPE_CHECKING:
    from kronfac.capture import Capture
    from kronfac.layer_state import LayerState
    from kronfac.statistics import Pass

_CAPTURES: weakref.WeakValueDictionary[int, Capture] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_TICKETS = itertools.count()
_donated_before: list[bool] = []


class Switch:
    """Whether a compiled model is observed at the moment; graphs are guarded by it."""

    def __init__(self) -> None:
        self.on = True


class Calls:
    """The products and forwards of compiled graphs that a backward may come back to, by ticket."""

    def __init__(self) -> None:
        self.products: dict[int, tuple[LayerState, Pass]] = {}
        self.forwards: dict[int, Pass] = {}

    def clear(self) -> None:
        """Forget all of them."""
        self.products.clear()
        self.forwards.clear()

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights of the products."""
        return list(dict.fromkeys(state.layer.weight for state, _ in self.products.values()))


def anything_compiled() -> bool:
    """Whether a graph has been compiled in this process; a model does not show it by itself."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes a second
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0


def register(capture: Capture) -> int:
    """Give a capture the number by which graphs know it."""
    number = next(_NUMBERS)
    _CAPTURES[number] = capture
    return number


# --- operators: what happens when a graph runs --------------------------------------------------


@torch.library.custom_op("kronfac::open", mutates_args=())
def _open(first: Tensor, capture: int) -> None:
    found = _CAPTURES.get(capture)
    if found is not None:
        found.open_pass(first)


@torch.library.custom_op("kronfac::close", mutates_args=())
def _close(first: Tensor, capture: int) -> Tensor:
    found = _CAPTURES.get(capture)
    seen = None if found is None else found.close_pass()
    if found is None or seen is None:
        return _ticket(-1)
    number = next(_TICKETS)
    found.calls.forwards[number] = seen
    return _ticket(number)


@torch.library.custom_op("kronfac::count_terms", mutates_args=())
def _count_terms(grad: Tensor, ticket: Tensor, capture: int) -> None:
    found = _CAPTURES.get(capture)
    seen = None if found is None else found.calls.forwards.get(int(ticket))
    if seen is not None:
        seen.count_terms(grad)


@torch.library.custom_op("kronfac::observe_input", mutates_args=())
def _observe_input(inputs: list[Tensor], capture: int, layer: int) -> Tensor:
    _restore_donation()
    found = _CAPTURES.get(capture)
    if found is None or not found.switch.on or layer >= len(found.states):
        return _ticket(-1)
    state = found.states[layer]
    number = next(_TICKETS)
    found.calls.products[number] = (state, found.observe_traced_call(state, tuple(inputs)))
    return _ticket(number)


@torch.library.custom_op("kronfac::observe_output", mutates_args=())
def _observe_output(grad: Tensor, kept: list[Tensor], ticket: Tensor, capture: int) -> None:
    found = _CAPTURES.get(capture)
    product = None if found is None else found.calls.products.get(int(ticket))
    if found is not None and product is not None:
        found.observe_traced_output(*product, tuple(kept), grad)


def _ticket(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int64)


@_open.register_fake
@_count_terms.register_fake
@_observe_output.register_fake
def _nothing(*args: Any) -> None:
    return None


@_close.register_fake
@_observe_input.register_fake
def _fake_ticket(*args: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


for _name in ("open", "close", "count_terms", "observe_input", "observe_output"):
    torch.library._register_effectful_op(f"kronfac::{_name}", EffectType.ORDERED)


# --- what the compiler traces -------------------------------------------------------------------


class TracedCall:
    """Forward hook of a watched module, in terms that a compiler understands."""

    def __init__(
        self,
        capture: int,
        switch: Switch,
        split: Callable[..., tuple[list[Any], Any]],
        layers: Mapping[str, int],
        keeps_inputs: Collection[str],
        gradients: bool,
        sampled: bool,
    ) -> None:
        self.capture = capture
        self.switch = switch
        self.split = split
        self.layers = layers
        self.keeps_inputs = keeps_inputs
        self.gradients = gradients
        self.sampled = sampled

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """After the module's forward."""
        if not self.switch.on or not module.training or not torch.is_grad_enabled():
            return None
        if self.sampled:
            _forbid_donation()
        calls, replaced = self.split(module, args, kwargs, output)
        for part, inputs, product in calls:
            if part in self.layers and product.requires_grad:
                _trace_product(
                    self.capture,
                    self.layers[part],
                    [x.detach() for x in inputs if isinstance(x, Tensor)],
                    part in self.keeps_inputs,
                    product if self.gradients else None,
                )
        return replaced


def _trace_product(
    capture: int, layer: int, inputs: list[Tensor], keep: bool, product: Tensor | None
) -> None:
    ticket = torch.ops.kronfac.observe_input(inputs, capture, layer)
    kept = inputs if keep else []
    if product is not None:
        product.register_hook(
            lambda grad: torch.ops.kronfac.observe_output(grad, kept, ticket, capture)
        )


class TracedModel:
    """Hooks around the outermost forward, in terms that a compiler understands."""

    def __init__(self, capture: int, switch: Switch, counts_terms: bool) -> None:
        self.capture = capture
        self.switch = switch
        self.counts_terms = counts_terms

    def open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward."""
        first = first_tensor((args, kwargs))
        if self.switch.on and first is not None:
            torch.ops.kronfac.open(first.detach(), self.capture)

    def close(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """After the forward."""
        first = first_tensor((args, kwargs))
        if not self.switch.on or first is None:
            return
        capture = self.capture
        ticket = torch.ops.kronfac.close(first.detach(), capture)
        if not self.counts_terms or not torch.is_grad_enabled():
            return
        scores = first_tensor(output, least_dim=2, needs_grad=True)
        if scores is not None:
            scores.register_hook(lambda grad: torch.ops.kronfac.count_terms(grad, ticket, capture))


# A compiled backward may reuse the buffers of its forward, and then cannot run twice. observe() has
# to run it before the loss does, so such buffers are kept while this graph is made, and only then.


def _forbid_donation() -> None:
    if not _donated_before:
        _donated_before.append(functorch_config.donated_buffer)
        functorch_config.donated_buffer = False


# What torch.compiler.assume_constant_result does, without importing the compiler: the function is
# called while a graph is traced, and leaves no trace in it.
_forbid_donation._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _restore_donation() -> None:
    if _donated_before:
        functorch_config.donated_buffer = _donated_before.pop()
