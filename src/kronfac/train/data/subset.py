"""A part of a data set: the first samples of a fixed shuffle, with all classes alike."""

from __future__ import annotations

import torch
from torch import Tensor

from kronfac.runs.errors import UserError

_SEED = 20151219  # any fixed number: subsets must be the same in every run


def balanced_order(labels: Tensor) -> Tensor:
    """A fixed order of all samples in which every beginning holds the classes in equal shares."""
    generator = torch.Generator().manual_seed(_SEED)
    shuffled = torch.randperm(len(labels), generator=generator)
    turn = torch.empty_like(shuffled)  # how many of the same class came before
    for label in labels.unique():
        mine = (labels[shuffled] == label).nonzero()[:, 0]
        turn[mine] = torch.arange(len(mine))
    return shuffled[turn.argsort(stable=True)]


def is_count(value: object) -> bool:
    """Whether it is a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_size(what: str, wanted: int, available: int) -> None:
    """Refuse a subset that is empty or larger than the whole."""
    if not is_count(wanted) or wanted > available:
        raise UserError(
            f"data.{what} = {wanted!r} is not a number of samples that this data set has; "
            f"give one from 1 to {available}"
        )


def subset(what: str, labels: Tensor, wanted: int | None) -> Tensor | None:
    """The numbers of the samples in the subset, or ``None`` for all of them."""
    if wanted is None:
        return None
    check_size(what, wanted, len(labels))
    return balanced_order(labels)[:wanted]
