"""Mixed precision on embeddings, attention and norms: skipped steps, and how close factors stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import kronfac
from tests.layers.kinds import Tagger
from tests.layers.watching import assert_roughly, statistics
from tests.training import assert_same, kfac, layers, parameters

STEPS = 3
SCALE, BACKOFF, LARGE = 2.0**120, 2.0**-50, 2.0**110
NAMES = [f"attention.{part}" for part in ("query", "key", "value", "out_proj")]
NAMES += ["embedding", "norm", "head"]


def build(**options: Any) -> tuple[Tagger, kronfac.KFAC]:
    torch.manual_seed(0)
    model = Tagger()
    options = {"loss_average": "token", "refresh_every": 2} | options
    return model, kfac(model, AdamW(model.parameters(), lr=0.01), **options)


def tokens(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(9, (6, 3), generator=generator)
    return x, torch.randint(3, (6, 3), generator=generator)


def loss_of(model: nn.Module, number: int) -> Tensor:
    x, y = tokens(number)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def kept(optimizer: kronfac.KFAC) -> dict[str, Tensor]:
    """Everything that is saved, apart from the number of what was dropped."""
    return {k: v for k, v in statistics(optimizer).items() if not k.endswith("dropped")}


# --- gradient scalers ------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("skipped", [1, 2])
def test_steps_that_the_scaler_skips_at_the_start(skipped: int, sharing: str, known: bool) -> None:
    """They leave the inputs of their forwards in A, and nothing else, in layers of any kind."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, backoff_factor=BACKOFF)
    model, optimizer = build(sharing=sharing, **({"grad_scaler": scaler} if known else {}))
    before = parameters(model)
    for number in range(skipped + STEPS):
        optimizer.zero_grad()
        large = LARGE if number < skipped else 1.0
        scaler.scale(large * loss_of(model, number)).backward()
        scaler.step(optimizer)
        scaler.update()
        if number < skipped:
            assert_same(parameters(model), before)
            assert optimizer.stats()["steps"] == 0

    twin, reference = build(sharing=sharing)
    for number in range(skipped):
        loss_of(twin, number)  # a forward whose gradient is never used
    for number in range(skipped, skipped + STEPS):
        reference.zero_grad()
        loss_of(twin, number).backward()
        reference.step()
    assert_same(parameters(model), parameters(twin))
    assert_same(kept(optimizer), kept(reference))


@pytest.mark.parametrize("name", NAMES)
def test_without_their_forwards_a_run_differs_in_the_inputs_of_skipped_steps_only(
    name: str,
) -> None:
    """G, and what norms keep, are those of a run that never saw them; A has their rows as well."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, backoff_factor=BACKOFF)
    model, optimizer = build(grad_scaler=scaler)
    twin, reference = build()
    for number in range(2):
        optimizer.zero_grad()
        scaler.scale((LARGE if number == 0 else 1.0) * loss_of(model, number)).backward()
        scaler.step(optimizer)
        scaler.update()
    loss_of(twin, 1).backward()
    reference.step()
    found, expected = layers(optimizer)[name].running, layers(reference)[name].running
    for key, running in found.items():
        more = running.statistic.source == "input"
        assert float(running.count) == float(expected[key].count) * (2 if more else 1)
        assert torch.equal(running.sum, expected[key].sum) != more


def test_layers_count_what_they_dropped() -> None:
    """At once; a norm holds its rows until the step, and forgets them with the gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, backoff_factor=BACKOFF)
    model, optimizer = build(grad_scaler=scaler)
    scaler.scale(LARGE * loss_of(model, 0)).backward()
    assert optimizer.stats()["dropped"] == dict.fromkeys(
        (name for name in layers(optimizer) if name != "norm"), 1
    )


# --- autocast --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_are_single_precision_and_close(
    dtype: torch.dtype, rtol: float, sharing: str
) -> None:
    """Rows are rounded by the model's own products; sums of their squares are not rounded again."""
    found = []
    for enabled in (True, False):
        model, optimizer = build(sharing=sharing)
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            loss = loss_of(model, 0)
        (1024 * loss).backward()  # half precision cannot hold small gradients
        optimizer.step()
        found.append({n: state.running for n, state in layers(optimizer).items()})
    half, single = found
    for name, running in half.items():
        for key, one in running.items():
            assert one.sum.dtype == torch.float32
            assert float(one.count) == float(single[name][key].count)
            if sharing == "reduce" and (name, key) == ("attention.key", "G"):
                continue  # softmax ignores a shift of all keys: their gradients sum to rounding
            assert_roughly(one.mean(), single[name][key].mean(), rtol)
    assert not torch.equal(half["head"]["G"].sum, single["head"]["G"].sum)  # autocast was on
