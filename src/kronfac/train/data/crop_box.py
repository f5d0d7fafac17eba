"""Which part of a large image is shown, in pixels."""

from __future__ import annotations

import math

Box = tuple[float, float, float, float]  # left, top, right, bottom
_RESIZE = 256 / 224  # the shorter side before the centre crop
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop (Szegedy et al., 2015)


def centre_box(width: int, height: int) -> Box:
    """The square that a crop of ``size`` has after the shorter side became 8/7 of ``size``."""
    side = min(width, height) / _RESIZE
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, numbers: list[float]) -> Box:
    """A part of 8 to 100 % of the area with sides of 3:4 to 4:3, from four numbers in [0, 1).

    A box that does not fit is made narrower or lower, so that no number has to be drawn again.
    """
    area = width * height * (_AREA[0] + (_AREA[1] - _AREA[0]) * numbers[0])
    low, high = math.log(_RATIO[0]), math.log(_RATIO[1])
    ratio = math.exp(low + (high - low) * numbers[1])
    wide, tall = min(math.sqrt(area * ratio), width), min(math.sqrt(area / ratio), height)
    left, top = (width - wide) * numbers[2], (height - tall) * numbers[3]
    return left, top, left + wide, top + tall
