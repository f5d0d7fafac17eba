"""Which layers are preconditioned, and why every other parameter is not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import UninitializedParameter

from kronfac.layers import Layer, find_layers
from kronfac.layers.parameter import ParameterLayer
from kronfac.layers.shards import handles, plain_type, sharded_forms
from kronfac.options.config import Pattern

#: Names under which wrappers hold the module that they wrap.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
#: Returns the reason why a layer is left out, or ``None``.
Refusal = Callable[[Layer], str | None]


def unwrap(model: nn.Module) -> nn.Module:
    """Remove wrappers such as DistributedDataParallel: no parameters of their own, one child."""
    while True:
        children = dict(model.named_children())
        inner = children.get("module", children.get("_orig_mod"))
        own = next(model.named_parameters(recurse=False), None)
        if inner is None or len(children) > 1 or own is not None:
            return model
        model = inner


def outermost(model: nn.Module) -> list[nn.Module]:
    """Return the model and, inside it, each module that holds all of its parameters.

    A trainer's module may never be called itself: its training step calls ``self.net``, which is then
    the outermost forward. Compiled modules are not searched.
    """
    found = [model]
    while next(model.named_parameters(recurse=False), None) is None:
        holders = [m for m in model.children() if next(m.parameters(), None) is not None]
        if len(holders) != 1 or hasattr(model, "_orig_mod"):
            break
        model = holders[0]
        found.append(model)
    return found


def plain_name(name: str) -> str:
    """Remove what ``torch.compile`` and ``checkpoint_wrapper`` add to the names of submodules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def matches(name: str, module: nn.Module, patterns: tuple[Pattern, ...]) -> bool:
    """Whether a module's name or type is among the patterns."""
    return any(
        fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(module, pattern)
        for pattern in patterns
    )


class Selection:
    """The layers of a model that are preconditioned, and the reasons for all other parameters.

    ``layers`` maps each layer to further modules that use the same weight; ``reasons`` maps names of
    parameters to half a sentence; ``notes`` maps names of layers to one. With ``all_lengths`` there is
    also a :class:`ParameterLayer` for each parameter that has no curvature, unless the user left it out.
    """

    def __init__(
        self,
        model: nn.Module,
        include: tuple[Pattern, ...],
        exclude: tuple[Pattern, ...],
        refuse: Refusal = lambda layer: None,
        all_lengths: bool = False,
    ) -> None:
        self.include, self.exclude, self.refuse = include, exclude, refuse
        self.all_lengths = all_lengths
        self.layers: dict[Layer, list[nn.Module]] = {}
        self.reasons: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._owners: dict[tuple[nn.Parameter, str], Layer] = {}
        model = unwrap(model)
        self._handles = handles(model)
        with sharded_forms(model):
            self._select(model)

    def _select(self, model: nn.Module) -> None:
        modules = [(plain_name(name), module) for name, module in model.named_modules()]
        for pattern in (*self.include, *self.exclude):
            if isinstance(pattern, str) and not any(
                fnmatchcase(name, pattern) for name, _ in modules
            ):
                raise ValueError(
                    f"the pattern {pattern!r} in include or exclude matches no module; names look "
                    f"like {modules[-1][0]!r}."
                )
        for name, module in modules:
            self._consider(name, module)
        taken = {p for layer in self.layers for p in (layer.weight, layer.bias) if p is not None}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            name = plain_name(name)
            if parameter in taken and self.reasons.pop(name, None) is not None:
                self._note_other_role(name, parameter)
        if self.all_lengths:
            beside, by_name = self._beside_frozen(), dict(modules)
            taken -= set(beside)
            for name, module in modules:
                self._take_parameters(name, module, taken, beside, by_name)

    def _beside_frozen(self) -> dict[nn.Parameter, tuple[nn.Parameter, ...]]:
        """Biases of which all weights are frozen, with these."""
        weights: dict[nn.Parameter, list[nn.Parameter]] = {}
        for layer in self.layers:
            if layer.bias is not None:
                weights.setdefault(layer.bias, []).append(layer.weight)
        return {
            bias: tuple(own)
            for bias, own in weights.items()
            if not any(weight.requires_grad for weight in own)
        }

    def _take_parameters(
        self,
        name: str,
        module: nn.Module,
        taken: Collection[nn.Parameter],
        beside: Mapping[nn.Parameter, tuple[nn.Parameter, ...]],
        modules: Mapping[str, nn.Module],
    ) -> None:
        """Select those of a module's own parameters that have no layer, for their length alone.

        Biases ``beside`` weights have one as soon as one of these is trained. What a parametrized module
        is made of belongs to that.
        """
        host_name, _, inner = name.partition(".parametrizations.")
        host = modules[host_name] if inner else module
        if self._is_left_out(name, module) or self._is_left_out(host_name, host):
            return
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return  # its gradients are not matrices
        for own, parameter in module.named_parameters(recurse=False):
            lazy = isinstance(parameter, UninitializedParameter)
            known = parameter in taken or (parameter, "") in self._owners
            if known or lazy or parameter.is_complex() or not parameter.numel():
                continue
            full_name = f"{name}.{own}" if name else own
            role = inner or own
            layer = ParameterLayer(full_name, module, own, host, role, beside.get(parameter, ()))
            layer.handle = self._handles.get(parameter)
            self._owners[layer.key] = layer
            self.layers[layer] = []

    def _consider(self, name: str, module: nn.Module) -> None:
        found = self._layers_or_reason(name, module)
        used: set[nn.Parameter] = set()
        reason = (
            found
            if isinstance(found, str)
            else f"{plain_type(module).__name__} does not multiply by it"
        )
        for layer in [] if isinstance(found, str) else found:
            obstacle = self._take(layer, module)
            if obstacle is None:
                used.update(p for p in (layer.weight, layer.bias) if p is not None)
            else:
                reason = obstacle
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            if parameter not in used:
                self.reasons[parameter_name] = reason

    def _take(self, layer: Layer, module: nn.Module) -> str | None:
        """Select a layer, or say why not."""
        layer.handle = self._handles.get(layer.weight)
        obstacle = self.refuse(layer)
        if obstacle is not None:
            return obstacle
        owner = self._owners.get(layer.key)
        if owner is not None and type(owner) is type(layer) and owner.bias is layer.bias:
            if owner.geometry == layer.geometry:
                self.layers[owner].append(module)
                return None
            return f"its weight is that of {owner.name!r}, whose rows are formed differently"
        if owner is not None and (layer.picks_columns or not owner.picks_columns):
            return f"its weight is that of {owner.name!r}"
        if owner is not None:  # an embedding tied to a matrix: the matrix provides the curvature
            del self.layers[owner]
            self.reasons[f"{owner.name}.{owner.weight_name}"] = "tied"
        self._owners[layer.key] = layer
        self.layers[layer] = []
        return None

    def _note_other_role(self, name: str, parameter: nn.Parameter) -> None:
        """Say that a weight is used elsewhere in a way whose curvature is not observed."""
        for owner in self.layers:
            if owner.weight is parameter:
                self.notes[owner.name] = f"also used as {name}, which is not observed"

    def _layers_or_reason(self, name: str, module: nn.Module) -> list[Layer] | str:
        return self._is_left_out(name, module) or find_layers(name, module)

    def _is_left_out(self, name: str, module: nn.Module) -> str | None:
        """Why the user's own patterns leave a module out, if they do."""
        if self.include and not matches(name, module, self.include):
            return "not in include"
        return "in exclude" if matches(name, module, self.exclude) else None
