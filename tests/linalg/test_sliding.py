"""The sliding-window covariance against the gram of patches cut out one by one, in float64."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kronfac.linalg import selection, sliding
from kronfac.linalg.patches import Window
from kronfac.linalg.selection import selected_covariance
from kronfac.linalg.sliding import collecting_flops, covariance_flops, patch_covariance
from tests.linalg.geometries import (
    GEOMETRIES,
    Geometry,
    by_group,
    geometries,
    make_input,
    obvious_patches,
    window,
)

UNIT_STRIDE = {name: one for name, one in GEOMETRIES.items() if one[1].unit_stride}


def obvious_gram(x: Tensor, window: Window) -> Tensor:
    rows = obvious_patches(x, window).flatten(1, 2)
    return rows.mT @ rows


def always_sliding(x: Tensor, window: Window) -> Tensor:
    """The covariance by sliding windows, also where collecting patches would be cheaper."""
    with mock.patch.object(sliding, "_sliding_pays", return_value=True):
        return patch_covariance(x, window)


def unfold_flops(shape: tuple[int, ...], window: Window) -> int:
    """Unfold and GEMM: `2·rows·width²` per group."""
    rows = shape[0] * math.prod(window.output_size(shape[2:]))
    width = shape[1] // window.groups * window.taps
    return 2 * rows * width**2 * window.groups


# --- equality --------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "window"), GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_covariance_is_the_gram_of_patches(shape: tuple[int, ...], window: Window) -> None:
    x = make_input(shape)
    actual = by_group(patch_covariance(x, window), window)
    torch.testing.assert_close(actual, obvious_gram(x, window), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("shape", "window"), UNIT_STRIDE.values(), ids=UNIT_STRIDE.keys())
def test_sliding_is_right_where_it_does_not_pay_too(shape: tuple[int, ...], window: Window) -> None:
    x = make_input(shape)
    actual = by_group(always_sliding(x, window), window)
    torch.testing.assert_close(actual, obvious_gram(x, window), rtol=1e-10, atol=1e-10)


@given(geometries())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_covariance_of_any_geometry(geometry: Geometry) -> None:
    shape, made = geometry
    x = make_input(shape)
    actual = by_group(patch_covariance(x, made), made)
    torch.testing.assert_close(actual, obvious_gram(x, made), rtol=1e-10, atol=1e-10)


@given(geometries(unit_stride=True))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_sliding_over_any_geometry(geometry: Geometry) -> None:
    shape, made = geometry
    x = make_input(shape)
    actual = by_group(always_sliding(x, made), made)
    torch.testing.assert_close(actual, obvious_gram(x, made), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("shape", "window"), UNIT_STRIDE.values(), ids=UNIT_STRIDE.keys())
def test_few_kernels_give_the_same(shape: tuple[int, ...], window: Window) -> None:
    x = make_input(shape)
    actual = by_group(selected_covariance(x, window), window)
    torch.testing.assert_close(actual, obvious_gram(x, window), rtol=1e-10, atol=1e-10)


@given(geometries(unit_stride=True))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_few_kernels_over_any_geometry(geometry: Geometry) -> None:
    shape, made = geometry
    x = make_input(shape)
    actual = by_group(selected_covariance(x, made), made)
    torch.testing.assert_close(actual, obvious_gram(x, made), rtol=1e-10, atol=1e-10)


def test_few_kernels_in_several_batches() -> None:
    x, made = make_input((5, 3, 6, 5)), window((3, 3), padding=1)
    with mock.patch.object(selection, "_MOST_ELEMENTS", 2 * x[0].numel()):
        actual = selected_covariance(x, made)
    torch.testing.assert_close(actual, obvious_gram(x, made)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [((2, 4, 6, 5), torch.channels_last), ((2, 4, 4, 3, 4), torch.channels_last_3d)],
    ids=["2d", "3d"],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_memory_layout_does_not_matter(
    shape: tuple[int, ...], memory_format: torch.memory_format, groups: int
) -> None:
    x = make_input(shape)
    made = window((3,) * (len(shape) - 2), padding=1, groups=groups)
    actual = by_group(always_sliding(x.contiguous(memory_format=memory_format), made), made)
    torch.testing.assert_close(actual, obvious_gram(x, made), rtol=1e-10, atol=1e-10)


def test_a_strided_view_of_a_larger_map() -> None:
    whole = make_input((2, 8, 12, 10))
    x, made = whole[:, ::2, 1::2, ::2], window((3, 3), padding=1)
    expected = obvious_gram(x, made)[0]
    torch.testing.assert_close(always_sliding(x, made), expected, rtol=1e-10, atol=1e-10)


def test_the_input_is_not_written_to() -> None:
    x = make_input((2, 3, 6, 5))
    before = x.clone()
    always_sliding(x, window((3, 3), padding=1))
    assert torch.equal(x, before)


@pytest.mark.parametrize(("shape", "window"), UNIT_STRIDE.values(), ids=UNIT_STRIDE.keys())
def test_single_precision_is_exact_to_rounding(shape: tuple[int, ...], window: Window) -> None:
    x = make_input(shape, torch.float32)
    exact = obvious_gram(x, window)
    scale = x.double().square().sum()
    error = (by_group(always_sliding(x, window), window) - exact).abs().max()
    assert error <= 16 * torch.finfo(torch.float32).eps * scale


# --- cost ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(6, 7), (8, 8), (32, 32)])
@pytest.mark.parametrize(("channels", "groups"), [(4, 1), (4, 2)])
def test_flops_of_a_padded_3x3_kernel(height: int, width: int, channels: int, groups: int) -> None:
    """3·5 offsets on the image, 3 on each of four border lines, one in each corner."""
    shape = (2, channels, height, width)
    products = 15 * height * width + 6 * height + 6 * width + 4
    expected = 2 * 2 * channels**2 // groups * products
    with mock.patch.object(sliding, "_sliding_pays", return_value=True):
        counted = covariance_flops(shape, window((3, 3), padding=1, groups=groups))
    assert counted == expected


@pytest.mark.parametrize(("channels", "size"), [(64, 32), (128, 16), (256, 8), (64, 56)])
def test_a_padded_3x3_kernel_on_common_maps_needs_less_than_a_quarter_of_unfold(
    channels: int, size: int
) -> None:
    shape, made = (32, channels, size, size), window((3, 3), padding=1)
    assert 4 * covariance_flops(shape, made) < unfold_flops(shape, made)


@pytest.mark.parametrize(("shape", "window"), GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_collecting_counts_one_gemm_per_group(shape: tuple[int, ...], window: Window) -> None:
    assert collecting_flops(shape, window) == unfold_flops(shape, window)


@pytest.mark.parametrize(
    ("shape", "window"),
    [((2, 3, 6, 6), window((1, 1))), ((2, 3, 6, 6), window((3, 3), stride=2))],
    ids=["pointwise", "strided"],
)
def test_patches_are_collected_where_nothing_is_shared(
    shape: tuple[int, ...], window: Window
) -> None:
    assert covariance_flops(shape, window) == unfold_flops(shape, window)


@given(geometries(), st.integers(1, 128), st.integers(1, 64), st.integers(0, 24))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_the_chosen_algorithm_never_has_more_flops_than_unfold(
    geometry: Geometry, samples: int, channels: int, larger: int
) -> None:
    (_, _, *size), made = geometry
    shape = (samples, channels * made.groups, *(n + larger for n in size))
    assert covariance_flops(shape, made) <= unfold_flops(shape, made)


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((256, 16, 10, 8, 4), window((1, 1, 4), dilation=(4, 4, 1), groups=8)),
        ((256, 32, 9, 9, 8), window((1, 2, 2), dilation=4, groups=8)),
    ],
    ids=["row-of-taps", "dilated"],
)
def test_narrow_groups_have_no_more_flops_than_unfold_either(
    shape: tuple[int, ...], window: Window
) -> None:
    assert covariance_flops(shape, window) <= unfold_flops(shape, window)


@pytest.mark.parametrize("name", [n for n, (_, w) in GEOMETRIES.items() if w.groups == 1])
def test_no_more_flops_run_than_are_counted(name: str) -> None:
    """By torch's own counter, which miscounts grouped convolutions."""
    shape, made = GEOMETRIES[name]
    with FlopCounterMode(display=False) as counter:
        patch_covariance(make_input(shape), made)
    assert counter.get_total_flops() <= covariance_flops(shape, made)
