"""Colours can be told apart with every kind of colour vision, in light and dark.

Distances are Euclidean in OKLab, after the matrices of Machado, Oliveira and Fernandes (2009) for
full protanopia, deuteranopia and tritanopia on linear RGB. For scale: black to white is 1.
"""

import itertools
import math
import re
from importlib import resources

import pytest

from kronfac.report.page.pictures import COLOURS, PHASE_COLOURS

Colour = tuple[float, ...]
Matrix = tuple[Colour, ...]

VISIONS: dict[str, Matrix] = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
               (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
               (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
               (0.004733, 0.691367, 0.303900)),
}  # fmt: skip
TO_CONES = ((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005))  # fmt: skip
TO_LAB = ((0.2104542553, 0.7936177850, -0.0040720468), (1.9779984951, -2.4285922050, 0.4505937099),
          (0.0259040371, 0.7827717662, -0.8086757660))  # fmt: skip
STYLE = resources.files("kronfac.report").joinpath("style.css").read_text(encoding="utf-8")
SIDES = ["light", "dark"]


def palette(pattern: str, side: str) -> dict[str, str]:
    """Colours of the style sheet by name."""
    found = re.findall(rf"--({pattern}): light-dark\((#\w+), (#\w+)\)", STYLE)
    return {name: light if side == "light" else dark for name, light, dark in found}


def linear(colour: str) -> Colour:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)


def times(matrix: Matrix, vector: Colour) -> Colour:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def seen(colour: str, vision: str) -> Colour:
    rgb = tuple(min(1.0, max(0.0, part)) for part in times(VISIONS[vision], linear(colour)))
    return times(TO_LAB, tuple(math.cbrt(part) for part in times(TO_CONES, rgb)))


def least_distance(colours: dict[str, str], vision: str) -> float:
    pairs = itertools.combinations(colours.values(), 2)
    return min(math.dist(seen(a, vision), seen(b, vision)) for a, b in pairs)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("side", SIDES)
def test_optimizers(side: str, vision: str) -> None:
    colours = palette("kfac|sgd|adamw|muon|soap", side)  # Adam is AdamW's
    assert len(colours) == 5
    assert least_distance(colours, vision) > 0.11


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("side", SIDES)
def test_phases(side: str, vision: str) -> None:
    colours = palette(r"phase-[\w-]+", side)
    assert len(colours) == 11
    assert least_distance(colours, vision) > 0.08


def contrast(first: str, second: str) -> float:
    """The ratio of luminances that WCAG asks about."""
    low, high = sorted(
        sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))
        for colour in (first, second)
    )
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("side", SIDES)
def test_contrast_with_the_page(side: str) -> None:
    (page,) = palette("page", side).values()
    for colour in palette("kfac|sgd|adamw|muon|soap", side).values():
        assert contrast(colour, page) > 2.8
    for colour in palette("text|soft|good|bad|warn", side).values():
        assert contrast(colour, page) > 4.5


def test_pictures_have_the_light_colours_of_the_page() -> None:
    assert palette("kfac|sgd|adamw|adam|muon|soap", "light") == COLOURS
    phases = {name.replace("_", "-"): colour for name, colour in PHASE_COLOURS.items()}
    assert palette(r"phase-[\w-]+", "light") == {f"phase-{n}": c for n, c in phases.items()}
