"""Output gradients of the model's own distribution, for ``fisher="mc"`` and ``fisher="exact"``.

The curvature of a likelihood at its outputs is ``H = S Sᵀ``. Sampling labels gives gradients whose second
moment is ``H`` on average; the columns of ``S`` give it exactly, one backward pass per column.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Likelihood = Literal["categorical", "bernoulli", "gaussian"]
_LIKELIHOODS = ("categorical", "bernoulli", "gaussian")


def check_likelihood(likelihood: str) -> None:
    """Raise for a likelihood that is not supported."""
    if likelihood not in _LIKELIHOODS:
        supported = ", ".join(map(repr, _LIKELIHOODS))
        raise ValueError(f"likelihood={likelihood!r} is not supported; choose one of {supported}.")


def term_mask(outputs: Tensor, mask: Tensor | None, ignore_index: int | None) -> Tensor:
    """Weights of the loss terms, ``outputs.shape[:-1]``: one where a term counts, else zero."""
    shape = outputs.shape[:-1]
    if mask is None:
        if ignore_index is not None:
            raise ValueError("ignore_index needs the targets: pass them as mask=targets.")
        return outputs.new_ones(shape)
    if tuple(mask.shape) != tuple(shape):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, but the outputs have one loss term for each of "
            f"{tuple(shape)} (all dimensions but the last)."
        )
    if ignore_index is not None:
        mask = mask != ignore_index
    return mask.to(outputs.dtype)


def sampled_gradient(
    outputs: Tensor, likelihood: Likelihood, generator: torch.Generator | None
) -> Tensor:
    """Gradient of the negative log-likelihood of labels drawn from the model, like ``outputs``."""
    if likelihood == "gaussian":
        return torch.empty_like(outputs).normal_(generator=generator)
    noise_shape = outputs.shape if likelihood == "bernoulli" else (*outputs.shape[:-1], 1)
    noise = torch.empty(noise_shape, dtype=outputs.dtype, device=outputs.device)
    noise.uniform_(generator=generator)
    if likelihood == "bernoulli":
        chance = outputs.sigmoid()
        return chance - (noise < chance).to(outputs.dtype)
    chance = outputs.softmax(-1)
    # Inverse of the cumulative distribution; the last class takes what rounding leaves over.
    label = (chance.cumsum(-1)[..., :-1] <= noise).sum(-1)
    return chance.scatter_add(-1, label[..., None], -torch.ones_like(chance[..., :1]))


def hessian_product(outputs: Tensor, likelihood: Likelihood, vectors: Tensor) -> Tensor:
    """``H x`` for a vector ``x`` per loss term, shaped like ``outputs``."""
    if likelihood == "gaussian":
        return vectors
    if likelihood == "bernoulli":
        chance = outputs.sigmoid()
        return chance * (1 - chance) * vectors
    chance = outputs.softmax(-1)
    return chance * (vectors - (chance * vectors).sum(-1, keepdim=True))


def exact_gradients(outputs: Tensor, likelihood: Likelihood) -> Iterator[Tensor]:
    """Columns of ``S``, one loss term per sample at a time, each shaped like ``outputs``.

    For outputs ``[N, C]`` there are ``C`` columns; for ``[N, T, C]`` there are ``T·C``, since terms of
    one sample may meet in shared layers.
    """
    flat = outputs.reshape(outputs.shape[0], -1, outputs.shape[-1])
    terms, classes = flat.shape[1:]
    for term in range(terms):
        for index in range(classes):
            column = torch.zeros_like(flat)
            column[:, term] = _root_column(flat[:, term], likelihood, index)
            yield column.view_as(outputs)


def _root_column(scores: Tensor, likelihood: Likelihood, index: int) -> Tensor:
    """Column ``index`` of ``S`` for scores ``[N, C]``."""
    unit = torch.zeros_like(scores)
    unit[:, index] = 1
    if likelihood == "gaussian":
        return unit
    if likelihood == "bernoulli":
        chance = scores.sigmoid()
        return unit * (chance * (1 - chance)).sqrt()
    chance = scores.softmax(-1)
    return chance[:, index, None].sqrt() * (unit - chance)
