"""Hooks that watch a model: inputs in the forward pass, output gradients in the backward pass.

A forward hook observes the input side at once and puts a tensor hook on the output, which survives
in-place activations (full backward hooks do not). Capture happens when a factor step is due, the module
is in training mode, gradients are enabled and the output requires one. What a compiled model does instead
is in :mod:`kronfac.capture.compiled`; both ways end in ``observe_call`` and ``observe_output``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kronfac.capture import compiled
from kronfac.capture.hooks import (
    Hook,
    first_tensor,
    inside_backward,
    inside_transform,
    is_batched,
    observing,
    watch_gradient,
    watch_product,
)
from kronfac.capture.random_state import random_state, set_random_state
from kronfac.capture.recording import record_output
from kronfac.capture.seen_inputs import SeenInputs
from kronfac.capture.waiting import Listener, WaitingInputs, may_wait
from kronfac.capture.watches import Edge, Watch, is_seen
from kronfac.layers.attention import OUTPUT, AttentionProjection, splits_attention
from kronfac.layers.shards import lasting
from kronfac.options.config import Options
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases
from kronfac.statistics.forward_pass import Pass, Passes


class Capture:
    """Collects what the layers of one model see, for one optimizer."""

    def __init__(self, options: Options, phases: Phases) -> None:
        self.options = options
        self.phases = phases
        self.scaler: torch.amp.GradScaler | None = None
        self.passes: dict[Pass, None] = {}
        self._made = Passes()
        self.waiting = WaitingInputs(phases)
        self.inputs = SeenInputs(options.share_inputs, self.waiting)
        self.edges: list[Edge] = []
        self.states: list[LayerState] = []
        self.switch = compiled.Switch()
        self.calls = compiled.Calls()
        self.number = compiled.register(self)
        #: Number and weight of the draw of ``observe()`` that is on its way through a compiled model.
        self.draw: tuple[int, float] | None = None
        #: Told of each side of a call that has been observed.
        self.listener: Listener | None = None
        self._watches: dict[nn.Module, Watch] = {}
        self._handles: list[RemovableHandle] = []
        self._due = True
        self._paused = 0
        self._latest: Pass | None = None
        #: The ticket and pass that an eager forward has opened.
        self._opened: tuple[Tensor, Pass | None] = (self.switch.no_pass, None)
        self.forward_seen = False
        #: Whether the hook of any layer has ever been called, compiled or not.
        self.hooks_work = False
        self._unrecorded: dict[nn.Module, list[Pass]] = {}

    @property
    def due(self) -> bool:
        """Whether the coming step takes statistics."""
        return self._due

    @due.setter
    def due(self, due: bool) -> None:
        self._due = due
        self.switch.on = due and not self._paused

    # --- hooks ----------------------------------------------------------------------------------

    def attach_module(self, module: nn.Module, states: Sequence[LayerState]) -> None:
        """Watch a module on behalf of the layers whose products it computes."""
        self.states += [state for state in states if state not in self.states]
        attends = any(splits_attention(module, state.layer) for state in states)
        watch = self._watches.get(module)
        if watch is None:
            split = AttentionProjection.split if attends else states[0].layer.split
            sampled = self.options.sampled
            watch = Watch(split, compiled.TracedCall(self.number, self.switch, split, sampled))
            self._watches[module] = watch
            self._watch_module(module, watch, attends)
        for state in states:
            part = state.layer.part or (OUTPUT if attends else "")
            watch.add(part, state, self.states.index(state))

    def _watch_module(self, module: nn.Module, watch: Watch, attends: bool) -> None:
        hook = Hook(self._forward, watch, traced=watch.traced)
        # Before the hooks of others, which may change the output.
        self._handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        if attends and module.dropout:
            earlier = Hook(self._remember_random, watch)
            self._handles.append(module.register_forward_pre_hook(earlier, with_kwargs=True))

    def attach_model(self, model: nn.Module) -> None:
        """Watch the outermost forward, which says how many samples there are."""
        traced = compiled.TracedModel(self.number, self.switch, self._counts_terms)
        opening = Hook(self.open_forward, traced=traced.open)
        closing = Hook(self._close, traced=traced.close)
        self._handles.append(model.register_forward_pre_hook(opening, with_kwargs=True))
        self._handles.append(
            model.register_forward_hook(closing, with_kwargs=True, always_call=True)
        )

    def detach(self) -> None:
        """Remove every hook and forget what is pending."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()
        self.states.clear()
        self._watches.clear()
        self.due = False

    @property
    def is_paused(self) -> bool:
        """Whether nothing is observed at this moment."""
        return self._paused > 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Observe nothing inside."""
        self._paused += 1
        self.due = self.due
        try:
            yield
        finally:
            self._paused -= 1
            self.due = self.due

    # --- the life of a step ---------------------------------------------------------------------

    def begin_step(self, due: bool, step: int) -> None:
        """Say whether the coming step takes statistics."""
        self.due = due
        self._made.begin(step)
        self.forward_seen = False
        self.close_forwards()

    def close_forwards(self) -> None:
        """Close what an interrupt may have left open: it skips the hook at the end of a forward."""
        self.switch.close()
        self.take_in_inputs()

    def take_in_inputs(self) -> None:
        """Observe the inputs that have waited for the end of the forward."""
        if self.waiting:
            self.waiting.release(self.listener)

    @property
    def _current(self) -> Pass | None:
        """The pass that is open, whether its forward is compiled or not."""
        switch, (ticket, forward_pass) = self.switch, self._opened
        if switch.depth == 0 or switch.open_pass is switch.no_pass:
            return None
        if switch.open_pass is ticket:
            return forward_pass
        return self.calls.passes.get(int(switch.open_pass))  # opened by a graph

    def clear_outputs(self) -> None:
        """Forget output gradients, as ``zero_grad`` does with gradients."""
        for forward_pass in self.passes:
            forward_pass.output_gradient = None
        self.passes.clear()
        for state in self.states:
            state.pending.clear_outputs()

    def zero_grad(self) -> None:
        """Forget output gradients, and the graphs of all forwards but the newest.

        Loops call it between forward and backward, so the newest forward stays, and all inputs do.
        """
        self.clear_outputs()
        self.close_forwards()
        if self.edges:
            newest = self.edges[-1].forward_pass
            self.edges = [edge for edge in self.edges if edge.forward_pass is newest]
        for state in self.states:
            state.pending.release_inputs(state.solution_in_use)

    def clear(self) -> None:
        """Forget everything that is pending."""
        self.clear_outputs()
        self.edges.clear()
        self.calls.clear()
        self._made.forget_implicit()
        self._unrecorded.clear()
        self._latest = None
        self.inputs.clear()
        self.waiting.clear()
        for state in self.states:
            state.pending.clear()

    # --- the model's forward --------------------------------------------------------------------

    def open_forward(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Before the forward; torch still calls a hook that this forward has removed, without kwargs."""
        self._note_forward(module)
        if not self.switch.on:
            return
        self.switch.depth += 1
        if self.switch.depth > 1 or inside_transform() or not torch.is_grad_enabled():
            return
        if inside_backward():
            return  # activation checkpointing repeats a forward that was seen
        forward_pass = self.new_pass(first_tensor((args, kwargs)), module.training)
        if forward_pass is not None:
            self.switch.open_pass = self.calls.add_pass(forward_pass)
        self._opened = (self.switch.open_pass, forward_pass)

    def new_pass(self, first: Tensor | None, trains: bool) -> Pass | None:
        """The pass of a forward with gradients whose first tensor this is.

        Layers that are called beside an evaluation do not belong to it.
        """
        self._notice_cleared_gradients()
        # A lone vector of numbers is one sample of a model without batches; let its layers decide.
        unknown = first is None or (first.dim() == 1 and first.is_floating_point())
        forward_pass = None if unknown or first is None else self._made.new(first.shape[0])
        if trains:
            self._latest = forward_pass
        return forward_pass

    def _close(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not self.switch.on or self.switch.depth == 0:
            return  # perhaps a hook of somebody else raised before ours could open
        if self.switch.depth > 1:
            self.switch.depth -= 1
            return
        forward_pass = self._current
        self.close_forwards()
        if forward_pass is None or not self._counts_terms:
            return
        scores = first_tensor(output, least_dim=2, needs_grad=True)
        if scores is not None and not self._paused:
            watch_gradient(scores, partial(forward_pass.see_scores, scores.dim(), scores.shape[-1]))

    @property
    def latest(self) -> Pass | None:
        """The newest forward of the whole model in training mode."""
        return self._latest

    @property
    def _counts_terms(self) -> bool:
        return self.options.loss_average == "token" and self.options.fisher == "empirical"

    # --- a layer's forward ----------------------------------------------------------------------

    def _forward(
        self,
        watch: Watch,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        self.hooks_work = True
        self._note_forward(module)
        if not self.due or not module.training:
            return None
        if not torch.is_grad_enabled():
            forward_pass = self._current  # only a forward with gradients opens a pass
            if forward_pass is not None and not self._paused:
                self._unrecorded.setdefault(module, []).append(forward_pass)
            return None
        # Paused or not: a repeated forward has to do what the first one did.
        if watch.random is not None:
            set_random_state(output[0].device, watch.random)
            watch.random = None
        counts, forward_pass = not self._paused and not inside_transform(), self._current
        if counts and inside_backward():
            # Activation checkpointing repeats a forward. If the first one was without gradients
            # (reentrant), it was not observed and this one counts; else it was, and this one does not.
            unrecorded = self._unrecorded.get(module)
            counts = bool(unrecorded)
            forward_pass = unrecorded.pop() if unrecorded else None

        def see(part: str, inputs: tuple[Any, ...], product: Tensor) -> Tensor:
            state = watch.states.get(part)
            if counts and state is not None and is_seen(state, part, module, product):
                self._observe(state, forward_pass, inputs, product)
            return product

        return watch.split(see, module, args, kwargs, output)

    def _remember_random(
        self, watch: Watch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A forward that is done again has to drop the same activations."""
        if self.due and module.training and torch.is_grad_enabled():
            first = first_tensor((args, kwargs))
            watch.random = None if first is None else random_state(first.device)

    def _observe(
        self, state: LayerState, forward_pass: Pass | None, inputs: tuple[Any, ...], product: Tensor
    ) -> None:
        waits = self.switch.depth > 0 and may_wait(state, inputs, product)
        forward_pass = self.observe_call(state, forward_pass, inputs, waits=waits)
        sampled = self.options.sampled
        if self.options.fisher == "forward" or not (sampled or state.watches("output")):
            return
        kept = state.layer.keep_call(inputs, product) if state.layer.keeps_inputs else []
        if sampled:
            kept = lasting(state.layer.handle, inputs, kept)
            self.edges.append(Edge(state, forward_pass, kept, product))
        else:
            watch_product(product, partial(self._backward, state, forward_pass, kept))

    def observe_call(
        self,
        state: LayerState,
        forward_pass: Pass | None,
        inputs: tuple[Any, ...],
        traced: bool = False,
        waits: bool = False,
    ) -> Pass:
        """Observe the input side of one product, now or at the end, and return the pass it belongs to."""
        state.renew_if_stale()
        first = inputs[0]
        if forward_pass is None:
            forward_pass = self._implicit_pass(state, first)
        if not state.observed or not state.watches("input"):
            return forward_pass
        with observing(first.device), self.phases("observe-input", state.name):
            grown = self.inputs.record(state, inputs, forward_pass, traced, waits)
        if grown is not None:
            self.waiting.tell(grown, self.listener)
        return forward_pass

    def observe_traced_call(
        self, state: LayerState, forward_pass: Pass | None, inputs: tuple[Any, ...]
    ) -> Pass:
        """The same for a product in a compiled graph."""
        self.forward_seen = self.hooks_work = True
        return self.observe_call(state, forward_pass, inputs, traced=True)

    def _note_forward(self, module: nn.Module) -> None:
        """From here on it is settled whether the coming step takes statistics."""
        if module.training and torch.is_grad_enabled():
            self.forward_seen = True

    def _implicit_pass(self, state: LayerState, x: Tensor) -> Pass:
        """Pass of a layer that is called outside the model's forward.

        With as many samples as the latest forward it belongs to that one (a head beside a body);
        otherwise its n-th call belongs to the n-th such pass.
        """
        alone = x.dim() == 0 or (x.dim() == 1 and x.is_floating_point())
        samples = 1 if alone else x.shape[0]
        if self._latest is not None and self._latest.samples == samples:
            return self._latest
        index = state.pending.calls
        state.pending.calls += 1
        return self._made.implicit(index, samples)

    # --- backward -------------------------------------------------------------------------------

    def _backward(
        self, state: LayerState, forward_pass: Pass, kept: list[Any], grad: Tensor
    ) -> None:
        if self._paused or state not in self.states or is_batched(grad):
            return
        with observing(grad.device):
            self.observe_output(state, forward_pass, grad, tuple(kept))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            kept.clear()  # the graph, and this hook with it, may live on

    def observe_traced_output(
        self, state: LayerState, forward_pass: Pass, kept: tuple[Any, ...], grad: Tensor
    ) -> None:
        """The gradient of one product's output in a compiled backward."""
        if self.options.fisher == "empirical":
            self._backward(state, forward_pass, list(kept), grad)
        elif self.draw is not None:
            draw, share = self.draw
            with observing(grad.device):
                self.observe_output(state, forward_pass, grad, kept, draw, share, scaled=False)

    def observe_output(
        self,
        state: LayerState,
        forward_pass: Pass,
        grad: Tensor,
        kept: tuple[Any, ...],
        draw: int = 0,
        share: float = 1.0,
        scaled: bool = True,
    ) -> None:
        """Add the gradient of one product's output.

        ``kept`` are the product's inputs if the layer needs them again. ``share`` is its weight in a
        mean over draws; ``scaled`` says that it carries the factor of a gradient scaler.
        """
        self.passes[forward_pass] = None
        self.take_in_inputs()
        if not state.observed:
            return
        with self.phases("observe-output", state.name):
            if scaled:
                grad = self.unscale(grad, state.layer.factor_dtype)
            recorded = record_output(state, forward_pass, grad, kept, draw, share)
        if recorded and self.listener is not None:
            self.listener(state, "output")

    def unscale(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Undo a gradient scaler's factor without reading it back."""
        scale = None if self.scaler is None else getattr(self.scaler, "_scale", None)
        return grad if scale is None else grad.to(dtype) / scale.to(grad.device)

    def adopt(self, scaler: torch.amp.GradScaler) -> None:
        """Take note of a scaler whose factor is already in what this step has observed."""
        known, self.scaler = self.scaler, scaler
        if self.options.sampled:
            return
        scale, before = (getattr(one, "_scale", None) for one in (scaler, known))
        if scale is not None:
            for state in self.states:
                state.pending.divide_outputs(scale if before is None else scale / before)
            for one in self.passes:
                one.divide_gradient(scale if before is None else scale / before)

    def _notice_cleared_gradients(self) -> None:
        """Drop older output gradients if ``.grad`` was cleared without our ``zero_grad``."""
        if self.options.sampled:
            return  # observe() leaves no gradients behind
        for state in self.states:
            if state.pending.has_outputs and not state.layer.holds_gradient:
                self.clear_outputs()
                return
