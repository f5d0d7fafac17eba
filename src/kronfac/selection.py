"""Which layers are preconditioned, and why every other parameter is not."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from kronfac.config import Pattern
from kronfac.layers import Layer, find_layer

_WRAPPERS = ("module", "_orig_mod")


def plain_name(name: str) -> str:
    """Remove what DistributedDataParallel and ``torch.compile`` put into names."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def matches(name: str, module: nn.Module, patterns: tuple[Pattern, ...]) -> bool:
    """Whether a module's name or type is among the patterns."""
    return any(
        fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(module, pattern)
        for pattern in patterns
    )


class Selection:
    """The layers of a model that can and shall be preconditioned, and reasons for the rest.

    ``layers`` maps each layer to further modules that use the same weight; ``reasons`` maps names of
    parameters to half a sentence.
    """

    def __init__(
        self, model: nn.Module, include: tuple[Pattern, ...], exclude: tuple[Pattern, ...]
    ) -> None:
        self.include, self.exclude = include, exclude
        self.layers: dict[Layer, list[nn.Module]] = {}
        self.reasons: dict[str, str] = {}
        owners: dict[nn.Parameter, Layer] = {}
        taken: set[nn.Parameter] = set()
        for name, module in model.named_modules():
            self._consider(plain_name(name), module, owners, taken)
        for name, parameter in _own_parameters(model):
            if parameter in taken:
                self.reasons.pop(name, None)

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

    def _layer_or_reason(self, name: str, module: nn.Module) -> Layer | str:
        if self.include and not matches(name, module, self.include):
            return "not in include"
        if matches(name, module, self.exclude):
            return "in exclude"
        return find_layer(name, module)


def _own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter
