"""Models that people train, in the ways that they train them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import kronfac
from tests.integrations.real_models import CASES, Case
from tests.layers.watching import left_out
from tests.training import assert_close, counts, gradients, layers, parameters

BF16 = torch.bfloat16
HUGGING_FACE = [name for name in CASES if name != "resnet20"]


def watched(case: Case, model: nn.Module, **options: Any) -> kronfac.KFAC:
    """K-FAC over AdamW."""
    chosen = {"factor_every": 1, "refresh_every": 2, "damping": 1e-2} | options
    base = AdamW(model.parameters(), lr=1e-2)
    return kronfac.KFAC(model, base, loss_average=case.average, **chosen)


def losses(
    case: Case, model: nn.Module, optimizer: kronfac.KFAC, steps: int, autocast: bool = False
) -> list[float]:
    """Losses on the same batch before each step."""
    found = []
    data = case.batch(next(model.parameters()).dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            loss = model(**data).loss
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def tensors(optimizer: kronfac.KFAC) -> list[Tensor]:
    """All statistics and solutions."""
    found: list[Tensor] = []
    for state in layers(optimizer).values():
        found += [running.sum for running in state.running.values()]
        found += state.solution.values()
    return found


# --- what becomes of each parameter ----------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_layers_are_those_that_one_expects(name: str) -> None:
    case = CASES[name]
    model = case.model()
    optimizer = watched(case, model)
    losses(case, model, optimizer, steps=1)
    assert sorted(layers(optimizer)) == sorted(case.layers)
    assert optimizer.stats()["without_solution"] == []
    notes = {n: state.note for n, state in layers(optimizer).items() if state.note}
    assert sorted(notes) == sorted(case.notes)
    assert all(note.startswith(case.notes[n]) for n, note in notes.items())


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_in_the_table_or_listed_with_a_reason(name: str) -> None:
    case = CASES[name]
    model = case.model()
    optimizer = watched(case, model)
    losses(case, model, optimizer, steps=1)
    listed = left_out(optimizer)
    assert sorted(listed) == sorted(case.left_out)
    assert all(reason.startswith(case.left_out[n]) for n, reason in listed.items())
    text = optimizer.summary()
    shown = re.findall(r"([\d,]+) parameters(?: preconditioned|\):)", text)
    total = sum(p.numel() for p in model.parameters())  # a tied weight is one parameter
    assert sum(int(number.replace(",", "")) for number in shown) == total


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rescale", ["auto", "graft"])
def test_gradients_of_these_layers_are_changed_and_others_by_their_length(
    name: str, rescale: str
) -> None:
    case = CASES[name]
    model = case.model()
    optimizer = watched(case, model, rescale=rescale)
    model(**case.batch()).loss.backward()
    before = gradients(model)
    optimizer.step()
    after = gradients(model)
    same = {n for n, grad in before.items() if torch.equal(grad, after[n])}
    assert same == (set() if rescale == "auto" else set(case.left_out))


@pytest.mark.parametrize("name", CASES)
def test_samples_are_the_terms_of_the_loss(name: str) -> None:
    case = CASES[name]
    model = case.model()
    optimizer = watched(case, model)
    losses(case, model, optimizer, steps=1)
    assert set(counts(optimizer, "G").values()) == {case.terms}


# --- training --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["autocast", *(pytest.param(one, marks=pytest.mark.slow) for one in ("single", "half"))]
)
@pytest.mark.parametrize("name", CASES)
def test_the_loss_falls(name: str, way: str) -> None:
    case = CASES[name]
    model = case.model(BF16 if way == "half" else torch.float32)
    optimizer = watched(case, model)
    found = losses(case, model, optimizer, steps=20, autocast=way == "autocast")
    assert found[-1] < 0.8 * found[0]
    assert torch.tensor(found).isfinite().all()
    assert {tensor.dtype for tensor in tensors(optimizer)} == {torch.float32}
    assert optimizer.stats()["without_solution"] == []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_gradient_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    case, results, calls = CASES[name], [], []
    for checkpointed in (False, True):
        model = case.model(torch.float64)
        base = SGD(model.parameters(), lr=1e-2)
        options = {"factor_every": 1, "refresh_every": 2, "damping": 1e-2, "rescale": None}
        optimizer = kronfac.KFAC(model, base, loss_average=case.average, **options)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        seen: list[None] = []
        inner = model.get_submodule(case.layers[len(case.layers) // 2])
        inner.register_forward_hook(lambda *_, seen=seen: seen.append(None))
        losses(case, model, optimizer, steps=3)
        results.append((parameters(model), counts(optimizer, "A"), counts(optimizer, "G")))
        calls.append(len(seen))
    assert calls == [3, 6]  # forwards were indeed repeated
    assert_close(*results)


# --- compiled --------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at it
@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("vit", "llama"))]
)
def test_a_compiled_model_gives_the_same_numbers(name: str) -> None:
    """GPT-2's loss breaks the graph (it logs a warning), so the loss is a graph of its own.

    Llama's does not, and no gradient of its scores leaves the graph: terms are counted inside.
    """
    case, results = CASES[name], []
    for compiled in (False, True):
        model = case.model(torch.float64)
        base = SGD(model.parameters(), lr=1e-2)
        options = {"factor_every": 1, "refresh_every": 2, "damping": 1e-2, "rescale": None}
        optimizer = kronfac.KFAC(model, base, loss_average=case.average, **options)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        found = losses(case, run, optimizer, steps=3)
        assert optimizer.stats()["without_solution"] == []
        results.append((found, parameters(model), counts(optimizer, "G")))
    assert_close(*results)
