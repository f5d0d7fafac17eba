"""The optimizers that kronfac is compared with, behind one way to build them.

    steps, missing = peer_steps(WORKLOADS["resnet20"], ["sgd", "soap"], Config(refresh_every=10))

`steps[name]()` is one training step; `missing[name]` says why a peer cannot run.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class PeerUnavailable(Exception):
    """The peer cannot run here; the message says why in a few words."""


class Steppable(Protocol):
    """What a training step needs of an optimizer."""

    def zero_grad(self) -> None: ...
    def step(self) -> Any: ...


@dataclass(frozen=True)
class Config:
    """How often a peer refreshes, and its hyperparameters.

    `factor_every` is the interval of the statistics, `refresh_every` that of the decomposition;
    `PEERS` says what each peer can follow. `lr=None` is the peer's own default. `per_token` says
    that the loss is a mean over tokens. `options` go to the peer's constructor as they are.
    """

    lr: float | None = None
    weight_decay: float = 0.0
    factor_every: int = 1
    refresh_every: int = 10
    per_token: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def common(self, default_lr: float) -> dict[str, Any]:
        """The keyword arguments that every optimizer takes."""
        lr = default_lr if self.lr is None else self.lr
        return {"lr": lr, "weight_decay": self.weight_decay, **self.options}


class Optimizers:
    """Several optimizers, each with its part of one model, as one."""

    def __init__(self, model: nn.Module, members: Iterable[Any]) -> None:
        self.model = model
        self.members = list(members)

    def zero_grad(self) -> None:
        """Clear every gradient of the model."""
        self.model.zero_grad()

    def step(self) -> None:
        """Let every member step."""
        for member in self.members:
            member.step()


class FlatMuon(torch.optim.Muon):
    """torch's Muon, which takes matrices only, on views [d_out, rest] of weights of any rank."""

    def __init__(self, weights: Iterable[nn.Parameter], **kwargs: Any) -> None:
        self.weights = list(weights)
        self.views = [nn.Parameter(w.detach().view(w.shape[0], -1)) for w in self.weights]
        super().__init__(self.views, **kwargs)

    def step(self, closure: Any = None) -> Any:
        """Hand the gradients of the weights to their views and step."""
        if closure is not None:
            raise ValueError("FlatMuon takes no closure: run forward and backward before step().")
        for view, weight in zip(self.views, self.weights, strict=True):
            view.grad = None if weight.grad is None else weight.grad.view_as(view)
        return super().step()


def _sgd(model: nn.Module, config: Config) -> Optimizers:
    options = {"momentum": 0.9, "nesterov": True, **config.common(0.1)}
    return Optimizers(model, [torch.optim.SGD(model.parameters(), **options)])


def _adamw(model: nn.Module, config: Config) -> Optimizers:
    return Optimizers(model, [torch.optim.AdamW(model.parameters(), **config.common(1e-3))])


def _muon(model: nn.Module, config: Config) -> Optimizers:
    # as its author advises, AdamW takes the head
    hidden = [layer.get_parameter("weight") for layer in _matrix_layers(model)[:-1]]
    muon = FlatMuon(hidden, **config.common(0.02))
    return Optimizers(model, [muon, *_rest(model, hidden, config)])


def _soap(model: nn.Module, config: Config) -> Optimizers:
    peer = _import("pytorch_optimizer")
    options = {"precondition_frequency": config.refresh_every, **config.common(3e-3)}
    return Optimizers(model, [peer.SOAP(model.parameters(), **options)])


def _shampoo(model: nn.Module, config: Config) -> Optimizers:
    peer = _import("pytorch_optimizer")
    options = {
        "statistics_compute_steps": config.factor_every,
        "preconditioning_compute_steps": config.refresh_every,
        "start_preconditioning_step": config.refresh_every,
        **config.common(0.1),
    }
    return Optimizers(model, [peer.ScalableShampoo(model.parameters(), **options)])


def _singd(model: nn.Module, config: Config) -> Optimizers:
    peer = _import("singd.optim.optimizer")
    weights = [p for layer in _matrix_layers(model) for p in layer.parameters()]
    options = {
        "T": config.refresh_every,
        "loss_average": "batch+sequence" if config.per_token else "batch",
        "normalize_lr_cov": True,
        **config.common(1e-2),
    }
    singd = peer.SINGD(model, weights, **options)
    return Optimizers(model, [singd, *_rest(model, weights, config)])


def _kfac_pytorch(model: nn.Module, config: Config) -> Optimizers:
    peer = _import("kfac.preconditioner")
    options = {"momentum": 0.9, "nesterov": True, **config.common(0.1)}
    base = torch.optim.SGD(model.parameters(), **options)
    kfac = peer.KFACPreconditioner(
        model,
        factor_update_steps=config.factor_every,
        inv_update_steps=config.refresh_every,
        lr=lambda step: base.param_groups[0]["lr"],
    )
    return Optimizers(model, [kfac, base])


def _matrix_layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]


def _rest(
    model: nn.Module, taken: Iterable[nn.Parameter], config: Config
) -> list[torch.optim.Optimizer]:
    """AdamW on what the peer does not take, if there is anything."""
    ids = {id(p) for p in taken}
    others = [p for p in model.parameters() if id(p) not in ids]
    if not others:
        return []
    return [torch.optim.AdamW(others, lr=1e-3, weight_decay=config.weight_decay)]


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerUnavailable("not installed") from error
    except Exception as error:
        raise PeerUnavailable(f"does not import: {type(error).__name__}") from error


@dataclass(frozen=True)
class Peer:
    """How to build a peer, and what it does with the two intervals."""

    build: Callable[[nn.Module, Config], Optimizers]
    note: str


PEERS: dict[str, Peer] = {
    "sgd": Peer(_sgd, "Nesterov momentum; no intervals"),
    "adamw": Peer(_adamw, "no intervals"),
    "muon": Peer(_muon, "torch.optim.Muon on hidden weights, AdamW on the rest; no intervals"),
    "soap": Peer(_soap, "pytorch_optimizer; statistics every step, QR every refresh_every"),
    "shampoo": Peer(_shampoo, "pytorch_optimizer, SGD graft; both intervals"),
    "kfac-pytorch": Peer(_kfac_pytorch, "kfac-pytorch over SGD; Linear and Conv2d; both intervals"),
    "singd": Peer(_singd, "Linear and Conv2d, AdamW on the rest; all work every refresh_every"),
}


def build(name: str, model: nn.Module, config: Config) -> Optimizers:
    """Build the peer `name` for `model`; raise `PeerUnavailable` where it cannot run."""
    if name not in PEERS:
        raise ValueError(f"Unknown peer {name!r}; choose from {', '.join(PEERS)}.")
    return PEERS[name].build(model, config)


def training_step(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer: Steppable,
) -> Callable[[], Tensor]:
    """One whole step of training on a fixed batch, for any optimizer; returns the loss."""
    inputs, targets = batch

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def peer_steps(
    workload: Callable[[], tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]],
    names: Iterable[str],
    config: Config,
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Training steps of the peers, each on its own model, and the reasons of those left out."""
    steps, missing = {}, {}
    for name in names:
        model, batch, loss_fn = workload()
        try:
            optimizer = build(name, model, config)
        except PeerUnavailable as reason:
            missing[name] = str(reason)
        else:
            steps[name] = training_step(model, batch, loss_fn, optimizer)
    return steps, missing
