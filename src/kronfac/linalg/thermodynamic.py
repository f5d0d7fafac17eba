"""A thermodynamic computer, simulated: an Ornstein-Uhlenbeck process that inverts matrices by its noise.

A network of noisy linear elements relaxes by ``dx = -(Mx - b) dt + N(0, 2κ dt)`` with ``M`` positive
definite and ``κ`` the temperature. At rest ``x ~ N(M⁻¹b, κM⁻¹)``: without ``b`` the covariance of its
states is the inverse, and with it their mean over time solves ``Mx = b``.

Nothing is integrated in small steps. The process is Gaussian and its transitions are known,

    ``x(t) | x(0) ~ N(M⁻¹b + e^{-Mt}(x(0) - M⁻¹b), κM⁻¹(1 - e^{-2Mt}))``,

so that states and time averages are drawn from their exact distributions. For that the matrix is
decomposed, which a device would not need. Random numbers are drawn in the coordinates of the matrix and
turned into its eigenbasis, so that everything is a continuous function of the matrix, however its
eigenvalues coincide. The unit of time is the relaxation time ``1/λ_min`` of the slowest direction, and
``m = λ/λ_min`` is the rate of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kronfac.linalg.solve import eigen

#: States that are drawn at once; converters have one range for all of them.
CHUNK = 1024
#: Correlations ``e^{-n}`` beyond this n are below rounding.
_FORGOTTEN = 40.0


def quantise(values: Tensor, bits: int | None) -> Tensor:
    """Round to signed whole multiples of ``Δ = max|x|/(2^(bits-1) - 1)``, one range for each matrix.

    The error is at most ``Δ/2``. Zero and both ends of the range are among the levels: with the other
    usual step, ``2·max|x|/(2^bits - 1)``, the largest entry lies half way between two of them.
    """
    if bits is None:
        return values
    step = values.abs().amax((-2, -1), keepdim=True) / (2 ** (bits - 1) - 1)
    rounded = (values / step.where(step > 0, 1.0)).round() * step
    return torch.where(step > 0, rounded, values)


def normal_like(values: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of the shape of a tensor, the same on every device."""
    return torch.randn(values.shape, dtype=values.dtype, generator=generator).to(values.device)


def _full_scale(values: Tensor) -> Tensor:
    return values.abs().amax((-2, -1), keepdim=True)


def upload(
    matrix: Tensor,
    floor: Tensor,
    *,
    bits: int | None,
    noise: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor] | None:
    """Eigenvectors and eigenvalues of what a device makes of positive definite matrices ``[*b, d, d]``.

    Entries are converted, each gets an error of ``noise`` times the largest of them, and the result is
    symmetric. Since it need not be definite, and the device would run away, eigenvalues are raised to
    ``floor: [*b]``, below which those of ``matrix`` are known not to be. That is the nearest matrix with
    such eigenvalues, and never further from ``matrix`` than before, as these form a convex set.
    """
    found = quantise(matrix, bits)
    if noise:
        errors = normal_like(matrix, generator).tril()
        found = found + noise * _full_scale(matrix) * (errors + errors.tril(-1).mT)
    solved = eigen((found + found.mT) / 2)
    if solved is None:
        return None
    vectors, values = solved
    return vectors, torch.maximum(values, floor[..., None])


def states(
    vectors: Tensor,
    values: Tensor,
    count: int,
    *,
    spacing: float,
    burn_in: float,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """States ``[*b, n, d]`` of the process with ``b = 0`` and ``κ = λ_min``, in chunks, in time's order.

    It starts at zero; the first state is read after ``burn_in``, the others ``spacing`` apart. At rest
    their covariance is ``λ_min M⁻¹``.
    """
    rates = (values / values.amin(-1, keepdim=True))[..., None, :]
    keep = (-rates * spacing).exp()
    spread = (-torch.expm1(-2 * rates * spacing) / rates).sqrt()
    first = (-torch.expm1(-2 * rates * burn_in) / rates).sqrt()
    last: Tensor | None = None
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        shape = (*values.shape[:-1], size, values.shape[-1])
        kicks = normal_like(values.new_empty(shape), generator) @ vectors
        begin = kicks[..., :1, :] * (first if last is None else spread)
        if last is not None:
            begin = begin + keep * last
        turned = _chained(torch.cat([begin, kicks[..., 1:, :] * spread], -2), keep, spacing)
        last = turned[..., -1:, :]
        yield turned @ vectors.mT


def _chained(kicks: Tensor, keep: Tensor, spacing: float) -> Tensor:
    """``y_k = keep·y_{k-1} + kick_k`` along the last dimension but one, in few passes.

    Each pass doubles how far back a state looks, until what is there is forgotten.
    """
    chained, offset = kicks, 1
    while offset < kicks.shape[-2] and offset * spacing < _FORGOTTEN:
        earlier = chained[..., :-offset, :] * keep
        chained = torch.cat([chained[..., :offset, :], chained[..., offset:, :] + earlier], -2)
        keep, offset = keep.square(), 2 * offset
    return chained


def covariance_inverse(
    vectors: Tensor,
    values: Tensor,
    samples: int,
    *,
    spacing: float,
    burn_in: float,
    bits: int | None,
    noise: float,
    generator: torch.Generator,
) -> Tensor:
    """The inverse as the second moment of states that were read out, ``(1/N) Σ x xᵀ / λ_min``.

    Readings have an error of ``noise`` times the largest one of a chunk and are converted with ``bits``.
    For independent states ``E‖Σ̂ - Σ‖² = (tr(Σ)² + tr(Σ²))/N``.
    """
    total = torch.zeros_like(vectors)
    timing = {"spacing": spacing, "burn_in": burn_in}
    for chunk in states(vectors, values, samples, **timing, generator=generator):
        seen = _read(chunk, bits, noise, generator)
        total = total + seen.mT @ seen
    total = (total + total.mT) / (2 * samples)
    return total / values.amin(-1)[..., None, None]


def mean_squared_error(values: Tensor, samples: int, spacing: float = math.inf) -> Tensor:
    """``E‖Σ̂ - M⁻¹‖²`` of an ideal device at rest, from eigenvalues ``[*b, d]``.

    With ``C_n = M⁻¹ e^{-nMτ}`` between states n readings apart, Isserlis' theorem makes it
    ``N⁻² Σ_kl (tr(C_|k-l|)² + tr(C_|k-l|²))``, and ``(tr(Σ)² + tr(Σ²))/N`` if they are independent.
    """
    rates = values / values.amin(-1, keepdim=True)
    lags = torch.arange(samples, dtype=values.dtype, device=values.device)[:, None]
    if math.isinf(spacing):
        lags = lags[:1]
        spacing = 0.0
    covariances = (-rates[..., None, :] * lags * spacing).exp() / values[..., None, :]
    terms = covariances.sum(-1).square() + covariances.square().sum(-1)
    weights = torch.where(lags[:, 0] == 0, samples, 2 * (samples - lags[:, 0]))
    return (terms * weights).sum(-1) / samples**2


def thermal_spread(inverse: Tensor, duration: float, temperature: float) -> Tensor | None:
    """The symmetric root of the covariance of mean states over a time at rest, ``[*b, d, d]``.

    With rates m and a duration T the mean state is normal with mean ``M⁻¹b`` and variances
    ``2κ/(m²T)·(1 - (1 - e^{-mT})/(mT))`` in the eigenbasis, in units in which ``λ_min`` is 1. The result
    is in those of ``inverse``, M⁻¹.
    """
    solved = eigen(inverse)
    if solved is None:
        return None
    vectors, inverses = solved
    slowest = inverses.amax(-1, keepdim=True)
    rates = slowest / inverses
    times = rates * duration
    shares = (1 + torch.expm1(-times) / times).clamp(min=0)
    spreads = (2 * temperature * shares / rates / times).sqrt() * slowest
    return (vectors * spreads[..., None, :]) @ vectors.mT


def time_average(
    inverse: Tensor,
    spread: Tensor,
    right: Tensor,
    *,
    bits_in: int | None,
    bits_out: int | None,
    noise: float,
    generator: torch.Generator,
) -> Tensor:
    """The mean state for each column of ``right: [*b, d, n]``, as it is read: nearly ``M⁻¹b``.

    ``spread`` is what :func:`thermal_spread` finds. Columns are scaled to the converters' range.
    """
    scale = _full_scale(right)
    scale = scale.where(scale > 0, 1.0)
    mean = inverse @ quantise(right / scale, bits_in)
    thermal = spread @ normal_like(right, generator)
    return _read(mean + thermal, bits_out, noise, generator) * scale


def _read(values: Tensor, bits: int | None, noise: float, generator: torch.Generator) -> Tensor:
    """What is read of some values, ``[*b, n, d]``: with the device's error, then converted."""
    if noise:
        values = values + noise * _full_scale(values) * normal_like(values, generator)
    return quantise(values, bits)
