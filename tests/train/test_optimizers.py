"""Optimizers of recipes: what each kind becomes."""

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kronfac import KFAC
from kronfac.runs.errors import UserError
from kronfac.runs.timetable import Timetable
from kronfac.train.optim import build as optimizers
from kronfac.train.optim.kfac_schedules import as_callable
from kronfac.train.optim.muon import Composite, FlatMuon, hidden_weights
from kronfac.train.recipe.options import check_options, kinds
from kronfac.train.recipe.recipe import OptimizerPart
from tests.methods import toys


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def build(kind: str, model: nn.Module | None = None, **options: Any) -> Any:
    part = OptimizerPart(kind, kind, {"lr": 0.1, **options})
    return optimizers.build(part, model or net(), timetable=Timetable(10, 1), kind="image")


def take_step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(torch.ones(6, 1, 4, 4)), torch.arange(6) % 3).backward()
    optimizer.step()


def test_every_group_keeps_its_own_rate_for_the_schedule() -> None:
    groups = build("kfac", rescale="unit", other_lr=0.3).param_groups
    assert [group["initial_lr"] for group in groups] == [0.1, 0.3]


def test_kfac_gives_its_momentum_to_parameters_that_it_leaves_out() -> None:
    optimizer = build("kfac", rescale="unit", momentum=0.9, nesterov=True, weight_decay=0.01)
    ours, others = optimizer.param_groups
    assert isinstance(optimizer, KFAC)
    assert (ours["momentum"], others["momentum"]) == (0.0, 0.9)
    assert (ours["nesterov"], others["nesterov"]) == (False, True)
    assert ours["weight_decay"] == others["weight_decay"] == 0.01


def test_kfac_gives_its_momentum_to_none_that_has_it_already() -> None:
    optimizer = build("kfac", momentum=0.9, nesterov=True, other_lr=0.3)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.0, 0.0]


def test_kfac_may_have_adamw_as_its_base() -> None:
    optimizer = build("kfac", base="adamw", betas=[0.8, 0.9], rescale="graft")
    assert isinstance(optimizer.base, torch.optim.AdamW)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("options", [{}, {"rescale": "unit"}, {"other_lr": 0.3}])
def test_adamw_may_step_what_is_no_matrix(options: dict[str, Any]) -> None:
    model = net()
    optimizer = build("kfac", model, other="adamw", **options)
    kfac, adamw = optimizer.members
    assert isinstance(kfac, KFAC)
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.param_groups[0]["params"] == [*model[1].parameters()]  # type: ignore[index]


def test_kfac_without_rescaling_is_written_none() -> None:
    assert build("kfac", rescale="none")._preconditioner.options.rescale is None


def test_kfac_with_all_rows_is_written_all() -> None:
    assert build("kfac", rows="all")._preconditioner.options.rows is None
    assert build("kfac", rows=5000)._preconditioner.options.rows == 5000
    assert build("kfac")._preconditioner.options.rows == "auto"


def test_kfac_of_text_averages_over_tokens() -> None:
    part = OptimizerPart("kfac", "kfac", {"lr": 0.1})
    optimizer: Any = optimizers.build(part, net(), timetable=Timetable(10, 1), kind="text")
    assert optimizer._preconditioner.options.loss_average == "token"


def test_what_an_optimizer_refuses_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"\[optimizers.kfac\]: rescale='long' is not supported"):
        build("kfac", rescale="long")
    with pytest.raises(UserError, match=r"\[optimizers.sgd\]: .*momentum"):
        build("sgd", momentum=-1.0)


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    model = net()
    assert hidden_weights(model) == [model[0].weight, model[4].weight]  # type: ignore[index]
    optimizer = build("muon", model, other_lr=0.01)
    assert isinstance(optimizer, Composite)
    muon, adamw = optimizer.members
    assert [tuple(matrix.shape) for matrix in muon.matrices] == [(4, 9), (8, 16)]
    assert sum(len(group["params"]) for group in adamw.param_groups) == 5
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def test_muon_on_a_convolution_is_muon_on_its_matrix() -> None:
    model = net()
    weight = model[0].weight  # type: ignore[index]
    matrix = nn.Parameter(weight.detach().flatten(1).clone())
    reference = torch.optim.Muon([matrix], lr=0.1, weight_decay=0.0)
    flat = FlatMuon([weight], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        matrix.grad = weight.grad.flatten(1).clone()
        flat.step()
        reference.step()
    assert torch.equal(weight.flatten(1), matrix)


def test_a_pair_resumes_exactly() -> None:
    first, second = net(), net()
    one, other = build("muon", first), build("muon", second)
    take_step(first, one)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    take_step(first, one)
    take_step(second, other)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_soap_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(UserError, match="pip install pytorch_optimizer"):
        build("soap")


def test_a_table_is_a_schedule_over_epochs() -> None:
    table = {"start": 0.008, "factor": 0.5, "epochs": [2, 3]}
    damping: Any = as_callable("damping", table, timetable=Timetable(10, 1))
    assert [damping(step) for step in (0, 19, 20, 29, 30)] == [0.008, 0.008, 0.004, 0.004, 0.002]
    every: Any = as_callable(
        "refresh_every", {"start": 10, "factor": 1.26, "epochs": [1]}, Timetable(10, 1)
    )
    assert [every(step) for step in (0, 10)] == [10, 13]
    assert as_callable("damping", 0.5, Timetable(10, 1)) == 0.5


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"start": 1, "factr": 2, "epochs": []}, "unknown key 'factr'.*did you mean 'factor'"),
        ({"start": 1, "factor": 2}, "is no schedule"),
        ({"start": "a", "factor": 2, "epochs": [1]}, "is no schedule"),
        ({"start": 1, "factor": 2, "epochs": "12"}, "is no schedule"),
        (
            {"start": -1.0, "factor": 0.5, "epochs": [1]},
            "at the start: damping=-1.0 must be a posit",
        ),
        ({"start": 1.0, "factor": 0.0, "epochs": [1]}, "after 1 of its epochs: damping=0.0 must"),
        ({"start": 1.0, "factor": 1e200, "epochs": [1, 2]}, "after 2 of its epochs: damping=inf"),
    ],
)
def test_a_broken_schedule_is_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        as_callable("damping", table, Timetable(10, 1))


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("decay", {"start": 0.9, "factor": 2.0, "epochs": [0.1]}),
        ("factor_every", {"start": 10, "factor": -1.0, "epochs": [1]}),
        ("refresh_every", {"start": 10, "factor": 0.0, "epochs": [1, 2]}),
    ],
)
def test_every_value_of_a_schedule_is_checked_at_once(name: str, table: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"the schedule of {name} .* after 1 of its epochs"):
        as_callable(name, table, Timetable(10, 1))


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_options_of_the_rest_hold_whatever_the_length_of_steps(key: str) -> None:
    """Not only where K-FAC's own steps have a length of their own."""
    optimizer = build("kfac", rescale="kl-clip", **{f"other_{key}": 0.25})
    assert [group[key] for group in optimizer.param_groups] == [0.0, 0.25]


def test_a_registered_method_is_a_kind_of_optimizer() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = build("rankone", model, decay=0.5, base_momentum=0.9)
    assert isinstance(optimizer, toys.RankOne)
    take_step(model, optimizer)
    assert optimizer.stats()["refreshes"] == 2


def test_options_of_a_registered_method_are_checked() -> None:
    check_options("rankone", {"lr": 0.1, "decay": 0.5}, "optimizers.toy")
    with pytest.raises(UserError, match="unknown key 'solver'"):
        check_options("rankone", {"lr": 0.1, "solver": "eigen"}, "optimizers.toy")
    assert {"kfac", "rankone"} <= set(kinds())
