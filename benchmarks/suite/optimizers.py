"""The optimizers of the suite, each with its three rates; the second is the one to start with.

Every rival gets what it needs: Muon, Newton-Muon and SOAP before polar leave heads, embeddings, biases
and norms to an AdamW with a rate of its own. SGD's rates are divided by the scale of a task's gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import kronfac
from kronfac.linalg.orthogonal import nearest_orthogonal
from kronfac.train.optim.muon import FlatMuon, hidden_weights, muon_with_adamw
from suite.tasks import Task

#: Of the AdamW beside Muon and its relatives: right on three tasks that are not in the suite.
OTHER_RATE = 2e-3
#: Modules whose inputs are not observed.
UNSEEN = (nn.RNNBase, nn.modules.conv._ConvTransposeNd)


@dataclass(frozen=True)
class Entry:
    """How to build an optimizer, and its rates."""

    make: Callable[[nn.Module, float, Task], Any]
    rates: tuple[float, ...]
    by_gradient: bool = False

    def rates_of(self, task: Task) -> tuple[float, ...]:
        return tuple(rate / task.gradient if self.by_gradient else rate for rate in self.rates)


def sgd(model: nn.Module, lr: float, task: Task) -> Any:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)


def adamw(model: nn.Module, lr: float, task: Task) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def muon(model: nn.Module, lr: float, task: Task) -> Any:
    options = {"lr": lr, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0}
    return muon_with_adamw(model, options, {"lr": OTHER_RATE, "weight_decay": 0.0})


def soap(model: nn.Module, lr: float, task: Task) -> Any:
    from pytorch_optimizer import SOAP

    return SOAP(model.parameters(), lr=lr, betas=(0.95, 0.95), weight_decay=0.0)


class Beside:
    """An optimizer of hidden matrices, and AdamW for the rest; the schedule acts on both."""

    def __init__(
        self, members: Sequence[Any], model: nn.Module, own: Sequence[nn.Parameter]
    ) -> None:
        known = set(own)
        rest = [p for p in model.parameters() if p not in known]
        self.members = list(members)
        if rest:
            self.members.append(torch.optim.AdamW(rest, lr=OTHER_RATE, weight_decay=0.0))
        self.model = model

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.members for group in one.param_groups]

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def step(self) -> None:
        for one in self.members:
            one.step()


def newton_muon(model: nn.Module, lr: float, task: Task) -> Any:
    """Momentum, the inverse of the inputs' second moment, polar factor; ridge 0.2 of its trace.

    Weights whose inputs are not seen (recurrent ones, transposed convolutions) have Muon.
    """
    hidden = hidden_weights(model)
    modules = dict(model.named_modules())
    names = {p: name.rpartition(".")[0] for name, p in model.named_parameters()}
    unseen = [p for p in hidden if isinstance(modules[names[p]], UNSEEN)]
    seen = [p for p in hidden if p not in set(unseen)]
    rest = [FlatMuon(unseen, lr=lr, momentum=0.95, weight_decay=0.0)] if unseen else []
    if not seen:
        return Beside(rest, model, hidden)
    base = torch.optim.SGD([{"params": seen}], lr=lr)
    first = kronfac.KFAC(
        model,
        base,
        fisher="forward",
        solver="cholesky",
        damping=kronfac.Relative(0.04),  # √0.04 of the input's mean
        rescale="orthogonal",
        decay=0.95,
        factor_every=1,
        refresh_every=16,
        momentum=0.95,
        nesterov=True,
        include=[names[p] for p in seen],
        on_missing="ignore",
    )
    return Beside([first, *rest], model, hidden)


class SoapPolar(torch.optim.Optimizer):
    """SOAP's direction made orthogonal, every step, for matrices of any rank flattened to two."""

    def __init__(self, params: Any, lr: float, decay: float = 0.95, every: int = 10) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "every": every})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad.reshape(len(p), -1), group)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, decay = self.state[p], group["decay"]
        if not state:
            state |= {"step": 0, "m": torch.zeros_like(grad), "v": torch.zeros_like(grad)}
            state |= {"L": grad @ grad.T, "R": grad.T @ grad}
            state["QL"], state["QR"] = (
                torch.linalg.eigh(state[side]).eigenvectors for side in "LR"
            )
        state["step"] += 1
        left, right = state["QL"], state["QR"]
        turned = left.T @ grad @ right
        state["m"].lerp_(grad, 1 - decay)
        state["v"].lerp_(turned.square(), 1 - decay)
        ahead = left.T @ (decay * state["m"] + (1 - decay) * grad) @ right
        correction = 1 - decay ** state["step"]
        step = left @ (ahead / (state["v"] / correction).sqrt().add(1e-8)) @ right.T
        rows, columns = step.shape
        step = nearest_orthogonal(step) * max(1.0, rows / columns) ** 0.5
        p.add_(step.reshape(p.shape), alpha=-group["lr"])
        state["L"].lerp_(grad @ grad.T, 1 - decay)
        state["R"].lerp_(grad.T @ grad, 1 - decay)
        if state["step"] % group["every"] == 0:
            for side in "LR":
                state[f"Q{side}"] = torch.linalg.qr(state[side] @ state[f"Q{side}"]).Q


def soap_polar(model: nn.Module, lr: float, task: Task) -> Any:
    hidden = hidden_weights(model)
    return Beside([SoapPolar(hidden, lr)], model, hidden)


def kfac(
    model: nn.Module,
    lr: float,
    task: Task,
    relative: float | None = None,
    momentum_after: bool = False,
    inputs: bool = True,
    head: float = 1.0,
    **options: Any,
) -> Any:
    """The README's line, and what ablations change of it.

    `relative` is a damping relative to the curvature. `momentum_after` leaves momentum to SGD. Without
    `inputs` their second moments count as the identity. `head` multiplies the last linear layer's rate.
    """
    place = {"momentum": 0.9, "nesterov": True}
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if head != 1:
        last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
        own = set(last.parameters())
        rest = [p for p in model.parameters() if p not in own]
        groups = [{"params": rest}, {"params": list(last.parameters()), "lr": lr * head}]
    base = torch.optim.SGD(groups, lr=lr, **(place if momentum_after else {}))
    options = {**({} if momentum_after else place), **task.options, **options}
    if relative is not None:
        options["damping"] = kronfac.Relative(relative)
    optimizer = kronfac.KFAC(model, base, **options)
    for state in [] if inputs else optimizer.layers:
        if state.rule == "orthogonal":
            state.block.observe_input = _no_inputs(state.block)
    return optimizer


def _no_inputs(block: Any) -> Callable[..., dict[str, Tensor]]:
    """What a block observes if every row of its inputs had the identity as its second moment."""
    shape, dtype = block.statistics["A"].sum_shape, block.dtype

    def observe(rows: Any, *_: Any) -> dict[str, Tensor]:
        return {"A": torch.eye(shape[-1], dtype=dtype).expand(shape) * rows.count}

    return observe


ENTRIES = {
    "K-FAC": Entry(kfac, (0.03, 0.1, 0.3)),
    "SGD": Entry(sgd, (0.02, 0.05, 0.15), by_gradient=True),
    "AdamW": Entry(adamw, (1e-3, 3e-3, 1e-2)),
    "Muon": Entry(muon, (0.01, 0.03, 0.1)),
    "SOAP": Entry(soap, (1e-3, 3e-3, 1e-2)),
    "Newton-Muon": Entry(newton_muon, (0.01, 0.03, 0.1)),
    "SOAP, polar": Entry(soap_polar, (0.01, 0.03, 0.1)),
}
