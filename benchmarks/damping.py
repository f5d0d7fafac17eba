"""A damping that does not fit, and one that adapts itself: the loss after a fixed number of steps.

    python benchmarks/damping.py [--seeds 5]

A small tanh network is fitted to a fixed surface: one batch, the exact Fisher, plain SGD with a learning
rate of 1, so that the damping alone says how long a step is. Too large a damping makes steps short; too
small a one makes them overshoot, since K-FAC leaves out how layers act together. The number is the final
loss, the median over seeds, with the damping fixed and with `LevenbergMarquardt` (LM) starting there; and
both again with learning rate and momentum by `rescale="quadratic"`.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

import kronfac

STEPS = 100
DAMPINGS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2)

Damping = float | kronfac.LevenbergMarquardt
Rescale = Literal["quadratic"] | None
RESCALES: tuple[Rescale, ...] = (None, "quadratic")


class Problem:
    """Fit ``sin(2a)·b`` on a hundred fixed points with ten tanh units."""

    def __init__(self, seed: int) -> None:
        points = torch.Generator().manual_seed(7)
        self.x = torch.randn(100, 2, generator=points, dtype=torch.float64)
        self.y = torch.sin(2 * self.x[:, :1]) * self.x[:, 1:]
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1)).double()

    def loss(self, observe: Callable[[Tensor], None] = lambda _: None) -> Tensor:
        """``½‖f - y‖²``, a mean over points; ``observe`` sees the outputs."""
        outputs = self.model(self.x)
        observe(outputs)
        return (outputs - self.y).square().sum(1).mean() / 2


def final_loss(damping: Damping, rescale: Rescale, seed: int) -> float:
    """The loss after `STEPS` steps."""
    problem = Problem(seed)
    optimizer = kronfac.KFAC(
        problem.model,
        torch.optim.SGD(problem.model.parameters(), lr=1.0),
        damping=damping,
        factor_every=1,
        refresh_every=1,
        decay=0.5,
        fisher="exact",
        rescale=rescale,
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(lambda outputs: optimizer.observe(outputs, likelihood="gaussian"))
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    with torch.no_grad():
        return problem.loss().item()


def median_loss(damping: Damping, rescale: Rescale = None, *, seeds: int) -> float:
    """The median of `final_loss` over seeds."""
    return statistics.median(final_loss(damping, rescale, seed) for seed in range(seeds))


def main() -> None:
    from _common import machine_line, table, write_json

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    print(machine_line())
    results = {
        f"{damping:.0e}": {
            f"{rescale}, {name}": median_loss(one, rescale, seeds=seeds)
            for rescale in RESCALES
            for name, one in [("fixed", damping), ("LM", kronfac.LevenbergMarquardt(damping))]
        }
        for damping in DAMPINGS
    }
    rows = [[name, *(f"{loss:.4f}" for loss in row.values())] for name, row in results.items()]
    print(table(["damping", *next(iter(results.values()))], rows))
    write_json("damping", {"steps": STEPS, "seeds": seeds, "loss": results})


if __name__ == "__main__":
    main()
