"""Second moments of rows against einsum in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kronfac.linalg.covariance import (
    bordered,
    bordered_gram,
    channel_gram,
    channel_rows,
    gram,
    gram_flops,
    with_ones,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def second_moment(rows: Tensor) -> Tensor:
    return torch.einsum("...ri,...rj->...ij", rows, rows)


# --- gram ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 5, 511, 512, 513, 1030])
@pytest.mark.parametrize("rows", [1, 9, 150])
def test_gram_is_the_second_moment(width: int, rows: int) -> None:
    x = normal(rows, width)
    torch.testing.assert_close(gram(x), second_moment(x))


@pytest.mark.parametrize("width", [3, 600])
def test_gram_keeps_batch_dimensions(width: int) -> None:
    x = normal(2, 90, width)
    torch.testing.assert_close(gram(x), second_moment(x))


def test_gram_of_a_transposed_view() -> None:
    x = normal(600, 80).T
    torch.testing.assert_close(gram(x), second_moment(x))


@pytest.mark.parametrize("width", [260, 600])
def test_strips_of_a_wide_gram_mirror_each_other(width: int) -> None:
    product = gram(normal(400, width))
    torch.testing.assert_close(product, product.T)
    assert torch.equal(product[:100, 160:], product[160:, :100].T)


@pytest.mark.parametrize("width", [1, 64, 127, 128, 200, 512, 513, 1000])
@pytest.mark.parametrize("rows", [3, 300, 1000])
def test_gram_flops_are_those_of_the_products(width: int, rows: int) -> None:
    with FlopCounterMode(display=False) as counter:
        gram(normal(rows, width))
    assert gram_flops(rows, width) == counter.get_total_flops()
    if rows >= width >= 512:
        assert gram_flops(rows, width) < 0.63 * 2 * rows * width**2


@pytest.mark.parametrize("shape", [(9, 3), (400, 200), (2, 90, 70)])
def test_bordered_gram_is_the_gram_of_rows_with_ones(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    torch.testing.assert_close(bordered_gram(x), second_moment(with_ones(x)))


# --- feature maps ----------------------------------------------------------------------------

MAPS = {
    "1d": (3, 4, 7),
    "2d": (3, 4, 3, 5),
    "3d": (2, 4, 3, 2, 2),
    "more-channels-than-positions": (3, 8, 1, 2),
    "one-position": (3, 4, 1, 1),
}


def layouts(x: Tensor) -> dict[str, Tensor]:
    found = {
        "contiguous": x,
        "strided": x.repeat_interleave(2, dim=-1)[..., ::2],
        "transposed": x.mT.contiguous().mT,
        "channels-inside": x.movedim(1, -1).contiguous().movedim(-1, 1),
    }
    if x.dim() == 4:
        found["channels_last"] = x.contiguous(memory_format=torch.channels_last)
    return found


def expected_channel_gram(x: Tensor, groups: int) -> Tensor:
    parts = [torch.einsum("nis,njs->ij", p, p) for p in x.flatten(2).chunk(groups, dim=1)]
    return parts[0] if groups == 1 else torch.stack(parts)


@pytest.mark.parametrize("shape", MAPS.values(), ids=MAPS.keys())
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_channel_gram_in_every_layout(shape: tuple[int, ...], groups: int) -> None:
    x = normal(*shape)
    expected = expected_channel_gram(x, groups)
    for name, laid_out in layouts(x).items():
        actual = channel_gram(laid_out, groups)
        torch.testing.assert_close(actual, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("groups", [1, 2])
def test_channel_rows_are_positions_in_order(groups: int) -> None:
    x = normal(2, 4, 3, 2)
    rows = channel_rows(x, groups).reshape(groups, 2, 3, 2, 4 // groups)
    for n, i, j in ((0, 0, 0), (0, 2, 1), (1, 1, 0)):
        assert torch.equal(rows[:, n, i, j].flatten(), x[n, :, i, j])


# --- the bias column -------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,)])
def test_bordered_is_the_gram_of_rows_with_ones(batch: tuple[int, ...]) -> None:
    x = normal(*batch, 6, 3)
    actual = bordered(gram(x), x.sum(-2), 6)
    torch.testing.assert_close(actual, gram(with_ones(x)))


def test_with_ones_appends_the_last_feature() -> None:
    x = normal(2, 3, 4)
    extended = with_ones(x)
    assert torch.equal(extended[..., :-1], x)
    assert torch.equal(extended[..., -1], torch.ones(2, 3, dtype=x.dtype))
