"""Ranks that do not do the same: all agree, nobody waits for ever, and the numbers are as defined."""

import pytest
import torch
from torch import Tensor, nn

import kronfac
from tests.distributed.scenarios import NAMES, Scenario, check
from tests.training import differs


class Branches(nn.Module):
    """Two branches whose order and use can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.order = ["left", "right"]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(x + sum(torch.tanh(self.get_submodule(name)(x)) for name in self.order))


class OtherOrder(Scenario):
    """Odd ranks call the branches the other way round, and all change their order half way."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Branches()

    def before(self, model: nn.Module, optimizer: kronfac.KFAC, step: int, rank: int) -> None:
        turned = (rank % 2 == 1) != (step >= 3)
        model.order = ["right", "left"] if turned else ["left", "right"]


class OneRankUses(OtherOrder):
    """One branch is used by the last rank only, then by nobody, then by the first rank only."""

    wrap = {"find_unused_parameters": True}  # noqa: RUF012
    steps = 7

    def before(self, model: nn.Module, optimizer: kronfac.KFAC, step: int, rank: int) -> None:
        user = [1, 1, None, None, 0, 0, 1][step]
        model.order = ["left", "right"] if rank == user else ["left"]


class OneRankUsesAndClips(OneRankUses):
    """The same with clipped gradients, whose norm may have to be added up over ranks."""

    options = OneRankUses.options | {"max_grad_norm": 0.1}


class OneRankUsesAndResumes(OneRankUses):
    """The same, with a new optimizer before a refresh in which a layer is used by one rank only."""

    resumes = (4,)


class OneRankLooks(Scenario):
    """The first rank evaluates between steps, as is usual, and looks at its batch before training."""

    def before(self, model: nn.Module, optimizer: kronfac.KFAC, step: int, rank: int) -> None:
        if rank == 0:
            model.eval()
            with torch.no_grad():
                model(torch.ones(7, 5))
            model.train()
            with optimizer.no_capture():
                model(torch.ones(2, 5)).sum()


class OneRankForwardsTwice(Scenario):
    """The first rank runs a forward whose result it throws away: its inputs count nevertheless."""

    def before(self, model: nn.Module, optimizer: kronfac.KFAC, step: int, rank: int) -> None:
        if rank == 0:
            model(torch.ones(2, 5) * step)


class Skipped(Scenario):
    """One rank overflows at two steps, and everybody's scaler skips them."""

    scaled = True
    bad = (1, 4)

    def loss(self, scores: Tensor, labels: Tensor, step: int, rank: int) -> Tensor:
        loss = super().loss(scores, labels, step, rank)
        return loss * torch.inf if step in self.bad and rank == 1 else loss


class Side(nn.Module):
    """A layer whose inputs, and one whose output gradients, can be so large that their squares overflow.

    Of each sample, the first 5 numbers are its features, then come 3 for the side layer, and its scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.side = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        features, side, scale = x.split([5, 3, 1], 1)
        return self.head(torch.tanh(self.first(features))) + scale * self.side(side)


class Overflow(Scenario):
    """A statistic of one rank is infinite while all gradients are finite.

    A feature of 1e200 saturates tanh, so that no gradient comes back to it; a scale of 1e160 multiplies
    the gradient of a product whose input is zero.
    """

    def __init__(self, step: int) -> None:
        self.bad = step

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Side()

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(self.samples, 9, generator=generator)
        x[:, 8] = 1
        if rank == 1 and step == self.bad:
            x[0, 0] = 1e200
            x[1, 5:8], x[1, 8] = 0, 1e160
        return x, torch.randint(3, (self.samples,), generator=generator)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_in_which_layers_are_called_may_differ(name: str) -> None:
    check(OtherOrder(), name)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_may_be_used_on_one_rank_only(name: str) -> None:
    check(OneRankUses(), name)


@pytest.mark.parametrize("name", ["mem-opt", "layer-parallel", "layer-parallel without DDP"])
def test_gradients_may_be_clipped_meanwhile(name: str) -> None:
    check(OneRankUsesAndClips(), name)


@pytest.mark.parametrize("name", NAMES)
def test_training_may_resume_meanwhile(name: str) -> None:
    check(OneRankUsesAndResumes(), name)


@pytest.mark.parametrize("name", ["comm-opt", "mem-opt", "layer-parallel"])
def test_one_rank_may_evaluate_alone(name: str) -> None:
    check(OneRankLooks(), name)


@pytest.mark.parametrize("name", ["comm-opt", "mem-opt", "layer-parallel without DDP"])
def test_one_rank_may_run_a_forward_more(name: str) -> None:
    check(OneRankForwardsTwice(), name)


@pytest.mark.parametrize("name", [name for name in NAMES if "without" not in name])
def test_steps_that_a_scaler_skips_leave_nothing_behind(name: str) -> None:
    _, expected = check(Skipped(), name)
    assert expected.stats["steps"] == 4


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_statistic_that_is_not_finite_drops_that_ranks_contribution(name: str, step: int) -> None:
    outcomes, expected = check(Overflow(step), name)
    dropped = [outcome.stats["dropped"] for outcome in outcomes]
    assert expected.stats["dropped"] == {"first": 1, "side": 1, "head": 0}
    assert sum(found.get("first", 0) for found in dropped) >= 1
    assert sum(found.get("side", 0) for found in dropped) >= 1


def test_the_scenarios_do_what_they_say() -> None:
    from tests.distributed.scenarios import in_turn

    usual = in_turn(Overflow(99), 2)
    assert usual.stats["dropped"] == {"first": 0, "side": 0, "head": 0}
    assert all(value.isfinite().all() for value in in_turn(Overflow(3), 2).parameters.values())
    assert differs(in_turn(Overflow(3), 2).parameters, usual.parameters)
    assert in_turn(Skipped(), 2).stats["steps"] == 4
