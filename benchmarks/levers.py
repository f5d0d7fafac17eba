"""What each lever of a step's linear algebra costs and what error it has, off and on.

    python benchmarks/levers.py [--seconds 1.0]

Shapes are those of ResNet-20, of the transformer and of the perceptron of `_models.py`. Sides of a lever
take turns; a time is the least processor time of one thread, to which other work on a machine adds
little. Errors of orthogonal steps are 1 - cosine with the exact polar factor, those of preconditioning
are relative to float64.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import machine, machine_line, table, write_json
from torch import Tensor

from kronfac.linalg.narrow import supported
from kronfac.linalg.orthogonal import nearest_orthogonal
from kronfac.methods.kfac.block import KFACBlock
from kronfac.methods.kfac.separable import SeparableBlock

#: Matrices of equal shape in each model: how many, rows, columns.
SHAPES = {
    "resnet20": [(6, 16, 144), (5, 32, 288), (5, 64, 576)],
    "transformer": [(4, 384, 129), (4, 128, 129), (4, 512, 129), (4, 128, 513), (1, 256, 128)],
    "mlp": [(1, 1024, 785), (1, 1024, 1025)],
}
#: Muon's coefficients, which orthogonal steps had before.
MUON = (3.4445, -4.7750, 2.0315)


def five_equal_steps(matrices: Tensor) -> Tensor:
    """Muon's iteration, for comparison."""
    first, third, fifth = MUON
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    square, total = x @ x.mT, None
    wide = 2 * x.shape[-2] <= x.shape[-1]  # then all steps are one polynomial in XXᵀ
    for _ in range(5):
        step = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        if wide:
            step.diagonal(dim1=-2, dim2=-1).add_(first)
            total = step if total is None else step @ total
            square = (step @ square) @ step
        else:
            x = first * x + step @ x
            square = x @ x.mT
    x = x if total is None else total @ x
    return x.mT if tall else x


def least_times(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Milliseconds of each call, in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    end = time.process_time() + seconds
    while time.process_time() < end:
        for name, call in calls.items():
            started = time.process_time()
            call()
            best[name] = min(best[name], 1e3 * (time.process_time() - started))
    return best


def polar_error(found: Tensor, matrix: Tensor) -> float:
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    exact = left @ right
    return 1 - float((found.double() * exact).sum() / (found.double().norm() * exact.norm()))


def spectrum(count: int, rows: int, columns: int) -> Tensor:
    """Random steps whose singular values fall over two decades, as those of trained networks do."""
    made = torch.randn(count, rows, columns)
    left, values, right = torch.linalg.svd(made, full_matrices=False)
    return (left * torch.logspace(0, -2, values.shape[-1])) @ right


def polar(seconds: float, *shape: int) -> dict[str, Any]:
    steps = spectrum(*shape)
    calls: dict[str, Callable[[], Tensor]] = {
        "five equal steps": lambda: five_equal_steps(steps),
        "four quintics": lambda: nearest_orthogonal(steps),
        "four quintics, bfloat16": lambda: nearest_orthogonal(steps, narrow=True),
    }
    times = least_times(calls, seconds)
    errors = {name: polar_error(call()[0], steps[0]) for name, call in calls.items()}
    return {name: {"ms": times[name], "error": errors[name]} for name in calls}


def preconditioning(seconds: float, *shape: int) -> dict[str, Any]:
    count, rows, columns = shape
    solution = {}
    for side, width in (("A", columns), ("G", rows)):
        values = torch.logspace(0, -3, width).expand(count, width)
        solution[f"{side}.vectors"] = torch.linalg.qr(torch.randn(count, width, width))[0]
        solution[f"{side}.values"] = values.contiguous()
    # A gradient is large where curvature is.
    roots = [solution[f"{side}.values"].sqrt() for side in "GA"]
    gradient = torch.randn(shape) * roots[0][..., None] * roots[1][..., None, :]
    gradient = solution["G.vectors"] @ gradient @ solution["A.vectors"].mT
    block = KFACBlock(
        shape[1:],
        torch.float32,
        solver="eigen",
        max_dim=8192,
        output_factor=True,
        per_sample=False,
    )
    exact = block.precondition(
        {name: value.double() for name, value in solution.items()}, gradient.double(), 1e-4
    )

    def applied(narrow: bool) -> Tensor:
        block.narrow = narrow
        return block.precondition(solution, gradient, 1e-4)

    pair = SeparableBlock(
        shape[1:], torch.float32, max_dim=8192, output_factor=True, per_sample=False
    )
    inverses = pair.prepare(solution, 1e-4)
    calls = {
        "float32": lambda: applied(False),
        "bfloat16 after": lambda: applied(True),
        "separable": lambda: pair.precondition(inverses, gradient, 1e-4),
    }
    times = least_times(calls, seconds)
    return {
        name: {"ms": times[name], "error": float((call() - exact).norm() / exact.norm())}
        for name, call in calls.items()
    }


LEVERS = {"polar": polar, "precondition": preconditioning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{machine_line()}, bfloat16 faster: {supported(torch.device('cpu'))}")
    results: dict[str, Any] = {"machine": machine()}
    for lever, measure in LEVERS.items():
        rows = []
        for model, shapes in SHAPES.items():
            for shape in shapes:
                found = measure(arguments.seconds, *shape)
                results.setdefault(lever, {})[f"{model} {'x'.join(map(str, shape))}"] = found
                base = next(iter(found.values()))["ms"]
                for name, one in found.items():
                    cells = [f"{one['ms']:.2f}", f"{base / one['ms']:.2f}", f"{one['error']:.1e}"]
                    rows.append([f"{model} {shape}: {name}", *cells])
        print(f"\n{lever}\n" + table(["shape", "ms", "times as fast", "error"], rows))
    write_json("levers", results)


if __name__ == "__main__":
    main()
