"""Rates, initial weights and damping that keep their meaning when a network gets wider (μP)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import kronfac
from benchmarks.mup import changes, data, network, slope, slopes
from tests.training import layers

WIDTHS = (64, 128, 256)
BASE = 8
RATE = 0.1


def mlp(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Linear(width, width), nn.Linear(width, 3))


def factors_of(
    make: Callable[[int], nn.Module], growth: int = 4, **options: Any
) -> dict[str, float]:
    """By name of a parameter, what its learning rate is multiplied by."""
    model = make(growth * BASE)
    groups = kronfac.mup_param_groups(model, make(BASE), lr=RATE, **options)
    rates = {p: group["lr"] / RATE for group in groups for p in group["params"]}
    assert len(rates) == sum(len(group["params"]) for group in groups)
    return {name: rates[p] for name, p in model.named_parameters()}


# --- rates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "exponents"),
    [
        ("kfac", (0, 0, 0)),
        ("shampoo", (-0.5, 0, 0.5)),
        ("sgd", (-1, 0, 1)),
        ((0.0, 1.0), (-1, -1, 0)),
    ],
)
def test_rates_of_weights_follow_the_exponents(method: Any, exponents: tuple[float, ...]) -> None:
    found = factors_of(mlp, method=method)
    for name, exponent in zip("012", exponents, strict=True):
        assert found[f"{name}.weight"] == pytest.approx(4**-exponent)


@pytest.mark.parametrize("method", ["kfac", "shampoo"])
def test_a_bias_that_is_part_of_its_layers_matrix_has_the_rate_of_the_weight(method: str) -> None:
    found = factors_of(mlp, method=method)
    for name in "012":
        assert found[f"{name}.bias"] == found[f"{name}.weight"]


def test_biases_of_sgd_grow_as_input_layers_do() -> None:
    found = factors_of(mlp, method="sgd")
    assert [found[f"{name}.bias"] for name in "012"] == [4, 4, 1]


def test_at_the_base_width_nothing_changes() -> None:
    (group,) = kronfac.mup_param_groups(mlp(BASE), mlp(BASE), lr=RATE, method="sgd")
    assert group["lr"] == RATE


def test_each_channel_of_a_norm_has_its_own_inverse() -> None:
    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, width), nn.LayerNorm(width), nn.Linear(width, 3))

    assert factors_of(make, method="kfac")["1.weight"] == 1 / 4
    assert factors_of(make, method="shampoo")["1.weight"] == 4  # left to the base
    assert factors_of(make, method="sgd")["1.weight"] == 4


def test_what_is_excluded_has_the_rates_of_sgd() -> None:
    found = factors_of(mlp, method="kfac", exclude="2")
    assert (found["0.weight"], found["2.weight"]) == (1, 1 / 4)


def test_embeddings_and_attention() -> None:
    def make(width: int) -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        return nn.ModuleList([nn.Embedding(7, width), layer, nn.Linear(width, 7)])

    found = factors_of(make, method="sgd")
    assert (found["0.weight"], found["2.weight"]) == (4, 1 / 4)
    assert {value for name, value in found.items() if "proj_weight" in name} == {1}


def test_convolutions_and_their_groups() -> None:
    def make(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, width, 3),
            nn.Conv2d(width, width, 3, groups=width),
            nn.Conv2d(width, 2 * width, 1, groups=2),
            nn.Conv2d(2 * width, 5, 1),
        )

    assert list(factors_of(make, method="sgd").values())[::2] == [4, 4, 1, 1 / 4]
    assert list(factors_of(make, method="kfac").values())[::2] == [1, 1 / 4, 1, 1]


def test_other_options_are_those_of_all_groups() -> None:
    groups = kronfac.mup_param_groups(
        mlp(32), mlp(BASE), lr=RATE, method="sgd", weight_decay=1e-4, momentum=0.9
    )
    assert len(groups) == 3
    assert all((g["weight_decay"], g["momentum"]) == (1e-4, 0.9) for g in groups)


def test_the_code_of_the_page_trains() -> None:
    page = (Path(__file__).parents[1] / "docs" / "mup.md").read_text()
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0], names)
    model, optimizer = names["model"], names["optimizer"]
    x, y = torch.randn(16, 20), torch.randint(5, (16,))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["adam", None, (1.0,), ("a", "b")])
def test_other_methods_are_refused(method: Any) -> None:
    with pytest.raises(ValueError, match=r"^method=.*choose 'kfac', 'shampoo', 'sgd' or"):
        kronfac.mup_param_groups(mlp(32), mlp(BASE), lr=RATE, method=method)


@pytest.mark.parametrize("call", [kronfac.mup_init_, kronfac.mup_param_groups])
def test_another_architecture_is_refused(call: Any) -> None:
    options = {} if call is kronfac.mup_init_ else {"lr": RATE}
    with pytest.raises(ValueError, match=r"base has nothing like '2.weight'"):
        call(mlp(32), mlp(BASE)[:2], **options)


def test_a_weight_with_two_roles_is_refused() -> None:
    def make(width: int) -> nn.Module:
        model = nn.Sequential(nn.Embedding(7, width), nn.Linear(width, 7))
        model[1].weight = model[0].weight
        return model

    with pytest.raises(ValueError, match="used in two ways"):
        factors_of(make)


# --- initial weights -------------------------------------------------------------------------


def rms(values: torch.Tensor) -> float:
    return float(values.detach().square().mean().sqrt())


def test_initial_weights_are_those_of_the_base_by_their_exponents() -> None:
    model, base = mlp(4 * BASE), mlp(BASE)
    kronfac.mup_init_(model, base)
    for module, original, exponent in zip(model, base, (0, 0.5, 1), strict=True):
        assert rms(module.weight) == pytest.approx(rms(original.weight) * 4**-exponent)
        assert rms(module.bias) == pytest.approx(rms(original.bias))


def test_zeros_and_norms_stay_what_they_are() -> None:
    def make(width: int) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(5, width), nn.LayerNorm(width), nn.Linear(width, 3))
        nn.init.zeros_(model[2].weight)
        return model

    model = make(32)
    kronfac.mup_init_(model, make(BASE))
    assert bool((model[1].weight == 1).all())
    assert not bool(model[2].weight.any())


# --- features --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kfac", "shampoo", "sgd"])
def test_features_change_alike_at_every_width(method: str) -> None:
    assert max(map(abs, slopes(method, WIDTHS, 2, mup=True))) < 0.1
    assert max(map(abs, slopes(method, WIDTHS, 2, mup=False))) > 0.35


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kfac", "shampoo", "sgd"])
def test_features_change_alike_up_to_a_thousand_wide(method: str) -> None:
    widths = (64, 128, 256, 512, 1024)
    assert max(map(abs, slopes(method, widths, 2, mup=True))) < 0.08
    assert max(map(abs, slopes(method, widths, 2, mup=False))) > 0.4


def test_features_change_alike_with_damping_of_both_factors() -> None:
    found = [changes("kfac", width, mup=True, solver="cholesky") for width in WIDTHS]
    assert [slope(WIDTHS, one) for one in zip(*found, strict=True)] == pytest.approx(
        [0] * 3, abs=0.15
    )


def test_absolute_damping_is_too_much_for_wide_input_layers() -> None:
    found = [changes("kfac", width, mup=True, damping=0.1)[0] for width in WIDTHS]
    assert slope(WIDTHS, found) < -0.5


@pytest.mark.parametrize(("to", "expected"), [("mean", (-1, -2, -1)), ("trace", (0, 0, 0))])
def test_which_damping_keeps_up_with_the_large_eigenvalues(
    to: Any, expected: tuple[int, ...]
) -> None:
    """γ/λ_max against the width: a share of the mean vanishes, one of the trace stays."""
    shares = []
    for width in WIDTHS:
        model = network(width, 0)
        kronfac.mup_init_(model, network(64, 1))
        damping = kronfac.Relative(0.1, to=to)
        optimizer = kronfac.KFAC(model, SGD(model.parameters(), lr=0.0), damping=damping)
        x, y = data()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        shares.append(
            [
                float(state.damping(0.1, to) / state.solution["A.values"].max())
                / float(state.solution["G.values"].max())
                for state in layers(optimizer).values()
            ]
        )
    found = [slope(WIDTHS, [share[k] for share in shares]) for k in range(3)]
    assert found == pytest.approx(expected, abs=0.3)


def test_norms_do_not_change_features_more_in_wide_networks() -> None:
    def change(width: int) -> float:
        def make(size: int) -> nn.Sequential:
            torch.manual_seed(0)
            head = nn.Linear(size, 3)
            return nn.Sequential(nn.Linear(6, size), nn.LayerNorm(size), nn.Tanh(), head).double()

        model, base = make(width), make(64)
        kronfac.mup_init_(model, base)
        groups = kronfac.mup_param_groups(model, base, lr=0.1)
        damping = kronfac.Relative(0.1, to="trace")
        optimizer = kronfac.KFAC(model, SGD(groups), include="1", rescale=None, damping=damping)
        x, y = data()
        before = model[1].weight.detach().clone()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return rms(model[1].weight - before)

    assert slope(WIDTHS, [change(width) for width in WIDTHS]) == pytest.approx(0, abs=0.15)
