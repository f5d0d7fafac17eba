"""What counts as the outermost forward, and so how many samples there are."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kronfac.layers.selection import outermost
from tests.training import (
    INPUTS,
    assert_same,
    batch,
    counts,
    factors,
    kfac,
    loss_of,
    mlp,
    step,
)


class Holder(nn.Module):
    """Holds a network beside things without parameters, as trainers' modules do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.loss = net, nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Twice(nn.Module):
    """Uses one layer twice, the second time on other rows than samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).tanh()
        return self.head(self.body(x.repeat(3, 1)).unflatten(0, (3, -1)).mean(0))


def test_the_chain_ends_where_parameters_part() -> None:
    net = mlp()
    holder = Holder(net)
    assert outermost(holder) == [holder, net]
    assert outermost(net) == [net]


@pytest.mark.parametrize("call", ["holder", "net"])
def test_samples_are_the_same_whichever_of_them_is_called(call: str) -> None:
    net, twin = Twice(), Twice()
    holder = Holder(net)
    optimizer, expected = kfac(holder), kfac(twin)
    loss_of(holder if call == "holder" else net, batch()).backward()
    optimizer.step()
    step(twin, expected, batch())
    found = counts(optimizer, "G")
    assert {name.removeprefix("net."): count for name, count in found.items()} == counts(
        expected, "G"
    )


def test_terms_are_counted_when_only_the_inner_module_is_called() -> None:
    net = mlp()
    optimizer = kfac(Holder(net), loss_average="token")
    loss_of(net, batch()).backward()
    optimizer.step()
    assert set(counts(optimizer, "G").values()) == {8.0}


@pytest.mark.parametrize("weights", ["first backward", "accumulated"])
def test_a_checkpoint_around_the_whole_model_equals_none(weights: str) -> None:
    # The repeated forward is an outermost one, in the middle of a backward.
    model, twin = mlp(), mlp()
    optimizer, expected = kfac(model), kfac(twin)
    for number in range(1 if weights == "first backward" else 2):
        x, y = batch(number)
        hidden = checkpoint(model, x, use_reentrant=False)
        nn.functional.cross_entropy(hidden, y).backward()
        loss_of(twin, (x, y)).backward()
    optimizer.step()
    expected.step()
    for side in ("A", "G"):
        assert_same(factors(optimizer, side), factors(expected, side))


def test_an_evaluation_in_between_does_not_merge_micro_batches_of_submodules() -> None:
    # Of a model whose own forward only evaluation calls, and whose training calls its parts.
    model, twin = mlp(), mlp()
    optimizer, expected = kfac(model), kfac(twin)
    model.eval()
    model(batch(9)[0])
    model.train()
    for number in range(2):
        x, y = batch(number)
        hidden = x
        for part in model:
            hidden = part(hidden)
        (nn.functional.cross_entropy(hidden, y) / 2).backward()
        (loss_of(twin, (x, y)) / 2).backward()
    optimizer.step()
    expected.step()
    assert counts(optimizer, "G") == counts(expected, "G")
    assert_same(factors(optimizer, "G"), factors(expected, "G"))
