"""Hooks that come and go with their optimizer, and what they look at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
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

    Around a compiled forward they would do that anew for every hook, batch size and mode, up to their
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


def watch_gradient(output: Tensor, hook: Callable[[Tensor | None], None]) -> None:
    """Call the hook with the gradient of an output, or of what it is a copy of in another precision.

    Trainers cast the outputs of a model to single precision, but a loss that the model has computed
    itself comes from the tensor before that.
    """
    edge = get_gradient_edge(output)
    node, index = edge.node, edge.output_nr
    while node.name().startswith("ToCopyBackward"):
        source, index = node.next_functions[0]
        assert source is not None
        node = source
    node.register_prehook(partial(_pass_on, hook, index))


def _pass_on(
    hook: Callable[[Tensor | None], None], index: int, grads: tuple[Tensor | None, ...]
) -> None:
    grad = grads[index]
    if grad is None or not is_batched(grad):
        hook(grad)


def is_batched(grad: Tensor) -> bool:
    """Whether this stands for many gradients at once (``is_grads_batched``), which is no loss's."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(grad) or functorch.is_batchedtensor(grad)
