"""What every benchmark shares: interleaved timing, a table for 80 columns, a JSON file.

A machine's speed drifts, so callables are timed in turns (A B A B ...) and compared as ratios of
the same round.
"""

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
WIDTH = 80


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of a sample."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise `values`; with a single value all three are equal."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __format__(self, spec: str) -> str:
        """Show `median [low, high]`, each number in the format `spec`."""
        return f"{self.median:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one callable, one entry per round."""

    name: str
    seconds: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        """Seconds per call: median and quartiles over rounds."""
        return Spread.of(self.seconds)

    def ratio(self, base: "Timing") -> Spread:
        """How many times slower than `base`, compared round by round."""
        pairs = zip(self.seconds, base.seconds, strict=True)
        return Spread.of([mine / other for mine, other in pairs])


def interleave(
    callables: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    warmup: int = 1,
) -> dict[str, Timing]:
    """Time the callables in turns, one call at a time.

    In a round every callable is called `calls` times and its mean time is one entry. For an
    optimizer with periodic work, `calls` is the period, so that each round holds one whole period
    wherever it starts, and `warmup` covers what happens only at the start. The order rotates from
    turn to turn, so that nobody always runs after the same neighbour.
    """
    if rounds < 1 or calls < 1:
        raise ValueError(f"Invalid {rounds=} or {calls=}: both must be at least 1.")
    names = list(callables)
    for _ in range(warmup):
        for name in names:
            callables[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        total = dict.fromkeys(names, 0.0)
        for turn in range(calls):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                start = time.perf_counter()
                callables[name]()
                total[name] += time.perf_counter() - start
        for name in names:
            seconds[name].append(total[name] / calls)
        names = names[1:] + names[:1]
    return {name: Timing(name, tuple(seconds[name])) for name in callables}


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_line() -> str:
    """`machine()` in one line for the head of a table."""
    m = machine()
    return f"{m['cpu']}, {m['threads']} of {m['cores']} cores, torch {m['torch']}"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, width: int = WIDTH) -> str:
    """Lay out text in columns: the first to the left, the others to the right.

    The first column is cut where the line would be longer than `width`.
    """
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    if any(len(row) != len(headers) for row in cells):
        raise ValueError(f"Every row needs {len(headers)} cells, as the headers {headers} have.")
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = width - sum(widths[1:]) - 2 * (len(widths) - 1)
    if room < min(widths[0], 8):
        raise ValueError(f"{len(widths)} columns need {sum(widths)} characters; {width=}.")
    widths[0] = min(widths[0], room)

    def line(row: Sequence[str]) -> str:
        first = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "…"
        others = [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        return "  ".join([first.ljust(widths[0]), *others]).rstrip()

    rule = "  ".join("-" * w for w in widths)
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def write_json(name: str, results: Mapping[str, Any]) -> Path:
    """Write `benchmarks/results/<name>.json` with the machine and the date beside the results."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    date = datetime.now(UTC).date().isoformat()
    content = {"benchmark": name, "date": date, "machine": machine(), "results": _plain(results)}
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    return path


def _plain(value: Any) -> Any:
    """The same without infinities, which JSON does not know: None is what never came."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(name: str) -> dict[str, Any]:
    """The results of an earlier run, or nothing."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}
