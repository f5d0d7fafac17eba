"""Replace trained layers by the nearest Kronecker layers of a given size; fine-tune afterwards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from kronfac.nn.linear import KroneckerLinear
from kronfac.nn.nearest import (
    Shapes,
    all_shapes,
    full_rank,
    most_terms,
    num_parameters,
    relative_error,
)
from kronfac.nn.recurrent import LayerShapes, check_plain, counterpart

#: Shapes, and how many products of them are added.
Sum = tuple[Shapes, int]
#: So many of the largest sums within the budget are tried; the nearest is taken.
TRIED = 6


def compress(
    module: nn.Module,
    factor: float = 16.0,
    *,
    terms: int = 4,
    include: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
) -> nn.Module:
    """A copy of a model whose linear and recurrent layers have at most ``1/factor`` of their weights.

    Each matrix becomes the nearest sum of Kronecker products ``B_t ⊗ C_t`` of the highest rank that the
    budget allows: thin factors are nearer to a trained matrix, and learn less afterwards. Of the
    shapes those are tried that leave the most parameters, and the one with the least error is taken.
    Matrices that no shapes make small enough stay as they are. Fine-tune the copy afterwards.

    Args:
        module: the trained model; it is not changed.
        factor: how many times fewer entries the matrices of each layer have. The two of a recurrent layer
            share what is left evenly, whatever their sizes.
        terms: at most so many products are added. One is the fastest; more come closer to the size
            that was asked for.
        include: name patterns of modules, such as ``"encoder.*"``.
        exclude: patterns of those to leave alone, usually the head.
    """
    if not factor > 1:
        raise ValueError(
            f"factor={factor!r} must be a number above 1: 16 leaves a sixteenth, for example."
        )
    if isinstance(terms, bool) or not isinstance(terms, int) or terms < 1:
        raise ValueError(f"terms={terms!r} must be a whole number from 1; 4 is the default.")
    taken, left = _patterns(include), _patterns(exclude)
    if isinstance(module, nn.Linear | nn.RNNBase):
        return _replacement(module, factor, terms) or copy.deepcopy(module)
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
            other = _replacement(one, factor, terms)
            if other is not None:
                found.set_submodule(name, other)
    return found


def choose_shapes(weight: Tensor, budget: float, terms: int) -> Sum | None:
    """Shapes of the highest rank with at most so many entries, and how many products of them."""
    fitting = [one for one in all_shapes(*weight.shape) if num_parameters(one) <= budget]
    highest = max(map(full_rank, fitting), default=0)
    sums = [
        (one, min(terms, int(budget // num_parameters(one)), most_terms(one)))
        for one in fitting
        if full_rank(one) == highest
    ]
    largest = sorted(sums, key=_entries, reverse=True)[:TRIED]
    return min(largest, key=lambda one: float(relative_error(weight, *one)), default=None)


def choose_pair(weights: tuple[Tensor, Tensor], factor: float, terms: int) -> list[Sum] | None:
    """Shapes for the two matrices of a recurrent layer, which share the entries evenly.

    The smaller has at most half of its own entries, and the larger has what the smaller leaves.
    """
    left = sum(weight.numel() for weight in weights) / factor
    found: dict[int, Sum] = {}
    for place in sorted((0, 1), key=lambda one: weights[one].numel()):
        share = left if found else min(left, weights[place].numel()) / 2
        one = choose_shapes(weights[place], share, terms)
        if one is None:
            return None
        found[place] = one
        left -= _entries(one)
    return [found[0], found[1]]


def _entries(one: Sum) -> int:
    shapes, terms = one
    return terms * num_parameters(shapes)


def _replacement(layer: nn.Linear | nn.RNNBase, factor: float, terms: int) -> nn.Module | None:
    if isinstance(layer, nn.Linear):
        chosen = choose_shapes(layer.weight, layer.weight.numel() / factor, terms)
        return None if chosen is None else KroneckerLinear.nearest(layer, *chosen)
    check_plain(layer)
    pairs = []
    for number in range(layer.num_layers):
        weights = tuple(getattr(layer, f"weight_{kind}_l{number}") for kind in ("ih", "hh"))
        pair = choose_pair(weights, factor, terms)
        if pair is None:
            return None
        pairs.append(pair)
    shapes: list[LayerShapes] = [(a[0], b[0]) for a, b in pairs]
    return counterpart(layer).nearest(layer, shapes, [(a[1], b[1]) for a, b in pairs])


def _patterns(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, one) for one in patterns)
