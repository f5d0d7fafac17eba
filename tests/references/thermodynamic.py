"""Thermodynamic K-FAC slowly: a process that goes from state to state, and dense matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def function_of(matrix: Tensor, function: object) -> Tensor:
    """`f(M)` of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(function(values)) @ vectors.T  # type: ignore[operator]


def walk(M: Tensor, kicks: Tensor, spacing: float, burn_in: float) -> Tensor:
    """States of `dx = -Mx dt + N(0, 2 dt)` from zero, one after the other, in units of `1/λ_min`.

    `x ← e^{-Mt} x + (M⁻¹(1 - e^{-2Mt}))^½ z` for each normal z.
    """
    M = M / torch.linalg.eigvalsh(M)[0]
    decay = torch.matrix_exp(-M * spacing)
    root, first = (
        function_of(M, lambda m, t=t: ((1 - (-2 * m * t).exp()) / m).sqrt())
        for t in (spacing, burn_in)
    )
    states = [first @ kicks[0]]
    for z in kicks[1:]:
        states.append(decay @ states[-1] + root @ z)
    return torch.stack(states)


def round_entries(matrix: Tensor, bits: int) -> Tensor:
    """Each entry to the nearest of `2^bits - 1` levels between ± the largest magnitude."""
    largest, levels = float(matrix.abs().max()), 2 ** (bits - 1) - 1
    return torch.tensor(
        [[round(float(x) / largest * levels) * largest / levels for x in row] for row in matrix],
        dtype=matrix.dtype,
    )


def solve_systems(A: Tensor, G: Tensor, V: Tensor, bits: int) -> Tensor:
    """`Gy = v` for the columns of V, then `Ax = y` for the rows, with converters on all sides."""
    for M, transposed in ((G, False), (A, True)):
        right = round_entries(V.T if transposed else V, bits)
        held = round_entries(M, bits)
        V = round_entries(torch.linalg.solve(held, right), bits)
        V = V.T if transposed else V
    return V
