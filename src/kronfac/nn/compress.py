"""Replace trained layers by the nearest Kronecker layers of a given size; fine-tune afterwards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from kronfac.nn.linear import KroneckerLinear
from kronfac.nn.nearest import Shapes, all_shapes, num_parameters, relative_error
from kronfac.nn.recurrent import LayerShapes, check_plain, counterpart

#: So many of the largest products within the budget are tried; the nearest is taken.
TRIED = 6


def compress(
    module: nn.Module,
    factor: float = 16.0,
    *,
    include: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
) -> nn.Module:
    """A copy of a model whose linear and recurrent layers have at most ``1/factor`` of their weights.

    Each matrix becomes the nearest Kronecker product ``B ⊗ C``; of the shapes within the budget those are
    tried that leave the most parameters, and the one with the least error is taken. Matrices that no
    shapes make small enough stay as they are. Fine-tune the copy afterwards.

    Args:
        module: the trained model; it is not changed.
        factor: how many times fewer entries each matrix has.
        include: name patterns of modules, such as ``"encoder.*"``.
        exclude: patterns of those to leave alone, usually the head.
    """
    if not factor > 1:
        raise ValueError(
            f"factor={factor!r} must be a number above 1: 16 leaves a sixteenth, for example."
        )
    taken, left = _patterns(include), _patterns(exclude)
    if isinstance(module, nn.Linear | nn.RNNBase):
        return _replacement(module, factor) or copy.deepcopy(module)
    found = copy.deepcopy(module)
    inside = {
        id(one)
        for m in found.modules()
        if isinstance(m, nn.MultiheadAttention)
        for one in m.modules()
    }  # fmt: skip - attention computes with its weights itself
    for name, one in list(found.named_modules()):
        wanted = _matches(name, taken) and not _matches(name, left) and id(one) not in inside
        if wanted and isinstance(one, nn.Linear | nn.RNNBase):
            other = _replacement(one, factor)
            if other is not None:
                found.set_submodule(name, other)
    return found


def choose_shapes(weight: Tensor, factor: float) -> Shapes | None:
    """Of the shapes with at most ``1/factor`` of the entries, the nearest of the largest ones."""
    budget = weight.numel() / factor
    fitting = [one for one in all_shapes(*weight.shape) if num_parameters(one) <= budget]
    largest = sorted(fitting, key=num_parameters, reverse=True)[:TRIED]
    return min(largest, key=lambda one: float(relative_error(weight, one)), default=None)


def _replacement(layer: nn.Linear | nn.RNNBase, factor: float) -> nn.Module | None:
    if isinstance(layer, nn.Linear):
        shapes = choose_shapes(layer.weight, factor)
        return None if shapes is None else KroneckerLinear.nearest(layer, shapes)
    check_plain(layer)
    pairs: list[LayerShapes] = []
    for number in range(layer.num_layers):
        weights = (getattr(layer, f"weight_{kind}_l{number}") for kind in ("ih", "hh"))
        first, second = (choose_shapes(weight, factor) for weight in weights)
        pairs.append((first, second))
    if any(one is None for pair in pairs for one in pair):
        return None
    return counterpart(layer).nearest(layer, pairs)


def _patterns(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, one) for one in patterns)
