"""Every option is checked where it is given; errors name the option and the value."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.training import assert_same, batch, gradients, kfac, layers, loss_of, mlp, train

NAN = float("nan")
INF = float("inf")
BAD: dict[str, list[Any]] = {
    "damping": [0, -1.0, NAN, INF, "small", None, True],
    "factor_every": [0, -1, 1.5, NAN, INF, "10", None, True],
    "refresh_every": [0, -1, 1.5, NAN, INF, "10", None, True],
    "decay": [-0.1, 1.1, NAN, "0.9", None, True],
    "fisher": ["empirial", None, 1],
    "sharing": ["both", None],
    "solver": ["lu", None],
    "momentum": [-0.1, 1.0, NAN, "0.9", None, True],
    "nesterov": [1, None, "yes"],
    "rescale": ["klclip", 1, False],
    "kl_clip": [0, -1e-3, NAN, INF, None, "small"],
    "trust_radius": [0, -1e-3, NAN, INF, None, "small"],
    "early_refresh": [1, None],
    "stagger": [0, "no"],
    "rows": [0, 4095, 5000.5, NAN, INF, "all", True],
    "max_dim": [0, -1, 1.5, INF, None, "8192"],
    "loss_average": ["mean", 0, -1.0, NAN, INF, True, []],
    "include": [5, [3.0], [dict], torch.Tensor],
    "exclude": [5, [3.0], [dict], torch.Tensor],
    "on_missing": ["error", None, True],
    "grad_scaler": [True, 65536.0, "cpu"],
}
CASES = [(name, value) for name, values in BAD.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as error:
        kfac(mlp(), **{name: value})
    shown = value[0] if name in ("include", "exclude") and isinstance(value, list) else value
    assert repr(shown) in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [case for case in CASES if case[0] in ("damping", "factor_every", "refresh_every", "decay")],
)
def test_a_bad_value_is_refused_when_it_is_set_later(name: str, value: Any) -> None:
    optimizer = kfac(mlp())
    with pytest.raises(ValueError, match=name):
        setattr(optimizer, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("damping", -1.0), ("factor_every", 0), ("refresh_every", 1.5), ("decay", 2.0)],
)
def test_what_a_callable_returns_is_checked_too(name: str, value: Any) -> None:
    model = mlp()
    optimizer = kfac(model, **{name: lambda t: value if t == 1 else 1})
    with pytest.raises(ValueError, match=rf"{name}\(step=1\)={value}"):
        train(model, optimizer, range(2))


def test_a_refused_value_leaves_the_old_one() -> None:
    optimizer = kfac(mlp(), damping=0.3)
    with pytest.raises(ValueError, match="damping"):
        optimizer.damping = -1.0
    assert optimizer.damping == 0.3


def test_nesterov_without_momentum_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="nesterov=True needs momentum > 0"):
        kfac(mlp(), nesterov=True)


def test_errors_list_what_is_supported() -> None:
    with pytest.raises(ValueError, match="'empirical', 'mc', 'exact', 'forward'"):
        kfac(mlp(), fisher="true")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="dampng"):
        kfac(mlp(), dampng=0.1)


def test_options_are_keywords_only() -> None:
    import kronfac

    model = mlp()
    with pytest.raises(TypeError, match="positional"):
        kronfac.KFAC(model, torch.optim.SGD(model.parameters()), 1e-3)  # type: ignore[misc]


# --- include and exclude ---------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 2, 3)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Bilinear(4, 4, 3)


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, ["stem", "blocks.0", "blocks.1"]),
        ({"include": "blocks.*"}, ["blocks.0", "blocks.1"]),
        ({"include": ["stem", "blocks.1"]}, ["stem", "blocks.1"]),
        ({"include": nn.Linear}, ["blocks.0", "blocks.1"]),
        ({"include": [nn.Conv1d, "blocks.0"]}, ["stem", "blocks.0"]),
        ({"include": []}, ["stem", "blocks.0", "blocks.1"]),
        ({"exclude": "*.1"}, ["stem", "blocks.0"]),
        ({"exclude": nn.Linear}, ["stem"]),
        ({"exclude": (nn.Conv1d, "blocks.0")}, ["blocks.1"]),
        ({"include": nn.Linear, "exclude": "blocks.0"}, ["blocks.1"]),
    ],
    ids=str,
)
def test_include_and_exclude(options: dict[str, Any], chosen: list[str]) -> None:
    assert sorted(layers(kfac(Net(), **options))) == sorted(chosen)


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("pattern", ["nothing", "STEM"])
def test_a_pattern_that_matches_no_module_is_refused(option: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=f"{pattern!r} in include or exclude matches no module"):
        kfac(Net(), **{option: pattern})


def test_a_layer_in_exclude_keeps_its_gradient() -> None:
    model = mlp()
    optimizer = kfac(model, exclude="2")
    loss_of(model, batch()).backward()
    before = gradients(model)
    optimizer.step()
    assert_same(gradients(model)["2.weight"], before["2.weight"])


def test_the_default_solver_is_chosen_by_shape() -> None:
    model = nn.Sequential(nn.Linear(4, 2048), nn.Linear(2049, 4, device="meta"))
    solvers = {name: state.block.solver for name, state in layers(kfac(model)).items()}
    assert solvers == {"0": "eigen", "1": "cholesky"}
