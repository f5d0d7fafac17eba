"""Which part of a large image is shown, in pixels."""

from __future__ import annotations

import math

Box = tuple[float, float, float, float]  # left, top, right, bottom
Tries = list[list[float]]  # four uniform numbers for each try of a random box
TRIES = 10
_RESIZE = 256 / 224  # the shorter side before the centre crop
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop (Szegedy et al., 2015)


def centre_box(width: int, height: int) -> Box:
    """The square that a crop of ``size`` has after the shorter side became 8/7 of ``size``."""
    side = min(width, height) / _RESIZE
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, tries: Tries) -> Box:
    """A part of 8 to 100 % of the area with sides of 3:4 to 4:3: the first try that fits.

    The four numbers of a try, in [0, 1), give area, shape, left and top. When none fits, as in very long
    images, it is the middle, as much of it as these shapes allow.
    """
    for area, shape, left, top in tries:
        wide, tall = _sides(width * height, area, shape)
        if wide <= width and tall <= height:
            x, y = (width - wide) * left, (height - tall) * top
            return x, y, x + wide, y + tall
    wide, tall = min(width, height * _RATIO[1]), min(height, width / _RATIO[0])
    x, y = (width - wide) / 2, (height - tall) / 2
    return x, y, x + wide, y + tall


def _sides(whole: float, area: float, shape: float) -> tuple[float, float]:
    part = whole * (_AREA[0] + (_AREA[1] - _AREA[0]) * area)
    low, high = math.log(_RATIO[0]), math.log(_RATIO[1])
    ratio = math.exp(low + (high - low) * shape)
    return math.sqrt(part * ratio), math.sqrt(part / ratio)
