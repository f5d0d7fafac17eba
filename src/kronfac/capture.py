"""Hooks that watch a model: inputs in the forward pass, output gradients in the backward pass.

A forward hook observes the input side at once and puts a tensor hook on the output, which survives
in-place activations (full backward hooks do not). Capture happens when a factor step is due, the module
is in training mode, gradients are enabled and the output requires one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from kronfac.config import Options
from kronfac.layer_state import LayerState
from kronfac.phases import Phases
from kronfac.statistics import Pass, count_dtype


class Capture:
    """Collects what the layers of one model see, for one optimizer."""

    def __init__(self, options: Options, phases: Phases) -> None:
        self.options = options
        self.phases = phases
        self.due = True
        self.scaler: torch.amp.GradScaler | None = None
        self.passes: dict[Pass, None] = {}
        self.edges: list[tuple[LayerState, Pass, GradientEdge]] = []
        self._states: dict[LayerState, None] = {}
        self._handles: list[RemovableHandle] = []
        self._paused = 0
        self._depth = 0
        self._current: Pass | None = None
        self._latest: Pass | None = None
        self._recording = False
        self.forward_seen = False
        self._implicit: dict[int, Pass] = {}
        self._unrecorded: dict[nn.Module, list[Pass]] = {}

    # --- hooks ----------------------------------------------------------------------------------

    def attach_layer(self, state: LayerState, module: nn.Module) -> None:
        """Watch a module on behalf of a layer."""
        self._states[state] = None
        hook = _Hook(self._forward, state)
        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def attach_model(self, model: nn.Module) -> None:
        """Watch the outermost forward, which says how many samples there are."""
        opening, closing = _Hook(self._open), _Hook(self._close)
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
        self._states.clear()
        self.due = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Observe nothing inside."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    # --- the life of a step ---------------------------------------------------------------------

    def begin_step(self, due: bool) -> None:
        """Say whether the coming step takes statistics."""
        self.due = due
        self.forward_seen = False
        self.close_forwards()

    def close_forwards(self) -> None:
        """Close what an interrupt may have left open: it skips the hook at the end of a forward."""
        self._depth = 0
        self._current = None

    def clear_outputs(self) -> None:
        """Forget output gradients, as ``zero_grad`` does with gradients."""
        self.passes.clear()
        for state in self._states:
            state.pending.clear_outputs()

    def clear(self) -> None:
        """Forget everything that is pending."""
        self.clear_outputs()
        self.edges.clear()
        self._implicit.clear()
        self._unrecorded.clear()
        self._latest = None
        for state in self._states:
            state.pending.clear()

    # --- forward --------------------------------------------------------------------------------

    def _open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._note_forward(module)
        if not self.due or self._paused or _inside_backward():
            return  # in a backward, activation checkpointing repeats a forward that was seen
        self._notice_cleared_gradients()
        first = _first_tensor((args, kwargs))
        # A lone vector of numbers is one sample of a model without batches; let its layers decide.
        unknown = first is None or (first.dim() == 1 and first.is_floating_point())
        self._current = None if unknown or first is None else Pass(first.shape[0])
        self._recording = torch.is_grad_enabled()
        if module.training and self._recording:  # layers beside an evaluation are none of it
            self._latest = self._current

    def _close(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._depth == 0:
            return  # a hook of somebody else raised before ours could open
        self._depth -= 1
        if self._depth > 0:
            return
        seen, self._current = self._current, None
        if seen is None or self.options.loss_average != "token":
            return
        if self.options.fisher != "empirical":
            return
        scores = _first_tensor(output, least_dim=2, needs_grad=True)
        if scores is not None and not self._paused:
            _watch_gradient(scores, partial(_count_terms, seen))

    def _forward(
        self,
        state: LayerState,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        self._note_forward(module)
        if not self.due or self._paused or not module.training:
            return
        if not torch.is_grad_enabled():
            if self._current is not None and self._recording:
                self._unrecorded.setdefault(module, []).append(self._current)
            return
        if not output.requires_grad or not state.layer.weight.requires_grad:
            return
        if module.weight is not state.layer.weight:
            return  # torch.func.functional_call with other weights
        seen = self._current
        if _inside_backward():
            # Activation checkpointing repeats a forward. If the first one was without gradients
            # (reentrant), it was not observed and this one counts; else it was, and this one does not.
            unrecorded = self._unrecorded.get(module)
            if not unrecorded:
                return
            seen = unrecorded.pop()
        if state.layer.stale():
            state.reset()
        values = args if args else tuple(kwargs.values())
        if seen is None:
            seen = self._implicit_pass(state, values[0])
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            self._observe_input(state, values, seen)
        if self.options.sampled:
            self.edges.append((state, seen, get_gradient_edge(output)))
        elif self.options.fisher == "empirical":
            output.register_hook(partial(self._backward, state, seen))

    def _note_forward(self, module: nn.Module) -> None:
        """From here on it is settled whether the coming step takes statistics."""
        if module.training and torch.is_grad_enabled():
            self.forward_seen = True

    def _observe_input(self, state: LayerState, values: tuple[Any, ...], seen: Pass) -> None:
        with self.phases("observe-input"):
            rows = state.layer.inputs(values)
            if state.block.holds_rows and rows.samples != seen.samples:
                state.fall_back_to_expand()
            if state.block.holds_rows:
                state.pending.hold_input(rows.summed(), rows.positions, seen)
            else:
                state.pending.add_input(state.block.observe_input(rows), rows.count)

    def _implicit_pass(self, state: LayerState, x: Tensor) -> Pass:
        """Pass of a layer that is called outside the model's forward.

        With as many samples as the latest forward it belongs to that one (a head beside a body);
        otherwise its n-th call belongs to the n-th such pass.
        """
        samples = x.shape[0] if x.dim() > 1 else 1
        if self._latest is not None and self._latest.samples == samples:
            return self._latest
        index = state.pending.calls
        state.pending.calls += 1
        return self._implicit.setdefault(index, Pass(samples))

    # --- backward -------------------------------------------------------------------------------

    def _backward(self, state: LayerState, seen: Pass, grad: Tensor) -> None:
        if self._paused or state not in self._states:
            return
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            self.observe_output(state, seen, grad)

    def observe_output(
        self,
        state: LayerState,
        seen: Pass,
        grad: Tensor,
        draw: int = 0,
        share: float = 1.0,
        scaled: bool = True,
    ) -> None:
        """Add the gradient of one call's output.

        ``share`` is its weight in a mean over draws; ``scaled`` says that it carries the factor of a
        gradient scaler.
        """
        with self.phases("observe-output"):
            self.passes[seen] = None
            if scaled:
                grad = self._unscale(grad, state.layer.factor_dtype)
            rows = state.layer.outputs(grad)
            if state.block.holds_rows:
                state.pending.hold_output(rows.summed(), seen, draw, share)
            else:
                state.pending.add_output(state.block.observe_output(rows), seen, share)

    def _unscale(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
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
            for state in self._states:
                state.pending.divide_outputs(scale if before is None else scale / before)

    def _notice_cleared_gradients(self) -> None:
        """Drop older output gradients if ``.grad`` was cleared without our ``zero_grad``."""
        if self.options.sampled:
            return  # observe() leaves no gradients behind
        for state in self._states:
            if state.pending.has_outputs and state.layer.weight.grad is None:
                self.clear_outputs()
                return


class _Hook:
    """A hook that does not keep its optimizer alive.

    A model that is copied or unpickled, or whose optimizer is gone, carries it along without effect.
    """

    def __init__(self, target: Any = None, *bound: Any) -> None:
        self._target = None if target is None else weakref.WeakMethod(target)
        self._bound = tuple(weakref.ref(value) for value in bound)

    def __call__(self, *args: Any) -> None:
        target = None if self._target is None else self._target()
        bound = [value() for value in self._bound]
        if target is not None and None not in bound:
            target(*bound, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def remove_inert_hooks(model: nn.Module) -> None:
    """Remove what copying or unpickling has left of the original's hooks."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if _is_inert(hook)]:
                del hooks[key]
        for flags in (module._forward_hooks_with_kwargs, module._forward_hooks_always_called):
            for key in [key for key in flags if key not in module._forward_hooks]:
                del flags[key]
        flags = module._forward_pre_hooks_with_kwargs
        for key in [key for key in flags if key not in module._forward_pre_hooks]:
            del flags[key]


def _is_inert(hook: object) -> bool:
    return isinstance(hook, _Hook) and (hook._target is None or hook._target() is None)


def _inside_backward() -> bool:
    # The graph task is unknown to the compiler, which never runs a forward inside a backward.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _first_tensor(value: Any, least_dim: int = 1, needs_grad: bool = False) -> Tensor | None:
    """First tensor in nested containers that has enough dimensions (and a gradient to come)."""
    if isinstance(value, Tensor):
        fits = value.dim() >= least_dim and (value.requires_grad or not needs_grad)
        return value if fits else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            found = _first_tensor(item, least_dim, needs_grad)
            if found is not None:
                return found
    return None


def _watch_gradient(output: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call the hook with the gradient of an output, or of what it is a copy of in another precision.

    Trainers cast the outputs of a model to single precision, but a loss that the model has computed
    itself comes from the tensor before that.
    """
    if torch.compiler.is_compiling():
        output.register_hook(hook)
        return
    edge = get_gradient_edge(output)
    node, index = edge.node, edge.output_nr
    while node.name().startswith("ToCopyBackward"):
        source, index = node.next_functions[0]
        assert source is not None
        node = source
    node.register_prehook(partial(_pass_on, hook, index))


def _pass_on(hook: Callable[[Tensor], None], index: int, grads: tuple[Tensor | None, ...]) -> None:
    grad = grads[index]
    if grad is not None:
        hook(grad)


def _count_terms(seen: Pass, grad: Tensor) -> None:
    """Loss terms are the output positions that receive a gradient: masked ones receive none."""
    seen.terms = (grad.detach() != 0).any(-1).sum(dtype=count_dtype(grad.device))
