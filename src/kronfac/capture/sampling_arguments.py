"""What ``optimizer.observe(...)`` is given, checked before anything is observed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kronfac.capture.fisher import check_likelihood
from kronfac.options.advice import Advice
from kronfac.options.config import Fisher, check_count

#: From this many backward passes per call on, the exact Fisher is slower by orders of magnitude than all
#: else: at 0.1 s each, a factor step takes minutes.
MANY_COLUMNS = 1000


def check_arguments(
    outputs: object,
    likelihood: str,
    mask: object,
    ignore_index: object,
    samples: object,
    source: object,
) -> None:
    """Raise for arguments of the wrong kind."""
    if not isinstance(outputs, Tensor):
        hint = (
            "its 'logits', for example" if isinstance(outputs, Mapping) else "the model's outputs"
        )
        raise TypeError(
            f"observe() got a {type(outputs).__name__} and needs a tensor [N, ..., C]: give {hint}."
        )
    if not outputs.is_floating_point():
        raise TypeError(
            f"observe() got outputs of type {outputs.dtype}; give the model's outputs (logits or "
            "values), not labels."
        )
    if outputs.dim() < 2:
        raise ValueError(
            f"outputs have shape {tuple(outputs.shape)}; give [N, ..., C] with samples first "
            "and classes or values last."
        )
    check_likelihood(likelihood)
    check_count("samples", samples)
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(
            f"mask={mask!r} must be a tensor with one flag or target per loss term, or None."
        )
    if ignore_index is not None and (
        isinstance(ignore_index, bool) or not isinstance(ignore_index, int)
    ):
        raise TypeError(
            f"ignore_index={ignore_index!r} must be a whole number such as -100, or None."
        )
    if source is not None and not isinstance(source, torch.Generator):
        raise TypeError(f"generator={source!r} must be a torch.Generator or None.")


def check_graph(outputs: Tensor) -> None:
    """Raise for outputs that lead back to no layer."""
    if not outputs.requires_grad:
        raise RuntimeError(
            "observe() got outputs without a graph: give what the model returned, not a "
            "detached copy, and run the forward pass with gradients enabled."
        )


def graph_error() -> RuntimeError:
    """Say when to call, for a graph that cannot be used."""
    return RuntimeError(
        "observe() could not go back from the outputs to the layers (the reason is above): call it "
        "between the forward pass and backward(), which frees the graph."
    )


def advise(advice: Advice, fisher: Fisher, outputs: Tensor, likelihood: str, samples: int) -> None:
    """Warn of what is hardly meant; reads numbers from the device once."""
    if likelihood == "categorical" and not advice.knows("probabilities"):
        advice.give("probabilities", _probabilities(outputs.detach()))
        advice.skip("probabilities")
    if fisher != "exact":
        return
    advice.give("columns", _columns(outputs))
    if samples != 1:
        advice.give("samples", "samples has no effect with fisher='exact', which draws nothing.")


def _probabilities(outputs: Tensor) -> str | None:
    if outputs.shape[-1] < 2 or not outputs.numel() or outputs.device.type == "meta":
        return None
    sums = outputs.double().sum(-1) if outputs.device.type != "mps" else outputs.float().sum(-1)
    if not bool((outputs >= 0).all() & ((sums - 1).abs() < 1e-2).all()):
        return None
    return (
        "observe() got rows that are non-negative and sum to 1, which look like probabilities, but "
        "likelihood='categorical' needs logits: give the outputs before softmax (or after log_softmax)."
    )


def _columns(outputs: Tensor) -> str | None:
    columns = math.prod(outputs.shape[1:])
    if columns < MANY_COLUMNS:
        return None
    return (
        f"fisher='exact' takes one backward pass per loss term of a sample and class: {columns:,} for "
        f"outputs of shape {tuple(outputs.shape)}, at every factor step; fisher='mc' takes 1."
    )
