"""Input covariance of convolutions against unfold + GEMM: time, memory, accuracy, share of peak.

    python benchmarks/covariance.py [--rounds 7]

The baseline is what K-FAC implementations do: collect all patches (`F.unfold`, or strided views
where unfold does not apply), then one matrix product. Claims: the 3x3 stride-1 layers of ResNet-20
and ResNet-50 are at least 3 times faster in the geometric mean and need at most 40 % of unfold's
buffer on top of the result; no shape is slower than 0.95 times the baseline.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from _common import interleave, machine_line, table, write_json
from torch import Tensor

from kronfac.linalg.patches import Window, patches
from kronfac.linalg.sliding import covariance_flops, patch_covariance


@dataclass(frozen=True)
class Shape:
    """One layer: a batch of maps and the kernel that moves over them."""

    name: str
    samples: int
    channels: int
    size: tuple[int, ...]
    window: Window
    claimed: bool = False

    def data(self, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        size = (self.samples, self.channels, *self.size)
        return torch.randn(size, generator=generator).relu().to(dtype)

    @property
    def buffer_bytes(self) -> int:
        """What unfold allocates for the patches."""
        positions = math.prod(self.window.output_size(self.size))
        return 4 * self.samples * positions * self.channels * self.window.taps


def window(
    kernel: tuple[int, ...], stride: int = 1, padding: int | None = None, groups: int = 1
) -> Window:
    dims = len(kernel)
    pads = tuple((k // 2,) * 2 if padding is None else (padding,) * 2 for k in kernel)
    return Window(kernel, (stride,) * dims, (1,) * dims, pads, groups)


SQUARE = window((3, 3))
SHAPES = [
    Shape("ResNet-20 16@32", 128, 16, (32, 32), SQUARE, claimed=True),
    Shape("ResNet-20 32@16", 128, 32, (16, 16), SQUARE, claimed=True),
    Shape("ResNet-20 64@8", 128, 64, (8, 8), SQUARE, claimed=True),
    Shape("ResNet-50 64@56", 32, 64, (56, 56), SQUARE, claimed=True),
    Shape("ResNet-50 128@28", 32, 128, (28, 28), SQUARE, claimed=True),
    Shape("ResNet-50 256@14", 32, 256, (14, 14), SQUARE, claimed=True),
    Shape("ResNet-50 512@7", 32, 512, (7, 7), SQUARE, claimed=True),
    Shape("1x1 64@16", 128, 64, (16, 16), window((1, 1))),
    Shape("1x1 stride 2", 32, 256, (56, 56), window((1, 1), 2)),
    Shape("3x3 stride 2", 128, 16, (32, 32), window((3, 3), 2)),
    Shape("3x3 stride 2 wide", 32, 128, (56, 56), window((3, 3), 2)),
    Shape("7x7 stride 2 stem", 16, 3, (224, 224), window((7, 7), 2, 3)),
    Shape("3x3, 32 groups", 32, 128, (28, 28), window((3, 3), groups=32)),
    Shape("3x3 depthwise", 32, 96, (28, 28), window((3, 3), groups=96)),
    Shape("3x3 no padding", 128, 32, (14, 14), window((3, 3), padding=0)),
    Shape("5x5 32@16", 128, 32, (16, 16), window((5, 5))),
    Shape("5x5 no padding", 128, 6, (14, 14), window((5, 5), padding=0)),
    Shape("1x7 128@17", 32, 128, (17, 17), window((1, 7))),
    Shape("1-D k5", 64, 64, (256,), window((5,))),
    Shape("1-D k5 stride 2", 64, 64, (256,), window((5,), 2)),
    Shape("3-D k3", 8, 32, (16, 16, 16), window((3, 3, 3))),
    Shape("3-D k3 stride 2", 8, 32, (16, 16, 16), window((3, 3, 3), 2)),
    Shape("16x16 patches", 32, 3, (224, 224), window((16, 16), 16, 0)),
]


def unfold_gemm(x: Tensor, w: Window) -> Tensor:
    """The baseline, in its own feature order."""
    if len(w.kernel) == 2:
        pads = tuple(before for before, _ in w.padding)
        columns = F.unfold(x, w.kernel, w.dilation, pads, w.stride)
        rows = columns.transpose(1, 2)
        if w.groups > 1:
            rows = rows.unflatten(2, (w.groups, -1)).permute(2, 0, 1, 3)
    else:
        rows = patches(x, w)
    flat = rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])
    return flat.mT @ flat


def peak_gflops() -> float:
    """Best rate of a square matrix product, the yardstick for the fraction of peak."""
    a = torch.randn(2048, 2048)
    timing = interleave({"gemm": lambda: a @ a}, rounds=7, warmup=2)["gemm"]
    return 2 * 2048**3 / min(timing.seconds) / 1e9


def extra_memory(shape: Shape) -> dict[str, float]:
    """Peak memory beyond input and result, as a share of unfold's buffer, in a process of its own.

    Large blocks are mapped and unmapped one by one there, so that the high-water mark is honest.
    """
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, __file__, "--memory-of", shape.name]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


def measure_memory(shape: Shape) -> None:
    x = shape.data()
    shares = {}
    for name, algorithm in (("unfold", unfold_gemm), ("ours", patch_covariance)):
        # The first call leaves the libraries' own workspaces behind, which all later calls share.
        result_bytes = 4 * algorithm(x, shape.window).numel()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        algorithm(x, shape.window)
        shares[name] = (_status("VmHWM") - before - result_bytes) / shape.buffer_bytes
    print(json.dumps(shares))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{field} is not in /proc/self/status")


def relative_error(shape: Shape) -> float:
    """Largest error against double precision, relative to the largest entry."""
    x = shape.data()[: max(1, shape.samples // 8)]
    exact = patches(x.double(), shape.window)
    flat = exact.flatten(-3, -2)
    reference = flat.mT @ flat
    error = (patch_covariance(x, shape.window).double() - reference).abs().max()
    return float(error / reference.abs().max())


def measure(shape: Shape, rounds: int, peak: float) -> dict[str, object]:
    x = shape.data()
    calls: dict[str, Callable[[], object]] = {
        "unfold": lambda: unfold_gemm(x, shape.window),
        "ours": lambda: patch_covariance(x, shape.window),
    }
    timings = interleave(calls, rounds=rounds, warmup=2)
    ours = timings["ours"].spread.median
    flops = covariance_flops(x.shape, shape.window)
    return {
        "shape": shape.name,
        "claimed": shape.claimed,
        "unfold_ms": 1e3 * timings["unfold"].spread.median,
        "ours_ms": 1e3 * ours,
        "speedup": timings["unfold"].ratio(timings["ours"]).median,
        "fraction_of_peak": flops / ours / 1e9 / peak,
        "memory_share": extra_memory(shape)["ours"],
        "relative_error": relative_error(shape),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        measure_memory(next(s for s in SHAPES if s.name == arguments.memory_of))
        return
    peak = peak_gflops()
    print(machine_line())
    print(
        f"GEMM peak {peak:.0f} GFLOP/s; memory is beyond input and result, in units of unfold's buffer"
    )
    rows = [measure(shape, arguments.rounds, peak) for shape in SHAPES]
    header = ["layer", "unfold ms", "ours ms", "faster", "of peak", "memory", "error"]
    cells = [
        [
            row["shape"],
            f"{row['unfold_ms']:.1f}",
            f"{row['ours_ms']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['fraction_of_peak']:.0%}",
            f"{row['memory_share']:.0%}",
            f"{row['relative_error']:.0e}",
        ]
        for row in rows
    ]
    print(table(header, cells))
    claimed = [row for row in rows if row["claimed"]]
    mean = math.exp(sum(math.log(row["speedup"]) for row in claimed) / len(claimed))
    slowest = min(rows, key=lambda row: row["speedup"])
    most = max(claimed, key=lambda row: row["memory_share"])
    print(f"geometric mean of the ResNet layers: {mean:.2f}x (goal 3x)")
    print(f"slowest shape: {slowest['shape']}, {slowest['speedup']:.2f}x (goal 0.95x)")
    print(f"most memory, ResNet layers: {most['shape']}, {most['memory_share']:.0%} (goal 40 %)")
    write_json("covariance", {"peak_gflops": peak, "geometric_mean": mean, "shapes": rows})


if __name__ == "__main__":
    main()
