"""`torch.distributed.checkpoint` with every base optimizer, on layers of every kind, in one process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

import kronfac
from tests.layers.kinds import Tagger
from tests.training import assert_same, kfac, option_id, parameters

STEPS, SAVED_AFTER = 7, 4
BASES: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adam-amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01),
    "rmsprop-centered": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.01),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "muon": lambda p: optim.Muon(p, lr=0.01),
}
#: They evaluate the loss themselves or take sparse gradients only.
NOT_BASES = {"LBFGS", "SparseAdam", "Optimizer"}


class Matrices(nn.Module):
    """Two-dimensional parameters only, as Muon wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.embedding(tokens)
        return self.head(self.attention(z, z, z)[0].tanh())


def build(base: str, seed: int = 0, **options: Any) -> tuple[nn.Module, kronfac.KFAC]:
    """Embedding, attention, norm and head, in the middle of whose refresh interval one may save."""
    torch.manual_seed(seed)
    model = Matrices() if base == "muon" else Tagger()
    options = {"refresh_every": 3, "loss_average": "token"} | options
    return model, kfac(model, BASES[base](model.parameters()), **options)


def train(model: nn.Module, optimizer: kronfac.KFAC, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(9, (5, 3), generator=generator)
        labels = torch.randint(3, (5, 3), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


def test_every_optimizer_of_torch_is_here() -> None:
    kinds = {name for name in dir(optim) if isinstance(getattr(optim, name), type)}
    covered = {type(make([nn.Parameter(torch.ones(2, 2))])).__name__ for make in BASES.values()}
    assert covered | NOT_BASES == kinds


@pytest.mark.parametrize("base", BASES)
def test_getting_and_setting_a_state_dict_resumes_bit_for_bit(base: str) -> None:
    model, optimizer = build(base)
    train(model, optimizer, range(SAVED_AFTER))
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other, resumed = build(base, seed=1)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, state)
    train(model, optimizer, range(SAVED_AFTER, STEPS))
    train(other, resumed, range(SAVED_AFTER, STEPS))
    assert_same(parameters(other), parameters(model))
    assert_same(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("saved_after", [1, SAVED_AFTER])  # at 0, torch has Adam count a step
@pytest.mark.parametrize("base", BASES)
def test_saving_to_files_and_loading_resumes_bit_for_bit(
    base: str, saved_after: int, tmp_path: Path
) -> None:
    straight, going_on = build(base)
    train(straight, going_on, range(STEPS))

    model, optimizer = build(base)
    train(model, optimizer, range(saved_after))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    other, resumed = build(base, seed=1)
    weights, state = get_state_dict(other, resumed)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
    train(other, resumed, range(saved_after, STEPS))
    assert_same(parameters(other), parameters(straight))


def test_parts_of_one_weight_have_keys_of_their_own() -> None:
    model, optimizer = build("adamw")
    train(model, optimizer, range(2))
    entry = get_optimizer_state_dict(model, optimizer)["state"]["attention.in_proj_weight"]
    for part in ("query", "key", "value"):
        assert entry[f"kronfac.{part}.A.sum"].shape == (5, 5)
        assert entry[f"kronfac.{part}.G.sum"].shape == (4, 4)
    assert not torch.equal(entry["kronfac.query.G.sum"], entry["kronfac.key.G.sum"])
    assert "kronfac.A.sum" not in entry


def test_a_base_that_has_stepped_before_it_was_given_to_kfac() -> None:
    """Then torch takes its state for complete and makes no empty step."""
    torch.manual_seed(0)
    model = Tagger()
    base = optim.AdamW(model.parameters(), lr=0.01)
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    base.step()
    fresh = get_optimizer_state_dict(model, kfac(model, base))
    trained, optimizer = build("adamw")
    train(trained, optimizer, range(1))
    expected = get_optimizer_state_dict(trained, optimizer)
    assert {n: sorted(e) for n, e in fresh["state"].items()} == {
        n: sorted(e) for n, e in expected["state"].items()
    }


OTHER_TENSORS: list[dict[str, Any]] = [
    {"solver": "eigen"},
    {"solver": "cholesky"},
    {"solver": "newton-schulz"},
    {"solver": "separable"},
    {"sharing": "reduce"},
    {"momentum": 0.5},
    {"stagger": True},
    {"fisher": "forward"},
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", OTHER_TENSORS, ids=option_id)
def test_options_that_keep_other_tensors(options: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = build("adamw", **options)
    train(model, optimizer, range(SAVED_AFTER))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    other, resumed = build("adamw", seed=1, **options)
    weights, state = get_state_dict(other, resumed)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
    train(model, optimizer, range(SAVED_AFTER, STEPS))
    train(other, resumed, range(SAVED_AFTER, STEPS))
    assert_same(parameters(other), parameters(model))


@pytest.mark.parametrize("options", OTHER_TENSORS, ids=option_id)
def test_tensors_are_laid_out_as_loaded_ones_are(options: dict[str, Any]) -> None:
    """Files hold no strides, and products of other layouts are rounded otherwise."""
    model, optimizer = build("adamw", **options)
    train(model, optimizer, range(2))
    strided = [
        f"{number}.{key}"
        for number, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
        if isinstance(value, Tensor) and not value.is_contiguous()
    ]
    assert strided == []
