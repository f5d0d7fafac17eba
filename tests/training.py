"""Small models, batches and loops that the tests of the optimizer share."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import kronfac

INPUTS, CLASSES, SAMPLES = 4, 3, 8


# --- models and batches ----------------------------------------------------------------------


def mlp(seed: int = 0, **kwargs: Any) -> nn.Sequential:
    """Three linear layers, ``"0"``, ``"2"`` and ``"4"``."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, 5, **kwargs),
        nn.Tanh(),
        nn.Linear(5, 4, **kwargs),
        nn.Tanh(),
        nn.Linear(4, CLASSES, **kwargs),
    )


def cnn(seed: int = 0, **kwargs: Any) -> nn.Sequential:
    """Two convolutions with in-place activations and a linear head, for images ``[N, 1, 4, 4]``."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, **kwargs),
        nn.ReLU(inplace=True),
        nn.Conv2d(2, 3, 2, stride=2, **kwargs),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(12, CLASSES, **kwargs),
    )


def batch(
    number: int = 0, samples: int = SAMPLES, shape: tuple[int, ...] = (INPUTS,)
) -> tuple[Tensor, Tensor]:
    """The same inputs and labels whenever the number is the same, in the default dtype."""
    generator = torch.Generator().manual_seed(1000 + number)
    x = torch.randn(samples, *shape, generator=generator)
    return x, torch.randint(CLASSES, (samples,), generator=generator)


def images(number: int = 0, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    return batch(number, samples, shape=(1, 4, 4))


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


# --- optimizers ------------------------------------------------------------------------------


def kfac(model: nn.Module, base: Optimizer | None = None, **options: Any) -> kronfac.KFAC:
    """K-FAC that takes statistics and refreshes at every step and does not rescale."""
    chosen = {"damping": 0.1, "factor_every": 1, "refresh_every": 1, "decay": 0.95}
    chosen |= {"rescale": None, **options}
    return kronfac.KFAC(model, base or SGD(model.parameters(), lr=0.1), **chosen)


def frozen_kfac(model: nn.Module, **options: Any) -> kronfac.KFAC:
    """K-FAC whose base does not move: after a step, ``.grad`` holds what would have been applied."""
    return kfac(model, SGD(model.parameters(), lr=0.0), **options)


# --- loops -----------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: Optimizer, data: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    loss_of(model, data).backward()
    optimizer.step()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    numbers: Iterable[int],
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """One step on each of the numbered batches."""
    for number in numbers:
        step(model, optimizer, batch(number))
        after_step()


def applied(
    model: nn.Module, optimizer: Optimizer, data: tuple[Tensor, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take a step; return the gradients before and after preconditioning."""
    optimizer.zero_grad()
    loss_of(model, data).backward()
    before = gradients(model)
    optimizer.step()
    return before, gradients(model)


# --- looking ---------------------------------------------------------------------------------


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def layers(optimizer: kronfac.KFAC) -> dict[str, Any]:
    """What the optimizer keeps for each layer, by name: the one look behind the public names."""
    states = optimizer._preconditioner.layers.values()
    return {state.name: state for state in states if state.has_curvature}


def factors(optimizer: kronfac.KFAC, side: str) -> dict[str, Tensor]:
    """The averaged factor of each layer that has one."""
    having = {name: state for name, state in layers(optimizer).items() if side in state.running}
    means = {name: state.running[side].mean() for name, state in having.items()}
    return {name: mean for name, mean in means.items() if mean is not None}


def counts(optimizer: kronfac.KFAC, side: str) -> dict[str, float]:
    """How many rows (A) or samples (G) each layer has counted."""
    having = {name: state for name, state in layers(optimizer).items() if side in state.running}
    running = {name: state.running[side] for name, state in having.items()}
    return {name: 0.0 if r.count is None else float(r.count) for name, r in running.items()}


def hooks(model: nn.Module) -> int:
    """Number of forward hooks on all modules."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def option_id(options: dict[str, Any]) -> str:
    """A readable name for a parametrized test, the same in every run."""
    parts = [name if callable(value) else f"{name}={value}" for name, value in options.items()]
    return ",".join(parts) or "defaults"


# --- comparing -------------------------------------------------------------------------------


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Nested containers are equal bit for bit."""
    assert type(left) is type(right), path
    if isinstance(left, Mapping):
        assert sorted(map(str, left)) == sorted(map(str, right)), path
        for key in left:
            assert_same(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{path}[{index}]")
    elif isinstance(left, Tensor):
        torch.testing.assert_close(left, right, rtol=0, atol=0, msg=lambda m: f"{path}: {m}")
    else:
        assert left == right, path


def assert_close(left: Any, right: Any) -> None:
    """Nested containers are equal up to the rounding of float64."""
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


def differs(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return any(not torch.equal(left[name], right[name]) for name in left)


def saved_and_loaded(value: Any) -> Any:
    """Through a file that may hold nothing but tensors and plain values."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def snapshot(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of this moment; later steps do not change it."""
    return copy.deepcopy(optimizer.state_dict())
