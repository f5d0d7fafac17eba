"""Between refreshes nothing reads a number back from the device."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

import kronfac
from tests.training import cnn, images, loss_of, step

WAITING = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
}


class CountWaits(TorchDispatchMode):
    """Counts the operations that make the host wait for an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name in WAITING:
            self.waits[name] += 1
        elif name == "_to_copy" and kwargs.get("device") is not None:
            self.waits["copy to another device"] += 1
        elif name == "index" and any(_is_mask(index) for index in args[1]):
            self.waits["index by a mask"] += 1
        return func(*args, **kwargs)


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {"rescale": None},
    "kl-clip": {"rescale": "kl-clip"},
    "trust-region": {"rescale": "trust-region"},
    "graft": {"rescale": "graft"},
    "unit": {"rescale": "unit"},
    "auto": {"rescale": "auto"},
    "orthogonal": {"rescale": "orthogonal"},
    "momentum": {"rescale": None, "momentum": 0.9},
    "nesterov": {"rescale": "graft", "momentum": 0.9, "nesterov": True},
    "cholesky": {"rescale": "graft", "solver": "cholesky"},
    "reduce": {"rescale": "graft", "sharing": "reduce"},
    "forward": {"rescale": "graft", "fisher": "forward"},
    "token": {"rescale": "graft", "loss_average": "token"},
}


def waits(steps_before: int, options: dict[str, Any]) -> Counter[str]:
    """Waits in one forward, backward and step, after some others; statistics at every other step."""
    model = cnn()
    base = SGD(model.parameters(), lr=0.1, foreach=False)
    optimizer = kronfac.KFAC(
        model, base, factor_every=2, refresh_every=8, early_refresh=False, **options
    )
    for number in range(steps_before):
        step(model, optimizer, images(number))
    taken = optimizer.stats()["factor_updates"]
    data = images(9)
    with CountWaits() as counter:
        optimizer.zero_grad()
        loss_of(model, data).backward()
        optimizer.step()
    expected = taken + (steps_before % 2 == 0)
    assert optimizer.stats()["factor_updates"] == expected
    return counter.waits


@pytest.mark.parametrize("options", OPTIONS)
def test_a_plain_step_waits_for_nothing(options: str) -> None:
    assert not waits(3, OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
def test_a_factor_step_waits_for_nothing(options: str) -> None:
    assert not waits(2, OPTIONS[options])


@pytest.mark.filterwarnings("ignore:refresh_every=8 is less than factor_every=10")
def test_a_step_of_a_model_of_sequences_waits_for_nothing() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    base = SGD(model.parameters(), lr=0.1, foreach=False)
    optimizer = kronfac.KFAC(model, base, momentum=0.9, refresh_every=8, early_refresh=False)
    data = torch.arange(5), torch.arange(5) % 3
    step(model, optimizer, data)
    with CountWaits() as counter:
        optimizer.zero_grad()
        loss_of(model, data).backward()
        optimizer.step()
    assert not counter.waits


def test_a_factor_step_of_sampled_labels_waits_for_nothing() -> None:
    model = cnn()
    base = SGD(model.parameters(), lr=0.1, foreach=False)
    optimizer = kronfac.KFAC(model, base, factor_every=1, refresh_every=8, fisher="mc")
    optimizer.observe(model(images()[0]))
    with CountWaits() as counter:
        outputs = model(images(1)[0])
        optimizer.observe(outputs)
    assert not counter.waits


def test_a_factor_step_under_a_scaler_waits_for_nothing() -> None:
    model = cnn()
    scaler = torch.amp.GradScaler("cpu")
    base = SGD(model.parameters(), lr=0.1, foreach=False)
    kronfac.KFAC(model, base, factor_every=1, refresh_every=8, grad_scaler=scaler)
    scaler.scale(loss_of(model, images())).backward()
    with CountWaits() as counter:
        scaler.scale(loss_of(model, images(1))).backward()
    assert not counter.waits


def test_the_counter_sees_a_wait() -> None:
    with CountWaits() as counter:
        torch.ones(2).sum().item()
    assert counter.waits == {"_local_scalar_dense": 1}


FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "Eva": ("Eva", {}),
    "Eva input": ("Eva", {"form": "input"}),
    "Eva gradient": ("Eva", {"form": "gradient"}),
    "MKOR": ("MKOR", {"hybrid": True}),
    "AdaFisher": ("AdaFisher", {}),
}


@pytest.mark.parametrize("name", FAMILY)
def test_a_plain_step_of_the_family_waits_for_nothing(name: str) -> None:
    method, own = FAMILY[name]
    model = cnn()
    base = SGD(model.parameters(), lr=0.1, foreach=False)
    optimizer = getattr(kronfac, method)(model, base, factor_every=2, refresh_every=4, **own)
    for number in range(3):
        step(model, optimizer, images(number))
    with CountWaits() as counter:
        step(model, optimizer, images(3))
    assert not counter.waits
