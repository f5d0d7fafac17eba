"""Random training runs: a net, the options of K-FAC, a base optimizer, and batches, all from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import kronfac
from tests.fuzz.making import make_net
from tests.fuzz.nets import Features, Inputs, Net

#: Target of a loss term that does not count.
IGNORED = -100
BASES = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.05),
    "SGD with momentum": lambda net: torch.optim.SGD(
        net.parameters(), lr=0.02, momentum=0.5, weight_decay=0.01
    ),
    # A large eps: gradients that are zero but for rounding must not grow to steps of full length.
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4),
}


@dataclass(frozen=True)
class Case:
    """One run. ``options`` are those of ``kronfac.KFAC``; ``sizes`` are samples per step."""

    seed: int
    features: Features
    options: dict[str, Any]
    base: str
    sizes: tuple[int, ...]
    micro: int
    #: The loss is the sum of its terms divided by ``"samples"``, ``"terms"`` or a number.
    divisor: str | float
    masked: bool
    samples_per_term: int = 1
    #: Whether random draws come from the optimizer's own generator.
    own_draws: bool = False
    ranks: int = field(default=1)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        net, inputs = self.make()
        frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
        return (
            f"seed {self.seed}: {self.base}, K-FAC({options})\n"
            f"steps of {self.sizes} samples, in {self.micro} micro-batches, loss / {self.divisor}, "
            f"masked={self.masked}, {inputs}\nfrozen: {frozen}\n{net}"
        )

    def make(self) -> tuple[Net, Inputs]:
        """The net as it is before the first step, in training mode and float64."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return make_net(self.seed, self.features)
        finally:
            torch.set_default_dtype(before)

    def optimizer(
        self, net: nn.Module, model: nn.Module | None = None, **more: Any
    ) -> kronfac.KFAC:
        """K-FAC over the base; ``model`` is the net or what wraps it."""
        return kronfac.KFAC(model or net, self.make_base(net), **(self.options | more))

    def make_base(self, net: nn.Module) -> Optimizer:
        return BASES[self.base](net)

    @property
    def sampled(self) -> bool:
        return self.options["fisher"] in ("mc", "exact")

    @property
    def has_oracle(self) -> bool:
        """Whether every number of the run follows from the definitions that the oracle knows."""
        unknown_draws = self.options["fisher"] == "mc" and self.own_draws
        plain = self.options["rescale"] is None and not self.options.get("stagger")
        return plain and not unknown_draws

    # --- data ---------------------------------------------------------------------------------

    def batch(self, step: int, micro: int | None = None) -> list[Part]:
        """The micro-batches of a step."""
        micro = micro or self.micro
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        net, inputs = self.make()
        size = self.sizes[step % len(self.sizes)]
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            x = inputs.draw(size, generator)
        finally:
            torch.set_default_dtype(before)
        with torch.no_grad():
            scores = net(x)
        targets = torch.randint(scores.shape[-1], scores.shape[:-1], generator=generator)
        if self.masked:
            hidden = torch.rand(targets.shape, generator=generator) < 0.3
            hidden.flatten()[0] = False
            targets = targets.masked_fill(hidden, IGNORED)
        terms = int((targets != IGNORED).sum())
        divisor = {"samples": size, "terms": terms}.get(str(self.divisor), self.divisor)
        pieces = zip(x.chunk(micro), targets.chunk(micro), strict=True)
        return [Part(*piece, float(divisor)) for piece in pieces]

    def draws(self, step: int, micro: int) -> torch.Generator | None:
        """Where ``observe()`` takes its random numbers from."""
        if self.own_draws:
            return None
        return torch.Generator().manual_seed(1 + 1000 * self.seed + 10 * step + micro)


@dataclass(frozen=True)
class Part:
    """A micro-batch, and what its sum of losses is divided by."""

    x: Tensor
    targets: Tensor
    divisor: float

    @property
    def terms(self) -> int:
        return int((self.targets != IGNORED).sum())

    def loss(self, scores: Tensor) -> Tensor:
        targets = self.targets.flatten()
        total = F.cross_entropy(
            scores.flatten(0, -2), targets, reduction="sum", ignore_index=IGNORED
        )
        return total / self.divisor


# --- drawing ---------------------------------------------------------------------------------


def schedule(step: int) -> float:
    """A damping that changes at every step."""
    return 0.3 / (1 + step)


def make_case(seed: int, features: Features | None = None) -> Case:
    """The run of a seed."""
    rng = Random(1_000_003 + seed)
    options: dict[str, Any] = {
        "fisher": rng.choice(["empirical"] * 5 + ["forward", "mc", "exact"]),
        "sharing": rng.choice(["expand", "expand", "reduce"]),
        "solver": rng.choice(["auto", "eigen", "eigen", "cholesky", "newton-schulz"]),
        "damping": rng.choice([0.03, 0.1, 1.0, schedule]),
        "decay": rng.choice([0.0, 0.5, 0.95, 1.0]),
        "factor_every": rng.choice([1, 1, 2, 3]),
        "refresh_every": rng.choice([1, 1, 2, 3, 12]),
        "loss_average": rng.choice(["batch", "batch", "token", None, 2.5]),
        "rescale": rng.choice([None] * 6 + ["graft", "kl-clip", "unit", "orthogonal", "auto"]),
        "max_dim": rng.choice([8192, 8192, 5]),
        "on_missing": "raise",
    }
    if options["solver"] in ("auto", "eigen") and rng.random() < 0.25:
        options["power"] = rng.choice([0.5, 0.75])
    if rng.random() < 0.4:
        options |= {"momentum": 0.6, "nesterov": rng.random() < 0.5}
    if rng.random() < 0.15:
        options["max_grad_norm"] = 0.5
    if rng.random() < 0.1:
        options["stagger"] = True
    sizes = (6, 4, 6, 6, 5, 4) if rng.random() < 0.5 else (6,)
    return Case(
        seed=seed,
        features=features or Features.chosen(),
        options=options,
        base=rng.choice(["SGD", "SGD", "SGD with momentum", "AdamW"]),
        sizes=sizes,
        micro=rng.choice([1, 1, 2]),
        divisor=rng.choice(["samples", "terms", 1.0, 4.0]),
        masked=rng.random() < 0.2,
        samples_per_term=rng.choice([1, 3]),
        own_draws=rng.random() < 0.3,
    )


def for_ranks(case: Case, world_size: int) -> Case:
    """The run without what ranks may do otherwise than one process.

    That is random draws, summed losses, and a forward that mixes samples.
    """
    options = dict(case.options)
    if options["fisher"] == "mc":
        options["fisher"] = "exact"
    if options["loss_average"] is None:
        options["loss_average"] = "batch"
    return replace(
        case,
        features=replace(case.features, batch_norm=False),
        options=options,
        sizes=(12,),
        masked=False,
        ranks=world_size,
    )
