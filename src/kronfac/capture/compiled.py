"""Observing a model that runs under ``torch.compile``, without a break in its graph.

A compiler cannot follow hooks that keep books. It sees opaque operators instead, which call back into
the capture when the graph runs; graphs know captures by number. Operators are tied to each other and to
the model's own values by what they return, so that the compiler neither drops nor confuses them:

- *open*, at the start of the outermost forward, returns the ticket of the pass;
- *watch* takes a product, its inputs and the pass's ticket; it returns the product and its ticket;
- *observe_output*, in the backward of *watch*, takes the gradient and the product's ticket.

So two forwards before one backward, several backwards, and activation checkpointing (which repeats
*watch* in the backward) keep apart. Whether anything is observed is one boolean, so that there are two
graphs: with these operators and without.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from kronfac.capture.hooks import first_tensor
from kronfac.layers.shards import is_dtensor

if TYPE_CHECKING:
    from kronfac.capture.capture import Capture
    from kronfac.layers import Layer
    from kronfac.state.layer_state import LayerState
    from kronfac.statistics.forward_pass import Pass

_CAPTURES: weakref.WeakValueDictionary[int, Capture] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_donated_before: list[bool] = []


class Switch:
    """What graphs read of their capture: whether it observes, and the pass that is open."""

    def __init__(self) -> None:
        self.on = True
        self.depth = 0
        self.no_pass = _ticket(-1)
        self.open_pass = self.no_pass

    def close(self) -> None:
        """No forward is open."""
        self.depth, self.open_pass = 0, self.no_pass


class Calls:
    """Passes and products that a compiled backward may come back to, by ticket."""

    def __init__(self) -> None:
        self.passes: dict[int, Pass] = {}
        self.products: dict[int, tuple[LayerState, Pass]] = {}
        self.latest: dict[tuple[int, int, int], int] = {}

    def clear(self) -> None:
        """Forget all of them."""
        self.passes.clear()
        self.products.clear()
        self.latest.clear()

    def add_pass(self, forward_pass: Pass) -> Tensor:
        """Return the ticket of a pass."""
        number = next(_NUMBERS)
        self.passes[number] = forward_pass
        return _ticket(number)


def _ticket(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int64, device="cpu")


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
def _open(first: Tensor, trains: bool, capture: int, site: int) -> Tensor:
    found = _CAPTURES.get(capture)
    forward_pass = None if found is None else found.new_pass(first, trains)
    return (
        _ticket(-1) if found is None or forward_pass is None else found.calls.add_pass(forward_pass)
    )


@torch.library.custom_op("kronfac::watch", mutates_args=())
def _watch(
    product: Tensor,
    inputs: list[Tensor],
    keep: bool,
    open_pass: Tensor,
    layer: Tensor,
    capture: int,
    site: int,
) -> tuple[Tensor, Tensor]:
    _restore_donation()
    number = _observe_product(inputs, int(open_pass), int(layer), capture, site)
    return product.clone(), _ticket(number)


def _observe_product(
    inputs: list[Tensor], open_pass: int, layer: int, capture: int, site: int
) -> int:
    found = _CAPTURES.get(capture)
    if found is None or not found.switch.on or layer >= len(found.states):
        return -1
    calls = found.calls
    if torch._C._current_graph_task_id() != -1:  # repeated by activation checkpointing
        return calls.latest.get((open_pass, layer, site), -1)
    state, number = found.states[layer], next(_NUMBERS)
    if not state.layer.weight.requires_grad:
        return -1
    forward_pass = found.observe_traced_call(state, calls.passes.get(open_pass), tuple(inputs))
    calls.products[number] = (state, forward_pass)
    calls.latest[open_pass, layer, site] = number
    return number


@torch.library.custom_op("kronfac::observe_output", mutates_args=())
def _observe_output(grad: Tensor, kept: list[Tensor], product: Tensor, capture: int) -> Tensor:
    found = _CAPTURES.get(capture)
    known = None if found is None else found.calls.products.get(int(product))
    if found is not None and known is not None:
        known[1].count_hidden_terms(grad)
        found.observe_traced_output(*known, tuple(kept), grad)
    return grad.clone()


@torch.library.custom_op("kronfac::count_terms", mutates_args=())
def _count_terms(grad: Tensor, open_pass: Tensor, capture: int) -> Tensor:
    found = _CAPTURES.get(capture)
    forward_pass = None if found is None else found.calls.passes.get(int(open_pass))
    if forward_pass is not None:
        forward_pass.count_terms(grad)
    return grad.clone()


def _see_scores(open_pass: Tensor, capture: int, dims: int, width: int) -> None:
    """Note what scores look like whose gradient stays in the graph."""
    found = _CAPTURES.get(capture)
    forward_pass = None if found is None else found.calls.passes.get(int(open_pass))
    if forward_pass is not None:
        forward_pass.see_scores(dims, width, None)


@_open.register_fake
def _fake_open(*args: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@_watch.register_fake
def _fake_watch(product: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return product.clone(), torch.empty((), dtype=torch.int64, device="cpu")


@_observe_output.register_fake
@_count_terms.register_fake
def _fake_copy(first: Tensor, *args: Any) -> Tensor:
    return first.clone()


def _keep_watch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, tensors, keep, _, _, ctx.capture, _ = inputs
    ctx.save_for_backward(output[1], *(tensors if keep else []))
    ctx.count = len(tensors)


def _watch_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    ticket, *kept = ctx.saved_tensors
    grad = torch.ops.kronfac.observe_output(grad, kept, ticket, ctx.capture)
    return grad, [None] * ctx.count, None, None, None, None, None


_watch.register_autograd(_watch_backward, setup_context=_keep_watch)


@functools.cache
def allow_dtensors() -> None:
    """Show operators all of the inputs and gradients that tensor parallelism divides.

    Products stay as they are. Whatever has to be gathered for that becomes a part of the graph.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def watch(product: Any, inputs: Any, *rest: Any) -> list[tuple[list[Any], list[Any]]]:
        kinds = dict.fromkeys([*product.placements, *map(Shard, range(product.ndim)), Replicate()])
        given = [Replicate() for _ in inputs]
        # The others are whether inputs are kept, two tickets, and two numbers.
        others = [None, Replicate(), Replicate(), None, None]
        return [([kind, Replicate()], [kind, *given, *others]) for kind in kinds]

    def observe_output(grad: Any, kept: Any, *rest: Any) -> list[tuple[list[Any], list[Any]]]:
        given = [Replicate() for _ in (grad, *kept)]
        return [([Replicate()], [*given, Replicate(), None])]

    register_sharding(torch.ops.kronfac.watch.default)(watch)
    register_sharding(torch.ops.kronfac.observe_output.default)(observe_output)


# --- what the compiler traces -------------------------------------------------------------------


def _at_trace_time(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have a function called while a graph is traced, and its result taken as a constant.

    It is what ``torch.compiler.assume_constant_result`` does, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_at_trace_time
def _new_site() -> int:
    """A number for one place in a graph, so that equal calls are not taken for one."""
    return next(_NUMBERS)


class TracedModel:
    """Hooks around the outermost forward, in terms that a compiler understands."""

    def __init__(self, capture: int, switch: Switch, counts_terms: bool) -> None:
        self.capture = capture
        self.switch = switch
        self.counts_terms = counts_terms

    def open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward."""
        switch = self.switch
        if not switch.on or not torch.is_grad_enabled():
            return
        first = first_tensor((args, kwargs))
        if switch.depth == 0 and first is not None:
            switch.open_pass = torch.ops.kronfac.open(
                first.detach(), module.training, self.capture, _new_site()
            )
        switch.depth += 1

    def close(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """After the forward."""
        switch = self.switch
        if not switch.on or switch.depth == 0 or not torch.is_grad_enabled():
            return
        switch.depth -= 1
        if switch.depth > 0:
            return
        open_pass, switch.open_pass = switch.open_pass, switch.no_pass
        if not self.counts_terms:
            return
        scores = first_tensor(output, least_dim=2, needs_grad=True)
        if scores is None:
            return
        capture = self.capture  # writing to attributes would be forgotten after the next lines
        dims, width = scores.dim(), scores.shape[-1]
        scores.register_hook(
            lambda grad: (
                _see_scores(open_pass, capture, dims, width)
                if grad is None
                else torch.ops.kronfac.count_terms(grad, open_pass, capture)
            )
        )


class TracedCall:
    """Forward hook of a watched module, in terms that a compiler understands."""

    def __init__(
        self,
        capture: int,
        switch: Switch,
        split: Callable[..., Any],
        sampled: bool,
    ) -> None:
        self.capture = capture
        self.switch = switch
        self.split = split
        self.sampled = sampled
        # Tensors and not numbers, so that equal blocks of a model can share one graph.
        self.layers: dict[str, Tensor] = {}
        self.keeps: dict[str, Callable[[Any], Any]] = {}

    def add(self, part: str, number: int, layer: Layer) -> None:
        """Watch on behalf of one more layer."""
        if is_dtensor(layer.weight):
            allow_dtensors()
        self.layers[part] = _ticket(number)
        if layer.keeps_inputs:
            self.keeps[part] = layer.keep

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """After the module's forward."""
        if not self.switch.on or not module.training or not torch.is_grad_enabled():
            return None
        if self.sampled:
            _forbid_donation()
        return self.split(self._watched, module, args, kwargs, output)

    def _watched(self, part: str, inputs: tuple[Any, ...], product: Tensor) -> Tensor:
        if part not in self.layers or not product.requires_grad:
            return product
        keep = self.keeps.get(part, Tensor.detach)
        watched: Tensor = torch.ops.kronfac.watch(
            product,
            [keep(x) for x in inputs if isinstance(x, Tensor)],
            part in self.keeps,
            self.switch.open_pass,
            self.layers[part],
            self.capture,
            _new_site(),
        )[0]
        return watched


# A compiled backward may reuse the buffers of its forward, and then cannot run twice. observe() has
# to run it before the loss does, so such buffers are kept while this graph is made, and only then.


@_at_trace_time
def _forbid_donation() -> None:
    if not _donated_before:
        _donated_before.append(functorch_config.donated_buffer)
        functorch_config.donated_buffer = False


def _restore_donation() -> None:
    if _donated_before:
        functorch_config.donated_buffer = _donated_before.pop()


def keeping_buffers() -> AbstractContextManager[None]:
    """Compile what is compiled inside without donating buffers: backwards are compiled late."""
    context: AbstractContextManager[None] = functorch_config.patch(donated_buffer=False)
    return context
