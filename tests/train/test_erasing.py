"""Random erasing: how often, how much, what shape, where, and with what."""

import math

import pytest
import torch

from kronfac.runs.errors import UserError
from kronfac.train.data.erasing import RandomErasing

SIZE = 64
SHAPE = (3, SIZE, SIZE)
MANY = 20_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_rectangles_that_were_drawn_become_zero_and_nothing_else() -> None:
    inputs = torch.randn(50, *SHAPE, generator=generator()) + 10
    drawn = RandomErasing().draw(50, SHAPE, generator())
    found = RandomErasing().apply(inputs, drawn)
    expected = inputs.clone()
    corners = zip(
        *(drawn[name].tolist() for name in ("top", "left", "height", "width")), strict=True
    )
    for number, (top, left, height, width) in enumerate(corners):
        expected[number, :, top : top + height, left : left + width] = 0
    assert torch.equal(found, expected)
    assert (inputs != 0).all()


def test_half_of_the_images_lose_something() -> None:
    drawn = RandomErasing().draw(MANY, SHAPE, generator())
    assert (drawn["height"] > 0).double().mean().item() == pytest.approx(0.5, abs=0.02)
    assert torch.equal(drawn["height"] > 0, drawn["width"] > 0)


def test_areas_and_aspects_are_uniform_within_their_bounds() -> None:
    shape = (3, 1000, 1000)
    drawn = RandomErasing(probability=1.0).draw(MANY, shape, generator())
    height, width = drawn["height"].double(), drawn["width"].double()
    area = height * width / 1000**2
    aspect = torch.minimum(height, width) / torch.maximum(height, width)
    for found, low, high in ((area, 0.02, 0.25), (aspect, 0.3, 1.0)):
        assert found.min().item() == pytest.approx(low, abs=0.01)
        assert found.max().item() == pytest.approx(high, abs=0.01)
        assert found.mean().item() == pytest.approx((low + high) / 2, rel=0.02)
        assert found.std().item() == pytest.approx((high - low) / math.sqrt(12), rel=0.03)


def test_rectangles_lie_as_often_as_they_stand() -> None:
    drawn = RandomErasing(probability=1.0, aspect=(0.5, 0.5)).draw(MANY, SHAPE, generator())
    standing = (drawn["height"] > drawn["width"]).double().mean().item()
    assert standing == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 8, 8), (3, 16, 100)])
def test_rectangles_stay_inside_and_reach_the_borders(shape: tuple[int, ...]) -> None:
    drawn = RandomErasing(probability=1.0).draw(MANY, shape, generator())
    for start, length, size in (("top", "height", shape[1]), ("left", "width", shape[2])):
        end = drawn[start] + drawn[length]
        assert drawn[start].min() == 0
        assert end.max() == size
        assert drawn[length].max() <= size


def test_what_is_drawn_is_a_function_of_the_generator() -> None:
    first = RandomErasing().draw(9, SHAPE, generator(1))
    again = RandomErasing().draw(9, SHAPE, generator(1))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_slice_of_the_batch_loses_what_the_whole_batch_would_lose() -> None:
    inputs = torch.ones(8, *SHAPE)
    drawn = RandomErasing().draw(8, SHAPE, generator())
    part = {name: value[4:] for name, value in drawn.items()}
    whole = RandomErasing().apply(inputs, drawn)
    assert torch.equal(RandomErasing().apply(inputs[4:], part), whole[4:])


@pytest.mark.parametrize(
    "options", [{"probability": 2.0}, {"area": (0.5, 0.1)}, {"aspect": (0.0, 1.0)}]
)
def test_bad_bounds_are_named(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        RandomErasing(**options)  # type: ignore[arg-type]
