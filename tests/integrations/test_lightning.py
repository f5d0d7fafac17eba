"""Lightning's Trainer ends with the same parameters as the plain loop that it stands for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import kronfac
from tests.training import (
    INPUTS,
    SAMPLES,
    assert_close,
    assert_same,
    batch,
    counts,
    kfac,
    loss_of,
    mlp,
    parameters,
)

STEPS = 6


class Classifier(L.LightningModule):
    """The small network of the other tests; ``calls`` says what the training step calls."""

    def __init__(
        self, watch: str = "net", calls: str = "net", options: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.net = mlp()
        self.watch, self.calls, self.options = watch, calls, options or {}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, data: tuple[Tensor, Tensor], index: int) -> Tensor:
        called = self if self.calls == "self" else self.net
        return F.cross_entropy(called(data[0]), data[1])

    def validation_step(self, data: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self(100 * data[0]), data[1])

    def configure_optimizers(self) -> Any:
        watched = self if self.watch == "self" else self.net
        base = SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer = kfac(watched, base, **({"refresh_every": 2} | self.options))
        return [optimizer], [StepLR(optimizer, step_size=2)]


def loader(samples: int = SAMPLES) -> DataLoader[Any]:
    """Batches 0, 1, 2, ... of the other tests, in this order."""
    data = [batch(number) for number in range(STEPS)]
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=samples)


def fit(
    module: L.LightningModule,
    folder: Path,
    epochs: int = 2,
    samples: int = SAMPLES,
    resume: Path | None = None,
    **options: Any,
) -> L.Trainer:
    chosen = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    } | options
    trainer = L.Trainer(max_epochs=epochs, default_root_dir=folder, **chosen)
    trainer.fit(module, loader(samples), loader(samples), ckpt_path=resume)
    return trainer


def plain_loop(
    clip: Callable[[Iterator[nn.Parameter]], Any] = lambda _: None,
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] = loss_of,
    epochs: int = 2,
    **options: Any,
) -> nn.Sequential:
    net = mlp()
    base = SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = kfac(net, base, **({"refresh_every": 2} | options))
    scheduler = StepLR(optimizer, step_size=2)
    for _ in range(epochs):
        for number in range(STEPS):
            optimizer.zero_grad()
            loss(net, batch(number)).backward()
            clip(net.parameters())
            optimizer.step()
        scheduler.step()
    return net


@pytest.fixture(autouse=True)
def _double(double_precision: None) -> None:
    """Equal formulas give equal numbers."""


@pytest.mark.parametrize("watch", ["self", "net"])
@pytest.mark.parametrize("calls", ["self", "net"])
def test_a_fit_equals_the_plain_loop(watch: str, calls: str, tmp_path: Path) -> None:
    module = Classifier(watch, calls)
    fit(module, tmp_path, epochs=4)
    assert_same(parameters(module.net), parameters(plain_loop(epochs=4)))


@pytest.mark.parametrize(
    ("how", "clip"),
    [("norm", lambda p: clip_grad_norm_(p, 0.1)), ("value", lambda p: clip_grad_value_(p, 0.01))],
)
def test_clipping_happens_before_preconditioning(how: str, clip: Any, tmp_path: Path) -> None:
    module = Classifier()
    limit = {"norm": 0.1, "value": 0.01}[how]
    fit(module, tmp_path, gradient_clip_val=limit, gradient_clip_algorithm=how)
    assert_same(parameters(module.net), parameters(plain_loop(clip)))


@pytest.mark.parametrize("watch", ["self", "net"])
def test_accumulated_batches_equal_one_batch(watch: str, tmp_path: Path) -> None:
    module = Classifier(watch)
    fit(module, tmp_path, samples=SAMPLES // 2, accumulate_grad_batches=2)
    assert_close(parameters(module.net), parameters(plain_loop()))


def test_bf16_mixed_equals_autocast_in_the_plain_loop(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)

    def loss(net: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return loss_of(net, data)

    module = Classifier()
    fit(module, tmp_path, precision="bf16-mixed")
    assert_same(parameters(module.net), parameters(plain_loop(loss=loss)))


def test_16_mixed_finds_the_scaler_of_lightning(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    scaler = torch.amp.GradScaler("cpu")

    def loss(net: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.half, cache_enabled=False):
            return loss_of(net, data)

    net = mlp()
    optimizer = kfac(net, SGD(net.parameters(), lr=0.1), grad_scaler=scaler)
    for number in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss(net, batch(number))).backward()
        scaler.step(optimizer)
        scaler.update()

    module = Classifier()
    module.configure_optimizers = lambda: kfac(  # type: ignore[method-assign]
        module.net, SGD(module.net.parameters(), lr=0.1)
    )
    # With precision="16-mixed" Lightning would choose bfloat16 on CPUs.
    fit(module, tmp_path, epochs=1, plugins=[MixedPrecision("16-mixed", "cpu")])
    assert_same(parameters(module.net), parameters(net))


class Manual(Classifier):
    """Manual optimization with clipping, by Lightning's own names."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, data: tuple[Tensor, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(data, index))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()


def test_manual_optimization_equals_the_plain_loop(tmp_path: Path) -> None:
    module = Manual()
    fit(module, tmp_path)
    expected = plain_loop(lambda p: clip_grad_norm_(p, 0.1))
    assert_same(parameters(module.net), parameters(expected))


def test_options_may_be_set_through_lightnings_wrapper(tmp_path: Path) -> None:
    module = Manual()
    fit(module, tmp_path)
    wrapper = module.optimizers()
    wrapper.damping = 0.5
    assert wrapper.optimizer.damping == 0.5
    assert "step 12" in wrapper.summary()


def test_validation_between_steps_is_not_observed(tmp_path: Path) -> None:
    module = Classifier("self", "self")
    trainer = fit(module, tmp_path, val_check_interval=1, num_sanity_val_steps=2)
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, kronfac.KFAC)
    assert_same(parameters(module.net), parameters(plain_loop()))


@pytest.mark.parametrize("watch", ["self", "net"])
def test_a_resumed_fit_equals_an_uninterrupted_one_bit_for_bit(watch: str, tmp_path: Path) -> None:
    options = {"refresh_every": 5, "factor_every": 2, "momentum": 0.5}
    whole = Classifier(watch, options=options)
    fit(whole, tmp_path, epochs=4)
    first = Classifier(watch, options=options)
    trainer = fit(first, tmp_path, epochs=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second = Classifier(watch, options=options)
    fit(second, tmp_path, epochs=4, resume=tmp_path / "half.ckpt")
    assert_same(parameters(second), parameters(whole))


class SharedLayer(nn.Module):
    """Uses one layer twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.body(x).tanh()))


@pytest.mark.parametrize("watch", ["self", "net"])
def test_samples_are_counted_when_the_modules_own_forward_is_never_called(
    watch: str, tmp_path: Path
) -> None:
    module = Classifier(watch, calls="net", options={"decay": 0.0})
    module.net = SharedLayer()  # type: ignore[assignment]
    trainer = fit(module, tmp_path, epochs=1)
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, kronfac.KFAC)
    assert set(counts(optimizer, "G").values()) == {float(SAMPLES)}


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_that_the_training_step_skips_does_no_harm(tmp_path: Path) -> None:
    class Skips(Classifier):
        def training_step(self, data: tuple[Tensor, Tensor], index: int) -> Tensor | None:  # type: ignore[override]
            return None if index == 2 else super().training_step(data, index)

    module = Skips()
    trainer = fit(module, tmp_path, epochs=1)
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, kronfac.KFAC)
    assert optimizer.stats()["steps"] == STEPS
    assert all(torch.isfinite(p).all() for p in module.parameters())
