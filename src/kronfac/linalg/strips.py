"""Border strips: the parts of an image that some taps of a convolution never visit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from kronfac.linalg.patches import Window

Interval = tuple[int, int]


@dataclass(frozen=True)
class Strip:
    """A border box whose products are in ``D`` but not in ``A[u, ·]`` for its fixed taps.

    Everything is per dimension: ``ranges`` are the offsets that lead from the box back into the image,
    ``slab`` is the part of the image that they reach, and ``taps`` maps the dimensions in which the box
    is thin to the tap of ``u`` that never visits it.
    """

    box: tuple[Interval, ...]
    slab: tuple[Interval, ...]
    ranges: tuple[Interval, ...]
    taps: dict[int, int]

    @property
    def sign(self) -> int:
        """Inclusion and exclusion."""
        return -1 if len(self.taps) % 2 else 1

    @property
    def symmetric(self) -> bool:
        """Whether the box overlaps only itself: opposite offsets are then transposes."""
        return all(self.ranges[dim] == (0, 0) for dim in self.taps)

    @property
    def products(self) -> int:
        """Number of ``C × C`` products per position."""
        offsets = math.prod(high - low + 1 for low, high in self.ranges)
        return (offsets + 1) // 2 if self.symmetric else offsets

    @property
    def volume(self) -> int:
        """Number of positions in the box."""
        return math.prod(stop - start for start, stop in self.box)

    @property
    def inside(self) -> tuple[slice, ...]:
        """The box in the coordinates of the slab."""
        pairs = zip(self.box, self.slab, strict=True)
        return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)

    @property
    def form(self) -> tuple[object, ...]:
        """Strips of one form are multiplied together."""
        sizes = tuple(stop - start for start, stop in self.slab)
        inside = tuple((one.start, one.stop) for one in self.inside)
        return sizes, inside, self.ranges


@lru_cache(maxsize=256)
def strips_of(size: tuple[int, ...], window: Window) -> tuple[tuple[Strip, ...], ...]:
    """The corrections of inclusion and exclusion over all subsets of dimensions, by form."""
    forms: dict[tuple[object, ...], list[Strip]] = {}
    for count in range(1, len(size) + 1):
        for chosen in itertools.combinations(range(len(size)), count):
            options = [list(_missed(dim, size[dim], window)) for dim in chosen]
            for combination in itertools.product(*options):
                box = [(0, n) for n in size]
                ranges = [(1 - k, k - 1) for k in window.kernel]
                for dim, (_, interval, offsets) in zip(chosen, combination, strict=True):
                    box[dim], ranges[dim] = interval, offsets
                slab = tuple(
                    (max(0, start + low * d), min(n, stop + high * d))
                    for (start, stop), (low, high), d, n in zip(
                        box, ranges, window.dilation, size, strict=True
                    )
                )
                taps = {dim: tap for dim, (tap, _, _) in zip(chosen, combination, strict=True)}
                strip = Strip(tuple(box), slab, tuple(ranges), taps)
                forms.setdefault(strip.form, []).append(strip)
    return tuple(tuple(strips) for strips in forms.values())


def _missed(dim: int, size: int, window: Window) -> Iterator[tuple[int, Interval, Interval]]:
    """For each tap: the intervals it never visits and the offsets that lead back into the image."""
    kernel, dilation = window.kernel[dim], window.dilation[dim]
    before, after = window.padding[dim]
    out = size + before + after - dilation * (kernel - 1)
    for tap in range(kernel):
        start = tap * dilation - before
        for low, high in ((0, min(start, size)), (max(start + out, 0), size)):
            if low >= high:
                continue
            # x[q + offset·dilation] must lie inside the image for some q of the interval.
            least = max(-tap, -((high - 1) // dilation))
            most = min(kernel - 1 - tap, (size - 1 - low) // dilation)
            if least <= most:
                yield tap, (low, high), (least, most)


def longest_dim(window: Window) -> int:
    """The dimension in which the kernel is longest, where symmetry saves most."""
    return max(range(len(window.kernel)), key=lambda dim: window.kernel[dim])
