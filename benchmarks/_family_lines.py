"""What the defaults of some methods were chosen among, on digits kept apart.

Papers leave open how long steps are, or have a damping in other units. The choice was made with other
seeds and more candidates; here each has three rates around its own, and two seeds that nothing else uses.
"""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from _family import STEPS, Row, find, keep, title
from _trials import Trial

from kronfac import Relative

TASK = "digits"
SEEDS = (110, 111)
#: By method: what a candidate is called, its middle rate, and its options beside momentum.
CANDIDATES: dict[str, dict[str, tuple[float, dict[str, Any]]]] = {
    "eva": {
        "damping 0.03, KL clip": (0.1, {"damping": 0.03, "rescale": "kl-clip"}),
        "damping 0.03, graft": (0.2, {"damping": 0.03, "rescale": "graft"}),
        "damping 1, graft": (0.2, {"damping": 1.0, "rescale": "graft"}),
        "**damping 10, graft**": (0.2, {"damping": 10.0, "rescale": "graft"}),
        "damping 1000, graft": (0.2, {"damping": 1000.0, "rescale": "graft"}),
        "damping 10, auto": (0.1, {"damping": 10.0, "rescale": "auto"}),
    },
    "cgfac": {
        "KL clip": (0.1, {"rescale": "kl-clip"}),
        "graft": (0.1, {"rescale": "graft"}),
        "unit": (0.1, {"rescale": "unit"}),
        "**auto**": (0.1, {"rescale": "auto"}),
    },
    "singd": {
        "KL clip": (0.1, {"rescale": "kl-clip"}),
        "none": (0.01, {"rescale": "none"}),
        "graft": (0.1, {"rescale": "graft"}),
        "**auto**": (0.1, {"rescale": "auto"}),
    },
    "tngd": {
        "KL clip": (0.1, {"rescale": "kl-clip"}),
        "none": (0.01, {"rescale": "none"}),
        "**auto**": (0.1, {"rescale": "auto"}),
    },
    "empiricalngd": {
        "damping 10 times the mean": (0.1, {"damping": Relative(10.0)}),
        "**damping 100 times the mean**": (0.1, {"damping": Relative(100.0)}),
        "damping 1000 times the mean": (0.1, {"damping": Relative(1000.0)}),
    },
    "adafisher": {
        "**the paper's average**": (0.003, {"momentum": 0.0, "nesterov": False}),
        "a true average": (0.03, {"average": "true", "momentum": 0.0, "nesterov": False}),
    },
}


def compare_lines(
    names: Iterable[str], rows: list[Row], trained: Callable[[str, Trial, bool], Row]
) -> None:
    """Train all candidates that have no row yet."""
    for name in names:
        for candidate, (middle, options) in CANDIDATES.get(name, {}).items():
            for rate in (middle / 3, middle, 3 * middle):
                for seed in SEEDS:
                    given = {"momentum": 0.9, "nesterov": True, **options, "lr": rate}
                    one = Trial(TASK, name, STEPS[TASK], seed, tuple(given.items()), alone=True)
                    key = {"stage": "lines", "task": TASK, "optimizer": name}
                    key |= {"candidate": candidate, "rate": float(f"{rate:.3g}"), "seed": seed}
                    if not find(rows, **key):
                        keep(rows, key | trained(TASK, one, True))


def line_cells(rows: list[Row]) -> list[list[str]]:
    """Method, candidate, and the mean accuracies at its rates."""
    lines = []
    for name, candidates in CANDIDATES.items():
        for candidate, (middle, _) in candidates.items():
            cells = []
            for factor in (1 / 3, 1, 3):
                rate = float(f"{factor * middle:.3g}")
                key = {"optimizer": name, "candidate": candidate, "rate": rate}
                found = [row["final"] or 0.0 for row in find(rows, stage="lines", **key)]
                cells.append(f"{100 * statistics.mean(found):.1f} %" if found else "")
            lines.append([title(name), candidate, f"{middle:g}", *cells])
    return lines
