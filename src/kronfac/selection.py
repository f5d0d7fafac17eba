"""Which layers are preconditioned, and why every other parameter is not."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from kronfac.config import Pattern
from kronfac.layers import Layer, find_layer


def unwrap(model: nn.Module) -> nn.Module:
    """Step through wrappers such as DistributedDataParallel: nothing of their own, one child."""
    while True:
        children = dict(model.named_children())
        inner = children.get("module", children.get("_orig_mod"))
        own = next(model.named_parameters(recurse=False), None)
        if inner is None or len(children) > 1 or own is not None:
            return model
        model = inner


def outermost(model: nn.Module) -> list[nn.Module]:
    """Return the model and, inside it, each module that holds all of its parameters.

    A trainer's module may never be called itself: its training step calls ``self.net``, which then is
    the outermost forward. The inside of a compiled module is left alone.
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
    """Remove what ``torch.compile`` puts into the names of compiled submodules."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def matches(name: str, module: nn.Module, patterns: tuple[Pattern, ...]) -> bool:
    """Whether a module's name or type is among the patterns."""
    return any(
        fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(module, pattern)
        for pattern in patterns
    )


class Selection:
    """The layers of a model that can and shall be preconditioned, and reasons for the rest.

    ``layers`` maps each layer to further modules that use the same weight; ``reasons`` maps names of
    parameters to half a sentence; ``notes`` maps names of layers to one.
    """

    def __init__(
        self, model: nn.Module, include: tuple[Pattern, ...], exclude: tuple[Pattern, ...]
    ) -> None:
        self.include, self.exclude = include, exclude
        self.layers: dict[Layer, list[nn.Module]] = {}
        self.reasons: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        owners: dict[nn.Parameter, Layer] = {}
        taken: set[nn.Parameter] = set()
        model = unwrap(model)
        modules = [(plain_name(name), module) for name, module in model.named_modules()]
        for pattern in (*include, *exclude):
            if isinstance(pattern, str) and not any(
                fnmatchcase(name, pattern) for name, _ in modules
            ):
                raise ValueError(
                    f"the pattern {pattern!r} in include or exclude matches no module; names look "
                    f"like {modules[-1][0]!r}."
                )
        for name, module in modules:
            self._consider(name, module, owners, taken)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            name = plain_name(name)
            if parameter in taken and self.reasons.pop(name, None) is not None:
                self._note_other_role(name, owners, parameter)

    def _consider(
        self,
        name: str,
        module: nn.Module,
        owners: dict[nn.Parameter, Layer],
        taken: set[nn.Parameter],
    ) -> None:
        found = self._layer_or_reason(name, module)
        if isinstance(found, Layer):
            owner = owners.setdefault(found.weight, found)
            if owner is found:
                self.layers[found] = []
                taken.update(p for p in (found.weight, found.bias) if p is not None)
                return
            if owner.kind == found.kind and owner.bias is found.bias:
                self.layers[owner].append(module)
                return
            found = f"its weight is that of {owner.name!r}"
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            if parameter not in taken:
                self.reasons[parameter_name] = found

    def _note_other_role(
        self, name: str, owners: dict[nn.Parameter, Layer], parameter: nn.Parameter
    ) -> None:
        """Say that a weight is used elsewhere in a way whose curvature is not observed."""
        if parameter in owners:
            self.notes[owners[parameter].name] = f"also used as {name}, which is not observed"

    def _layer_or_reason(self, name: str, module: nn.Module) -> Layer | str:
        if self.include and not matches(name, module, self.include):
            return "not in include"
        if matches(name, module, self.exclude):
            return "in exclude"
        return find_layer(name, module)
