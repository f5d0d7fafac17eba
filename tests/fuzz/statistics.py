"""What the passes of one step add to the means of a layer, as docs/conventions.md defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fuzz import rows
from tests.fuzz.cases import Case
from tests.fuzz.layers import Layer

#: Rows ``[*b, R, d]`` of each use and each draw; ``None`` where no gradient arrived.
Sides = list[list[Tensor | None]]


def fold(case: Case, layer: Layer, passes: list[rows.SeenPass]) -> None:
    """Let the past fade and add what a step has shown."""
    layer.A.decay(case.options["decay"])
    layer.G.decay(case.options["decay"])
    normalizer = Normalizer(case, passes)
    seen = [(one, one.of(layer.names)) for one in passes if one.of(layer.names)]
    outputs = []
    for one, uses in seen:
        if layer.kind == "norm":
            outputs.append((one, *_norm_side(layer, one, uses)))
        elif layer.kind == "embedding":
            outputs.append((one, _token_sides(layer, one, uses), False))
        else:
            outputs.append((one, *_matrix_sides(case, layer, one, uses)))
    if any(one.broadcasts(uses) for one, uses in seen):
        outputs = [_added_up(outputs)]
    for one, sides, grouped in outputs:
        total = _scatter(sides, grouped)
        if total is not None:
            layer.G.add(total * one.share * normalizer.scale, normalizer.count(one))


class Normalizer:
    """N of a step, and the part of it that a pass counts."""

    def __init__(self, case: Case, passes: list[rows.SeenPass]) -> None:
        self.average = case.options["loss_average"]
        self.total = sum(self.weight(one) for one in passes)
        N = {"batch": self.total, "token": self.total, None: 1.0}.get(self.average, self.average)
        self.scale = N**2 if case.options["fisher"] == "empirical" else 1.0
        self.per_weight = N / self.total

    def weight(self, seen: rows.SeenPass) -> float:
        return float(seen.terms if self.average == "token" else seen.samples)

    def count(self, seen: rows.SeenPass) -> float:
        return self.weight(seen) * self.per_weight


# --- the two sides of a pass -----------------------------------------------------------------


def _matrix_sides(
    case: Case, layer: Layer, seen: rows.SeenPass, uses: list[rows.Use]
) -> tuple[Sides, bool]:
    """Add the inputs; return the output side and whether the uses of a sample add up."""
    found = [rows.matrix_rows(use, layer.has_bias) for use in uses]
    samples = {a.shape[-3] for a, _ in found}
    reduces = case.options["sharing"] == "reduce" and samples == {seen.samples}
    if reduces:
        inputs = [torch.cat([a for a, _ in found], -2).mean(-2)]
    else:
        inputs = [a.flatten(-3, -2) for a, _ in found]
    for a in inputs:
        _add_input(layer, a, seen, uses)

    def side(g: Tensor | None) -> Tensor | None:
        if g is None:
            return None
        return g.sum(-2) if reduces else g.flatten(-3, -2)

    return [[side(g) for g in grads] for _, grads in found], reduces


def _add_input(layer: Layer, a: Tensor, seen: rows.SeenPass, uses: list[rows.Use]) -> None:
    """Add rows ``[*b, R, d]``; an input that serves all samples is a row of each of them."""
    times = seen.samples if seen.broadcasts(uses) else 1
    layer.A.add(_gram(a) * times, a.shape[-2] * times)


def _token_sides(layer: Layer, seen: rows.SeenPass, uses: list[rows.Use]) -> Sides:
    found = [rows.token_rows(use, layer.weight.shape[0]) for use in uses]
    for a, _ in found:
        _add_input(layer, a, seen, uses)
        now, before = a.any(0), layer.seen_tokens
        layer.seen_tokens = now if before is None else before | now
    return [grads for _, grads in found]


def _norm_side(layer: Layer, seen: rows.SeenPass, uses: list[rows.Use]) -> tuple[Sides, bool]:
    """Rows are samples, or single positions where dimension 0 is not that of samples."""
    grouped = all(len(use.x) in (1, seen.samples) for use in uses)
    found = [rows.norm_rows(use, layer.has_bias, grouped) for use in uses]
    sides: Sides = [[None if u is None else u.movedim(0, 1) for u in draws] for draws in found]
    return sides, grouped


def _added_up(
    outputs: list[tuple[rows.SeenPass, Sides, bool]],
) -> tuple[rows.SeenPass, Sides, bool]:
    """Inputs that are broadcast over the batch: the gradient of the whole step is one row."""
    first = outputs[0][0]
    samples, terms = (sum(getattr(one, n) for one, *_ in outputs) for n in ("samples", "terms"))
    whole = rows.SeenPass(samples, terms, {}, first.share)
    uses = []
    for of_use in zip(*(sides for _, sides, _ in outputs), strict=True):
        uses.append([_sum(draw) for draw in zip(*of_use, strict=True)])
    return whole, uses, False


# --- sums ------------------------------------------------------------------------------------


def _scatter(sides: Sides, grouped: bool) -> Tensor | None:
    """``Σ g gᵀ`` over uses, rows and draws; uses that belong to the same samples add up before."""
    total: Tensor | None = None
    for draw in zip(*sides, strict=True):
        found = [g for g in draw if g is not None]
        for g in [_sum(found)] if grouped and found else found:
            total = _gram(g) if total is None else total + _gram(g)
    return total


def _sum(tensors: tuple[Tensor | None, ...] | list[Tensor | None] | list[Tensor]) -> Tensor | None:
    found = [one for one in tensors if one is not None]
    return torch.stack(found).sum(0) if found else None


def _gram(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.mT @ x
