"""Which tensors an optimizer and its model have in common, and what happens if they are replaced.

``fully_shard``, ``to_empty`` and ``load_state_dict(assign=True)`` give a model new parameters. Where
sharding has to do with it, the optimizer is bound to them before the next forward, or before state is
loaded: each takes the place of the old one at the same position among the model's parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kronfac.capture.hooks import Hook
from kronfac.layers import Layer
from kronfac.layers.selection import plain_name, unwrap
from kronfac.layers.shards import (
    is_dtensor,
    named_parameters,
    place_like,
    sharded_places,
)
from kronfac.state.state_dict import PREFIX
from kronfac.step.pipeline import Preconditioner

#: Names of parameters.
Names = dict[nn.Parameter, str]


class Binding:
    """The parameters of a model, by name and position."""

    model: nn.Module
    base: Optimizer
    param_groups: list[dict[str, Any]]
    _preconditioner: Preconditioner
    #: The parameters that layers were bound to, by name, in the model's order.
    _bound: Names

    def __getstate__(self) -> dict[str, Any]:
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of model and base optimizer."""
        raise NotImplementedError

    def _names(self) -> Names:
        """Plain names of the model's and the base optimizer's parameters."""
        names = {p: plain_name(name) for name, p in named_parameters(unwrap(self.model))}
        for parameter, name in self._bound.items():  # if they are replaced, until that is noticed
            names.setdefault(parameter, name)
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                names.setdefault(parameter, f"group{number}.param{index}")
        return names

    def _names_and_shapes(self) -> tuple[list[list[str]], list[list[list[int]]]]:
        known = self._names()
        names = [[known[p] for p in group["params"]] for group in self.param_groups]
        shapes = [[list(p.shape) for p in group["params"]] for group in self.param_groups]
        return names, shapes

    def _own_entry(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What :meth:`state_dict` has of a parameter that is ours."""
        name = self._names().get(parameter, "")
        found = self._preconditioner.entries({parameter: name}).get(name, {})
        return {f"{PREFIX}{key}": value for key, value in found.items()}

    def _placed(self, saved: dict[str, Any]) -> dict[str, Any]:
        """State of a base optimizer with whole tensors, cut where its parameters are sharded."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        state = {
            index: {key: place_like(value, parameters[index]) for key, value in entry.items()}
            for index, entry in saved["state"].items()
        }
        return {**saved, "state": state}

    # --- parameters that are replaced -----------------------------------------------------------

    def _watch_binding(self) -> RemovableHandle:
        self._bound = self._names()
        hook = Hook(self._before_forward)
        return self.model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._bind_again():
            self._preconditioner.capture.open_forward(module, args, kwargs)

    def _before_loading(self) -> None:
        """Before state is loaded, or made by an empty step, which loaders do before any forward."""
        if self._preconditioner.capture.forward_seen:
            return
        for before, after in self._bind_again().items():
            if before.grad is not None and after.grad is None:
                after.grad = torch.zeros_like(after)  # as the empty step's own

    def _bind_again(self) -> dict[nn.Parameter, nn.Parameter]:
        """Look whether the model has other parameters by now, and be bound to them; by old ones."""
        preconditioner = self._preconditioner
        if preconditioner.detached or not any(map(self._is_replaced, preconditioner.watched())):
            return {}
        new = [p for _, p in named_parameters(unwrap(self.model))]
        old = list(self._bound)[: len(new)]
        if [p.shape for p in old] != [p.shape for p in new]:
            return {}  # the step will say so
        if preconditioner.coordinator.is_partial:
            preconditioner.consolidate()
        state = self.__getstate__()
        self._release()
        replaced = dict(zip(old, new, strict=True))
        self._replace(replaced)
        self.__setstate__(state)
        return replaced

    def _is_replaced(self, layer: Layer) -> bool:
        """Whether a layer's module has another parameter, and sharding has to do with it."""
        if layer.handle is not None:
            return layer.handle.sharded_param is not layer.weight
        if layer.uses(layer.module):
            return False
        found = getattr(layer.module, layer.weight_name, None)
        if not isinstance(found, nn.Parameter):
            return False  # torch.func.functional_call puts other tensors there for a while
        places = sharded_places(self.model)
        return (layer.module, layer.weight_name) in places or is_dtensor(found)

    def _replace(self, new: dict[nn.Parameter, nn.Parameter]) -> None:
        """Let the base optimizer have new parameters in place of those that it has, with their state."""
        state = self.base.state
        for group in self.param_groups:
            group["params"][:] = [new.get(p, p) for p in group["params"]]
        for before, after in new.items():
            if before is not after and before in state:
                state[after] = {k: place_like(v, after) for k, v in state.pop(before).items()}
