"""The rows that a linear layer's gradient is the sum of, held until the step.

``V = Σ g aᵀ`` is followed on its way: the node of the product shows g and what it makes of it, the node
that adds to ``.grad`` shows what arrives there, and the step what is there at last. A tensor is known by
its storage and version. So it is certain that ``.grad`` holds these products and nothing else: a weight
that is used twice, a penalty, a hook that changes gradients, clipping, and gradients of unknown origin
are all noticed. (What is written through ``.grad.data`` has no version; neither does autograd see it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from kronfac.capture.hooks import (
    Hook,
    inside_backward,
    inside_transform,
    is_batched,
)
from kronfac.layers import Layer
from kronfac.layers.linear import LinearLayer
from kronfac.layers.saved_tensors import saves_elsewhere

_VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
_PRODUCTS = ("AddmmBackward0", "MmBackward0")


@dataclass(frozen=True)
class _Mark:
    """The contents of a tensor that is not kept alive."""

    storage: StorageWeakRef
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Mark:
        return cls(StorageWeakRef(tensor.untyped_storage()), tensor._version)

    def fits(self, tensor: Tensor | None) -> bool:
        if tensor is None or tensor._version != self.version:
            return False
        return bool(tensor.untyped_storage()._cdata == self.storage.cdata)


@dataclass(frozen=True, eq=False)
class _Product:
    """One product in one backward pass: its rows, and what it adds to each parameter's gradient."""

    outputs: Tensor
    inputs: Tensor
    versions: tuple[int, int]
    adds: dict[nn.Parameter, _Mark]

    @property
    def unchanged(self) -> bool:
        return self.versions == (self.outputs._version, self.inputs._version)


@dataclass(frozen=True)
class _Sum:
    """What a parameter's ``.grad`` is known to be: the products that it is the sum of."""

    mark: _Mark
    products: tuple[_Product, ...]


class GradientRows:
    """Follows the gradient of one layer; at most ``limit`` rows are held."""

    def __init__(self, layer: Layer, limit: int) -> None:
        self.layer = layer
        self.limit = limit
        #: Rows of the gradient so far, held or not.
        self.seen = 0
        self._latest: _Product | None = None
        self._sums: dict[nn.Parameter, _Sum] = {}
        self._forward_hook: RemovableHandle | None = None
        #: The nodes that add to gradients, which live as long as somebody holds them.
        self._adding: dict[nn.Parameter, tuple[Any, RemovableHandle]] = {}

    def attach(self) -> None:
        """Watch the module from its next forward on."""
        if self._forward_hook is None:
            hook = Hook(self._forward)
            self._forward_hook = self.layer.module.register_forward_hook(
                hook, prepend=True, with_kwargs=True
            )

    def detach(self) -> None:
        """Watch it no longer."""
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None
        for _, handle in self._adding.values():
            handle.remove()
        self._adding.clear()
        self.clear()

    def clear(self) -> None:
        """Forget the rows of a step."""
        self.seen = 0
        self._latest = None
        self._sums.clear()

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """Rows ``g: [R, d_out]`` and ``a: [R, d_in]`` of the gradient, if it is the sum of theirs."""
        found: tuple[_Product, ...] | None = None
        for parameter in self.layer.parameters:
            known = self._sums.get(parameter)
            if known is None or not known.mark.fits(parameter.grad):
                return None
            if found is not None and found != known.products:
                return None
            found = known.products
        if not found or not all(one.unchanged for one in found):
            return None
        outputs = [one.outputs for one in found]
        inputs = [self._input_rows(one.inputs) for one in found]
        return _together(outputs), _together(inputs)

    def _input_rows(self, inputs: Tensor) -> Tensor:
        rows = self.layer.inputs((inputs,))
        assert rows is not None
        return rows.dense().flatten(0, -2)

    # --- forward --------------------------------------------------------------------------------

    def _forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not torch.is_grad_enabled() or inside_transform() or inside_backward():
            return
        inputs: Any = args[0] if args else kwargs.get("input")
        if not _is_plain(module, inputs, output, self.layer.factor_dtype) or saves_elsewhere():
            return
        nodes = _nodes(output, self.layer.parameters)
        if nodes is None:
            return
        product, adding = nodes
        for parameter, node in adding.items():
            self._watch_adding(parameter, node)
        held = inputs.detach()
        product.register_hook(partial(self._multiplied, [(held, held._version)]))

    def _watch_adding(self, parameter: nn.Parameter, node: Any) -> None:
        known = self._adding.get(parameter)
        if known is not None and known[0] is node:
            return
        if known is not None:
            known[1].remove()
        weight = parameter is self.layer.weight
        hook = Hook(self._adds_to_weight if weight else self._adds_to_bias)
        self._adding[parameter] = (node, node.register_prehook(hook))

    # --- backward -------------------------------------------------------------------------------

    def _multiplied(
        self,
        held: list[tuple[Tensor, int]],
        found: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
    ) -> None:
        """The product has made gradients of its bias and weight, first and last, out of its own."""
        self._latest, grad = None, grads[0]
        if not held or grad is None or found[-1] is None or is_batched(grad):
            return
        inputs, version = held[0]
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            held.clear()  # the graph, and this hook with it, may live on
        if self.layer.weight.grad is None:
            self.seen = 0
        self.seen += len(grad)
        if self.seen > self.limit or inputs._version != version:
            return
        made = dict(zip(self.layer.parameters, (found[-1], found[0]), strict=False))
        adds = {parameter: _Mark.of(one) for parameter, one in made.items() if one is not None}
        outputs = grad.detach()
        self._latest = _Product(outputs, inputs, (outputs._version, version), adds)

    def _adds_to_weight(self, grads: Sequence[Tensor | None]) -> None:
        self._add(self.layer.weight, grads[0])

    def _adds_to_bias(self, grads: Sequence[Tensor | None]) -> None:
        if self.layer.bias is not None:
            self._add(self.layer.bias, grads[0])

    def _add(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Something is about to be added to a parameter's gradient."""
        if grad is None:
            return
        known, latest, before = self._sums.pop(parameter, None), self._latest, parameter.grad
        mark = None if latest is None else latest.adds.get(parameter)
        if latest is None or mark is None or not mark.fits(grad):
            return
        if before is None:
            self._sums[parameter] = _Sum(mark, (latest,))
        elif known is not None and known.mark.fits(before):
            after = _Mark(known.mark.storage, before._version + 1)
            self._sums[parameter] = _Sum(after, (*known.products, latest))


def can_follow(layer: Layer) -> bool:
    """Whether a layer's gradient is that of one ``torch.nn.Linear`` that is whole on this rank."""
    weight = layer.weight
    kind = type(layer) is LinearLayer and not layer.part and layer.handle is None
    return kind and type(weight) is nn.Parameter and weight.dtype == layer.factor_dtype


def _is_plain(module: nn.Module, inputs: Any, output: Any, dtype: torch.dtype) -> bool:
    """Whether this call was ``x Wᵀ + b`` in the precision of the weight."""
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        return False
    if type(output) is not Tensor or not isinstance(inputs, Tensor) or inputs.dim() < 2:
        return False
    return bool(inputs.dtype == output.dtype == dtype)


def _nodes(
    output: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Any, dict[nn.Parameter, Any]] | None:
    """The node of a product, and those that add to the gradients of its weight and bias."""
    node: Any = output.grad_fn
    if node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() not in _PRODUCTS:
        return None
    edges = [edge for edge, _ in node.next_functions]
    turned = edges[-1]
    if turned is None or turned.name() != "TBackward0":
        return None
    found = (turned.next_functions[0][0], edges[0])
    adding = dict(zip(parameters, found, strict=False))
    if any(getattr(one, "variable", None) is not p for p, one in adding.items()):
        return None
    return node, adding


def _together(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)
