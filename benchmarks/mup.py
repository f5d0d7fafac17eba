"""How much one step changes features, against the width of the network: with μP and without.

    python benchmarks/mup.py [--widths 64,128,256,512,1024] [--seeds 3]

A tanh network of two hidden layers takes a step on eight samples. The number is the slope of
log(root mean square of the change of each layer's outputs before the activation) against log(width): 0
if features learn alike at every width. *With* has initial weights by `kronfac.mup_init_`, rates by
`kronfac.mup_param_groups` and damping relative to the trace. *Without* has torch's initial weights, one
rate, and the default damping. Shampoo is a reference of a few lines.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import kronfac

BASE, INPUTS, CLASSES, SAMPLES = 64, 6, 3, 8
#: Learning rates at the width BASE.
RATES = {"kfac": 0.1, "shampoo": 0.1, "sgd": 0.1}
#: Dampings of K-FAC that do not follow the width.
OTHERS = (kronfac.Relative(0.1), 0.1)
LAYERS = ("input", "hidden", "output")


class Shampoo(Optimizer):
    """``L^-¼ V R^-¼`` with the sums of ``VVᵀ`` and ``VᵀV``; ε is a share of each trace."""

    def __init__(self, groups: list[dict[str, Any]], model: nn.Module, share: float = 1e-3) -> None:
        super().__init__(groups, {})
        self.linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self.share = share
        self.sums: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        rates = {p: group["lr"] for group in self.param_groups for p in group["params"]}
        for module in self.linear:
            V = torch.cat([module.weight.grad, module.bias.grad[:, None]], dim=1)
            left, right = self.sums.get(module, (0 * V @ V.T, 0 * V.T @ V))
            self.sums[module] = left, right = left + V @ V.T, right + V.T @ V
            step = self._root(left) @ V @ self._root(right)
            module.weight -= rates[module.weight] * step[:, :-1]
            module.bias -= rates[module.bias] * step[:, -1]

    def _root(self, moment: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(moment)
        return (vectors * (values.clamp(min=0) + self.share * moment.trace()) ** -0.25) @ vectors.T


def network(width: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()),
        nn.Linear(width, CLASSES),
    ).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, INPUTS, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def optimizer_of(method: str, model: nn.Module, groups: Any, **options: Any) -> Optimizer:
    if method == "sgd":
        return SGD(groups)
    if method == "shampoo":
        return Shampoo(groups, model)
    return kronfac.KFAC(
        model, SGD(groups), rescale=None, factor_every=1, refresh_every=1, **options
    )


def features(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """The outputs of the linear layers, before activations."""
    found = []
    for module in model:
        x = module(x)
        if isinstance(module, nn.Linear):
            found.append(x.detach())
    return found


def changes(
    method: str, width: int, *, mup: bool, seed: int = 0, steps: int = 1, **options: Any
) -> list[float]:
    """The root mean square of the change of each layer's outputs; options are K-FAC's."""
    model, base = network(width, seed), network(BASE, seed + 1000)
    rate = RATES[method]
    groups: list[dict[str, Any]] = [{"params": [*model.parameters()], "lr": rate}]
    if mup:
        kronfac.mup_init_(model, base)
        groups = kronfac.mup_param_groups(model, base, lr=rate, method=method)
        options = {"damping": kronfac.Relative(1e-3, to="trace")} | options
    optimizer = optimizer_of(method, model, groups, **options)
    x, y = data()
    before = features(model, x)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    after = features(model, x)
    return [float((a - b).square().mean().sqrt()) for a, b in zip(after, before, strict=True)]


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Of log(values) against log(widths), by least squares."""
    x, y = [math.log(w) for w in widths], [math.log(v) for v in values]
    return statistics.linear_regression(x, y).slope


def slopes(method: str, widths: Sequence[int], seeds: int = 3, **options: Any) -> list[float]:
    """By layer, from the geometric mean over seeds."""
    found = [
        [changes(method, width, seed=seed, **options) for seed in range(seeds)] for width in widths
    ]
    return [
        slope(widths, [statistics.geometric_mean(run[k] for run in runs) for runs in found])
        for k in range(len(LAYERS))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", default="64,128,256,512,1024")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    widths = [int(width) for width in asked.widths.split(",")]
    print("| optimizer | μP | " + " | ".join(LAYERS) + " |\n|---|---|" + "---|" * len(LAYERS))
    cases: list[tuple[str, str, dict[str, Any]]] = [
        *(
            (method, name, {"mup": name == "with"})
            for method in RATES
            for name in ("without", "with")
        ),
        *(("kfac", f"with, but damping={one}", {"mup": True, "damping": one}) for one in OTHERS),
    ]
    for method, name, options in cases:
        found = slopes(method, widths, asked.seeds, **options)
        cells = " | ".join(f"{one:+.2f}" for one in found)
        print(f"| {method} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
