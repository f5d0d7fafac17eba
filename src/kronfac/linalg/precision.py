"""Full float32 products whatever a program allows for its own: TF32 on GPUs, bfloat16 on some CPUs.

``torch.set_float32_matmul_precision("high")`` suits a model, but not small eigenvalues: after
a spike of gradients they drown in what the large ones lose by rounding. Convolutions of cuDNN take TF32
even if nobody asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_FULL, _NARROW = "ieee", ("tf32", "bf16")


def _switches() -> tuple[Any, ...]:
    """What has a precision of its own: products and convolutions, on GPUs and on CPUs."""
    backends: Any = torch.backends
    cuda, cpu = (backends.cuda.matmul, backends.cudnn.conv), backends.mkldnn
    return (*cuda, cpu.matmul, cpu.conv)


def _rounding() -> list[tuple[Any, str]]:
    """What would round now, and how."""
    found = [(one, one.fp32_precision) for one in _switches()]
    return [(one, before) for one, before in found if before in _NARROW]


@contextmanager
def full_products() -> Iterator[None]:
    """Multiply float32 in float32 inside, and leave the program's choice as it was."""
    changed = _rounding()
    try:
        for one, _ in changed:
            one.fp32_precision = _FULL
        yield
    finally:
        for one, before in changed:
            one.fp32_precision = before


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function multiply in full float32."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _rounding():  # as by default; many such functions are called in a step
            return function(*args, **kwargs)
        with full_products():
            return function(*args, **kwargs)

    return guarded
