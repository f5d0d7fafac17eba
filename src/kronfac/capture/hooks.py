"""Hooks that come and go with their optimizer, and what they look at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.autograd.graph import get_gradient_edge


class Hook:
    """A hook that does not keep its optimizer alive.

    A model that is copied or unpickled, or whose optimizer is gone, carries it along without effect.
    ``traced`` is what a compiler sees instead; it knows the optimizer by number only.
    """

    def __init__(self, target: Any = None, *bound: Any, traced: Any = None) -> None:
        self._target = None if target is None else weakref.WeakMethod(target)
        self._bound = tuple(weakref.ref(value) for value in bound)
        self._traced = traced

    def __call__(self, *args: Any) -> Any:
        """Call the target, if it is still there."""
        if torch.compiler.is_compiling():
            if self._traced is None or torch.compiler.is_exporting():
                return None
            return self._traced(*args)
        target = None if self._target is None else self._target()
        bound = [value() for value in self._bound]
        if target is None or None in bound:
            return None
        return target(*bound, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def _run_hooks_as_they_are() -> None:
    """Keep compilers from making a graph of a hook alone; as part of a larger graph it is still traced.

    Around a compiled forward they would do that again for every hook, batch size and mode, up to their
    limit.
    """
    strategy = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
    )
    eval_frame.set_code_exec_strategy(Hook.__call__.__code__, strategy)


_run_hooks_as_they_are()


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
    return isinstance(hook, Hook) and (hook._target is None or hook._target() is None)


def first_tensor(value: Any, least_dim: int = 1, needs_grad: bool = False) -> Tensor | None:
    """First tensor in nested containers that has enough dimensions (and a gradient to come)."""
    if isinstance(value, Tensor):
        fits = value.dim() >= least_dim and (value.requires_grad or not needs_grad)
        return value if fits else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            found = first_tensor(item, least_dim, needs_grad)
            if found is not None:
                return found
    return None


class OutputView:
    """How the gradient of an output is read off that of :func:`source_of` the output."""

    def __init__(self, output: Tensor, source: Tensor) -> None:
        self._size, self._strides = output.size(), output.stride()
        self._offset = output.storage_offset() - source.storage_offset()
        self._source_strides = source.stride()
        dense = output.is_contiguous() and source.is_contiguous()
        self._whole = output is source or (dense and output.numel() == source.numel())

    def restore(self, grad: Tensor) -> Tensor:
        """The part of the source's gradient that belongs to the output, in the output's shape."""
        if self._whole:
            return grad.reshape(self._size)
        if grad.stride() != self._source_strides or grad.storage_offset():
            placed = torch.empty_strided(
                grad.size(), self._source_strides, dtype=grad.dtype, device=grad.device
            )
            grad = placed.copy_(grad)
        return grad.as_strided(self._size, self._strides, self._offset)


def source_of(output: Tensor) -> Tensor:
    """The tensor whose gradient holds that of an output even if the output is changed in place later.

    An in-place operation on a view (a linear layer's output on inputs of three dimensions is one)
    moves the view behind the operation: backward then passes through the base and leaves out the
    node that the view had before. So it is the base of a view.
    """
    base = output._base
    if base is None or base.grad_fn is None or base.dtype != output.dtype:
        return output
    return base


def watch_product(output: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call the hook with the gradient of an output, whatever happens to the output in place."""
    source = source_of(output)
    source.register_hook(partial(_restored, OutputView(output, source), hook))


def _restored(view: OutputView, hook: Callable[[Tensor], None], grad: Tensor) -> None:
    if not is_batched(grad):
        hook(view.restore(grad))


def watch_gradient(output: Tensor, hook: Callable[[Tensor | None], None]) -> None:
    """Call the hook with the gradient of an output, or of what it is a copy of in another precision.

    Trainers cast the outputs of a model to single precision, but a loss that the model has computed
    itself comes from the tensor before that.
    """
    source = source_of(output)
    edge = get_gradient_edge(source)
    node, index = edge.node, edge.output_nr
    while node.name().startswith("ToCopyBackward"):
        following, index = node.next_functions[0]
        assert following is not None
        node = following
    node.register_prehook(partial(_pass_on, OutputView(output, source), hook, index))


def _pass_on(
    view: OutputView,
    hook: Callable[[Tensor | None], None],
    index: int,
    grads: tuple[Tensor | None, ...],
) -> None:
    grad = grads[index]
    if grad is None or not is_batched(grad):
        hook(None if grad is None else view.restore(grad))


@contextmanager
def observing(device: torch.device) -> Iterator[None]:
    """Neither gradients nor autocast, also on devices that know no autocast."""
    kind = device.type
    with torch.no_grad():
        # Many are opened in a step, and most of the time of each would go into autocast.
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                yield
        else:
            yield


def is_batched(grad: Tensor) -> bool:
    """Whether this stands for many gradients at once (``is_grads_batched``), which is no loss's."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(grad) or functorch.is_batchedtensor(grad)


def inside_backward() -> bool:
    """Whether a backward pass is running: activation checkpointing repeats forwards in it."""
    return torch._C._current_graph_task_id() != -1


def inside_transform() -> bool:
    """Whether ``torch.func`` (vmap, grad, jacrev, ...) is running: its tensors must not get out."""
    return torch._C._functorch.peek_interpreter_stack() is not None
