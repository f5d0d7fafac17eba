"""Statistics and solves in full float32, whatever a program allows for its own products."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kronfac.linalg.covariance import bordered_gram, channel_gram, gram
from kronfac.linalg.patches import Window
from kronfac.linalg.precision import _switches, full_precision
from kronfac.linalg.sliding import patch_covariance
from kronfac.linalg.solve import (
    cholesky_inverse,
    cholesky_inverse_share,
    eigen,
    newton_schulz_inverse,
)
from kronfac.methods.kfac.block import KFACBlock

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution_backward", "linalg_solve_triangular")


def settings() -> list[str]:
    return [one.fp32_precision for one in _switches()]


@pytest.fixture(autouse=True)
def narrow() -> Iterator[None]:
    """A program that allows everything."""
    before = settings(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    assert settings()[0] == "tf32"
    yield
    torch.set_float32_matmul_precision(before[1])
    for one, value in zip(_switches(), before[0], strict=True):
        one.fp32_precision = value


class Precisions(TorchDispatchMode):
    """In what precisions products were taken."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in PRODUCTS:
            self.found |= set(settings())
        return func(*args, **(kwargs or {}))


def positive(width: int) -> Tensor:
    return torch.eye(width) * 2 + 0.1


def turned(matrix: Tensor) -> Tensor:
    block = KFACBlock(
        (8, 8),
        torch.float32,
        solver="eigen",
        max_dim=8192,
        output_factor=True,
        per_sample=False,
    )
    solution = {"A.vectors": matrix, "G.vectors": matrix}
    return block._turn(solution, matrix)


CALLS: dict[str, Callable[[], object]] = {
    "gram": lambda: gram(torch.randn(30, 8)),
    "bordered gram": lambda: bordered_gram(torch.randn(30, 8)),
    "channel gram": lambda: channel_gram(torch.randn(3, 4, 5, 5)),
    "patches, sliding": lambda: patch_covariance(
        torch.randn(8, 8, 16, 16), Window((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
    ),
    "patches, collected": lambda: patch_covariance(
        torch.randn(2, 2, 6, 6), Window((3, 3), (2, 2), (1, 1), ((0, 0), (0, 0)))
    ),
    "Newton-Schulz": lambda: newton_schulz_inverse(positive(8), 2.0),
    "a share of an inverse": lambda: cholesky_inverse_share(positive(40), 1, 2),
    "turning into the eigenbasis": lambda: turned(positive(8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_products_are_full_and_the_choice_of_the_program_stays(name: str) -> None:
    before = settings()
    with Precisions() as mode:
        CALLS[name]()
    assert mode.found
    assert not mode.found & {"tf32", "bf16"}
    assert settings() == before
    assert torch.get_float32_matmul_precision() == "medium"


def test_decompositions_leave_the_choice_of_the_program() -> None:
    before = settings()
    assert eigen(positive(5)) is not None
    assert cholesky_inverse(positive(5)) is not None
    assert settings() == before


def test_an_error_inside_restores_it_too() -> None:
    before = settings()

    @full_precision
    def failing() -> None:
        assert not {"tf32", "bf16"} & set(settings())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert settings() == before
