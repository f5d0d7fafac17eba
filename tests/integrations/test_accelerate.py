"""Accelerate's loop ends with the same parameters as the plain one that it stands for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import kronfac
from tests.integrations.language_model import llama, sentences, stacked
from tests.training import (
    SAMPLES,
    assert_close,
    assert_same,
    batch,
    kfac,
    loss_of,
    mlp,
    parameters,
)

STEPS = 6


@pytest.fixture(autouse=True)
def _fresh_state(double_precision: None) -> Iterator[None]:
    """Accelerate keeps its precision and its accumulation for the whole process."""
    yield
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def accelerator(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, **options)


def make(**options: Any) -> tuple[nn.Sequential, kronfac.KFAC, StepLR]:
    model = mlp()
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = kfac(model, base, **({"refresh_every": 2, "momentum": 0.5} | options))
    return model, optimizer, StepLR(optimizer, step_size=2)


def loader(samples: int = SAMPLES) -> DataLoader[Any]:
    data = [batch(number) for number in range(STEPS)]
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=samples)


def accelerated(
    owner: Accelerator, samples: int = SAMPLES, clip: float | None = None, **options: Any
) -> nn.Module:
    raw, optimizer, scheduler = make(**options)
    model, optimizer, data, scheduler = owner.prepare(raw, optimizer, loader(samples), scheduler)
    for one in data:
        with owner.accumulate(model):
            owner.backward(loss_of(model, one))
            if clip is not None and owner.sync_gradients:
                owner.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()  # after the step: before it, it would forget micro-batches
    return raw


def plain_loop(clip: float | None = None, autocast: bool = False, **options: Any) -> nn.Sequential:
    model, optimizer, scheduler = make(**options)
    for number in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(batch(number)[0])
        loss_of(nn.Identity(), (output.to(torch.get_default_dtype()), batch(number)[1])).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return model


def test_the_prepared_loop_equals_the_plain_one_bit_for_bit() -> None:
    assert_same(parameters(accelerated(accelerator())), parameters(plain_loop()))


def test_gradients_are_clipped_before_they_are_preconditioned() -> None:
    found = accelerated(accelerator(), clip=0.1)
    assert_same(parameters(found), parameters(plain_loop(clip=0.1)))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulated_micro_batches_equal_one_batch(clip: float | None) -> None:
    owner = accelerator(gradient_accumulation_steps=2)
    found = accelerated(owner, samples=SAMPLES // 2, clip=clip)
    assert_close(parameters(found), parameters(plain_loop(clip)))


def test_bf16_equals_autocast_in_the_plain_loop() -> None:
    torch.set_default_dtype(torch.float32)
    found = accelerated(accelerator(mixed_precision="bf16"))
    assert_same(parameters(found), parameters(plain_loop(autocast=True)))


@pytest.mark.parametrize("fisher", ["empirical", "forward"])
def test_the_scaler_of_accelerate_is_found(fisher: str) -> None:
    # Accelerate has no fp16 on CPUs; its optimizer with a scaler does run there.
    torch.set_default_dtype(torch.float32)
    accelerator()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, twin = mlp(), mlp()
    known = kfac(twin, fisher=fisher)
    wrapped = AcceleratedOptimizer(kfac(model, fisher=fisher), scaler=scaler)
    for number in range(STEPS):
        wrapped.zero_grad()
        scaler.scale(loss_of(model, batch(number))).backward()
        wrapped.step()
        assert not wrapped.step_was_skipped
        known.zero_grad()
        loss_of(twin, batch(number)).backward()
        known.step()
    assert_same(parameters(model), parameters(twin))


def test_saving_and_loading_a_state_resumes_bit_for_bit(tmp_path: Path) -> None:
    def steps(owner: Accelerator, numbers: range, load: bool = False, save: bool = False) -> Any:
        raw, optimizer, scheduler = make(factor_every=2, refresh_every=4)
        model, optimizer, scheduler = owner.prepare(raw, optimizer, scheduler)
        if load:
            owner.load_state(str(tmp_path))
        for number in numbers:
            optimizer.zero_grad()
            owner.backward(loss_of(model, batch(number)))
            optimizer.step()
            scheduler.step()
        if save:
            owner.save_state(str(tmp_path))
        return parameters(raw)

    whole = steps(accelerator(), range(STEPS))
    steps(accelerator(), range(3), save=True)
    resumed = steps(accelerator(), range(3, STEPS), load=True)
    assert_same(resumed, whole)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loss_from_inside_the_model_is_counted_by_its_tokens(precision: str) -> None:
    torch.set_default_dtype(torch.float32)
    owner = accelerator(mixed_precision=precision)
    raw = llama()
    optimizer = kfac(raw, loss_average="token")
    model, prepared = owner.prepare(raw, optimizer)
    rows = stacked(sentences(4))
    owner.backward(model(**rows).loss)
    prepared.step()
    expected = int((rows["labels"][:, 1:] != -100).sum())
    state = next(iter(optimizer._preconditioner.layers.values()))
    assert float(state.running["G"].count or 0) == expected
