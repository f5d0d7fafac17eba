"""Patches and their sums against slices of the padded input, one position at a time."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from kronfac.linalg.patches import (
    Window,
    patch_gram,
    patch_squares,
    patch_sums,
    patch_total,
    patches,
    zero_pad,
)
from tests.linalg.geometries import (
    GEOMETRIES,
    Geometry,
    by_group,
    geometries,
    make_input,
    obvious_patches,
    window,
)

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
every_geometry = pytest.mark.parametrize(
    ("shape", "window"), GEOMETRIES.values(), ids=GEOMETRIES.keys()
)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


# --- geometry --------------------------------------------------------------------------------


@every_geometry
def test_patches_times_a_channels_last_weight_are_the_convolution(
    shape: tuple[int, ...], window: Window
) -> None:
    x = make_input(shape)
    out = 2 * window.groups
    weight = make_input((out, shape[1] // window.groups, *window.kernel))
    convolve = CONVOLUTIONS[len(window.kernel)]
    padded = zero_pad(x, window.padding)
    expected = convolve(
        padded, weight, stride=window.stride, dilation=window.dilation, groups=window.groups
    )
    matrix = weight.movedim(1, -1).reshape(window.groups, 2, -1)  # [g, out, taps·C]
    outputs = by_group(patches(x, window), window) @ matrix.mT[:, None]
    assert_equal(outputs.permute(1, 0, 3, 2).reshape(expected.shape), expected)


@every_geometry
def test_output_size_is_what_torch_computes(shape: tuple[int, ...], window: Window) -> None:
    x = zero_pad(make_input(shape)[:, :1], window.padding)
    convolve = CONVOLUTIONS[len(window.kernel)]
    weight = torch.zeros(1, 1, *window.kernel, dtype=x.dtype)
    expected = convolve(x, weight, stride=window.stride, dilation=window.dilation).shape[2:]
    assert window.output_size(shape[2:]) == tuple(expected)


def test_taps_are_the_positions_of_the_kernel() -> None:
    assert window((2, 3, 4)).taps == 24


@pytest.mark.parametrize(("stride", "expected"), [(1, True), ((1, 2), False), (2, False)])
def test_unit_stride_means_every_dimension(stride: int | tuple[int, int], expected: bool) -> None:
    assert window((3, 3), stride=stride).unit_stride is expected


@given(geometries())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_tap_slices_are_what_each_tap_touches_without_the_padding(geometry: Geometry) -> None:
    shape, made = geometry
    marks = torch.arange(1.0, 1.0 + torch.Size(shape[2:]).numel(), dtype=torch.float64)
    image = marks.reshape(1, 1, *shape[2:])
    rows = obvious_patches(image, Window(made.kernel, made.stride, made.dilation, made.padding))
    for tap, where in enumerate(made.tap_slices(shape[2:])):
        touched = rows[0, 0, :, tap]
        assert torch.equal(image[(0, 0, *where)].flatten(), touched[touched != 0])


def test_zero_pad_without_padding_copies_nothing() -> None:
    x = torch.ones(1, 1, 2, 2)
    assert zero_pad(x, ((0, 0), (0, 0))) is x


def test_zero_pad_takes_pairs_in_the_order_of_dimensions() -> None:
    padded = zero_pad(torch.ones(1, 1, 1, 1), ((1, 0), (0, 2)))
    assert padded.tolist() == [[[[0, 0, 0], [1, 0, 0]]]]


# --- rows and their sums ---------------------------------------------------------------------


@every_geometry
def test_patches(shape: tuple[int, ...], window: Window) -> None:
    x = make_input(shape)
    assert_equal(by_group(patches(x, window), window), obvious_patches(x, window))


@every_geometry
def test_patch_gram(shape: tuple[int, ...], window: Window) -> None:
    x = make_input(shape)
    rows = obvious_patches(x, window).flatten(1, 2)
    assert_equal(by_group(patch_gram(x, window), window), rows.mT @ rows)


@pytest.mark.parametrize("max_elements", [1, 500, 10**6])
def test_patch_gram_does_not_depend_on_how_samples_are_split(max_elements: int) -> None:
    x, made = make_input((5, 2, 4, 4)), window((3, 3), padding=1)
    rows = obvious_patches(x, made).flatten(1, 2)[0]
    assert_equal(patch_gram(x, made, max_elements), rows.T @ rows)


@every_geometry
def test_patch_sums_are_per_sample(shape: tuple[int, ...], window: Window) -> None:
    x = make_input(shape)
    assert_equal(by_group(patch_sums(x, window), window), obvious_patches(x, window).sum(2))


@every_geometry
def test_patch_total(shape: tuple[int, ...], window: Window) -> None:
    x = make_input(shape)
    assert_equal(by_group(patch_total(x, window), window), obvious_patches(x, window).sum((1, 2)))


@pytest.mark.parametrize("layout", ["first", "last", "strided"])
def test_patch_total_in_any_order_of_memory(layout: str) -> None:
    x = torch.randn(4, 3, 6, 5, dtype=torch.float64)
    ordered = {
        "first": x,
        "last": x.contiguous(memory_format=torch.channels_last),
        "strided": torch.cat([x, x], dim=3)[..., ::2],
    }[layout]
    kernel = window((3, 3), padding=1)
    assert_equal(patch_total(ordered, kernel), patch_sums(ordered, kernel).sum(0))


@every_geometry
def test_patch_squares_are_the_diagonal_of_the_gram(shape: tuple[int, ...], window: Window) -> None:
    x = make_input(shape)
    expected = obvious_patches(x, window).square().sum((1, 2))
    assert_equal(by_group(patch_squares(x, window), window), expected)


@given(geometries())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_patches_of_any_geometry(geometry: Geometry) -> None:
    shape, made = geometry
    x = make_input(shape)
    expected = obvious_patches(x, made)
    assert_equal(by_group(patches(x, made), made), expected)
    assert_equal(by_group(patch_sums(x, made), made), expected.sum(2))
