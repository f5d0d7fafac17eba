"""Packing: every number once, back bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kronfac.distributed.comm.symmetric import pack, packed_elements, unpack

WIDTHS = st.integers(0, 70)
BATCHES = st.sampled_from([(), (1,), (3,), (0,), (2, 3)])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


def symmetric(
    batch: tuple[int, ...], width: int, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*batch, width, width, generator=generator, dtype=torch.float64)
    return (x.triu() + x.triu(1).mT).to(dtype)


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def packed(x: torch.Tensor, is_symmetric: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Pack into the middle of a larger message, whose rest must stay."""
    count = packed_elements(tuple(x.shape), is_symmetric)
    message = torch.full((count + 7,), 13.0, dtype=dtype or x.dtype)
    pack(x, is_symmetric, message[3 : 3 + count])
    assert (message[:3] == 13).all()
    assert (message[3 + count :] == 13).all()
    return message[3 : 3 + count]


@pytest.mark.parametrize("width", range(10))
@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_symmetric_round_trip(width: int, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    x = symmetric(batch, width, dtype)
    flat = packed(x, True)
    assert flat.numel() == math.prod(batch) * width * (width + 1) // 2
    back = unpack(flat, tuple(x.shape), True, dtype)
    assert back.shape == x.shape
    assert back.is_contiguous()
    assert bits(back) == bits(x)


@pytest.mark.parametrize("width", [255, 256, 257, 258, 511, 512, 513, 769])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_round_trip_of_more_than_one_tile(width: int, batch: tuple[int, ...]) -> None:
    x = symmetric(batch, width, torch.float32)
    assert bits(unpack(packed(x, True), tuple(x.shape), True)) == bits(x)


@settings(deadline=None)
@given(WIDTHS, BATCHES, DTYPES, DTYPES, st.integers(0, 9))
def test_rounding_is_that_of_the_wire(
    width: int, batch: tuple[int, ...], dtype: torch.dtype, wire: torch.dtype, seed: int
) -> None:
    x = symmetric(batch, width, dtype, seed)
    back = unpack(packed(x, True, wire), tuple(x.shape), True, dtype)
    assert back.dtype == dtype
    assert bits(back) == bits(x.to(wire).to(dtype))


@settings(deadline=None)
@given(WIDTHS, BATCHES, st.booleans())
def test_layout_of_the_input_does_not_matter(
    width: int, batch: tuple[int, ...], is_symmetric: bool
) -> None:
    x = symmetric(batch, width, torch.float32)
    wide = torch.full((*batch, width + 3, 2 * width + 1), math.nan)
    wide[..., 2 : width + 2, : 2 * width : 2] = x
    for view in (x.mT, wide[..., 2 : width + 2, : 2 * width : 2]):
        assert bits(packed(view, is_symmetric)) == bits(packed(x, is_symmetric))


@settings(deadline=None)
@given(WIDTHS, BATCHES)
def test_only_the_upper_triangle_is_read(width: int, batch: tuple[int, ...]) -> None:
    x = symmetric(batch, width, torch.float32)
    lower = torch.ones(width, width, dtype=torch.bool).tril_(-1)
    flat = packed(x.masked_fill(lower, math.nan), True)
    assert bits(unpack(flat, tuple(x.shape), True, x.dtype)) == bits(x)


@settings(deadline=None)
@given(st.integers(1, 40))
def test_each_number_travels_once(width: int) -> None:
    x = torch.arange(width * width, dtype=torch.float64).view(width, width)
    expected = sorted(x[i, j].item() for i in range(width) for j in range(i, width))
    assert sorted(packed(x, True).tolist()) == expected


def test_special_numbers_travel() -> None:
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45]
    for width in (2, 3, 6, 7):
        upper = [values[k % len(values)] for k in range(width * width)]
        x = torch.tensor(upper).view(width, width)
        x = torch.where(torch.ones(width, width, dtype=torch.bool).triu(), x, x.mT)
        assert bits(unpack(packed(x, True), (width, width), True, x.dtype)) == bits(x)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), DTYPES)
def test_other_tensors_round_trip(shape: list[int], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    flat = packed(x, False)
    assert flat.numel() == packed_elements(tuple(shape), False) == math.prod(shape)
    back = unpack(flat, tuple(shape), False, dtype)
    assert bits(back) == bits(x)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_the_result_is_new(is_symmetric: bool) -> None:
    for width in (1, 4, 5):
        x = symmetric((), width, torch.float32)
        flat = packed(x, is_symmetric)
        back = unpack(flat, tuple(x.shape), is_symmetric, x.dtype)
        flat.zero_()
        assert bits(back) == bits(x)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 4, 5)])
def test_what_cannot_be_symmetric_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be symmetric"):
        packed_elements(shape, True)
