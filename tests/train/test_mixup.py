"""Running mixup is its recursion, for one rank and for several, and resumes exactly."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kronfac.runs.errors import UserError
from kronfac.train.data.mixup import RunningMixup

CLASSES, BATCH = 5, 8


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 3, 4, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=generator)


def make(alpha: float = 0.4, **options: int) -> RunningMixup:
    return RunningMixup(alpha, CLASSES, seed=3, **options)


def test_the_first_batch_is_not_mixed() -> None:
    inputs, targets = data(0)
    mixed, soft = make().mix(0, inputs, targets)
    assert torch.equal(mixed, inputs)
    assert torch.equal(soft, F.one_hot(targets, CLASSES).double())


def test_each_batch_is_mixed_with_the_previous_mixed_one() -> None:
    mixup = make()
    x, y = data(0)
    expected_x, expected_y = x, F.one_hot(y, CLASSES).double()
    mixup.mix(0, x, y)
    for step in range(1, 5):
        x, y = data(step)
        mixed, soft = mixup.mix(step, x, y)
        share = mixup.shares(step, BATCH)
        one, three = share[:, None], share[:, None, None, None]
        expected_x = three * x + (1 - three) * expected_x
        expected_y = one * F.one_hot(y, CLASSES) + (1 - one) * expected_y
        torch.testing.assert_close(mixed, expected_x)
        torch.testing.assert_close(soft, expected_y)


def test_unrolled_weights_of_all_batches_sum_to_one() -> None:
    """Weights are λ_t, (1-λ_t)λ_{t-1}, ...: constant images and targets stay what they are."""
    mixup = make(alpha=1.0)
    inputs = torch.full((BATCH, 1, 2, 2), 7.0, dtype=torch.float64)
    for step in range(6):
        mixed, soft = mixup.mix(step, inputs, data(step)[1])
    torch.testing.assert_close(mixed, inputs)
    torch.testing.assert_close(soft.sum(1), torch.ones(BATCH, dtype=torch.float64))


def test_a_share_of_one_leaves_the_data_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningMixup, "shares", lambda self, step, batch: torch.ones(BATCH))
    mixup = make()
    for step in range(3):
        inputs, targets = data(step)
        mixed, soft = mixup.mix(step, inputs, targets)
        assert torch.equal(mixed, inputs)
        assert torch.equal(soft, F.one_hot(targets, CLASSES).double())


def test_shares_are_the_larger_of_a_beta_number_and_its_rest() -> None:
    alpha = 0.4
    shares = RunningMixup(alpha, CLASSES, seed=0).shares(1, 200_000)
    assert shares.min() >= 0.5
    assert shares.max() <= 1.0
    # λ and 1-λ have one distribution, of which λ(1-λ) = max·min has the mean α/(2(2α+1)).
    expected = alpha / (2 * (2 * alpha + 1))
    assert (shares * (1 - shares)).mean().item() == pytest.approx(expected, rel=0.01)


def test_shares_are_a_function_of_seed_and_step() -> None:
    assert torch.equal(make().shares(4, BATCH), make().shares(4, BATCH))
    assert not torch.equal(make().shares(4, BATCH), make().shares(5, BATCH))
    other = RunningMixup(0.4, CLASSES, seed=4)
    assert not torch.equal(make().shares(4, BATCH), other.shares(4, BATCH))


def test_ranks_see_what_one_rank_would_see() -> None:
    whole, parts = make(), [make(rank=rank, world=4) for rank in range(4)]
    for step in range(4):
        inputs, targets = data(step)
        expected = whole.mix(step, inputs, targets)
        slices = zip(parts, inputs.chunk(4), targets.chunk(4), strict=True)
        found = [part.mix(step, x, y) for part, x, y in slices]
        assert torch.equal(torch.cat([x for x, _ in found]), expected[0])
        assert torch.equal(torch.cat([y for _, y in found]), expected[1])


@pytest.mark.parametrize("world", [1, 2])
def test_a_saved_state_continues_exactly(world: int) -> None:
    whole = make()
    for step in range(3):
        whole.mix(step, *data(step))
    again = [make(rank=rank, world=world) for rank in range(world)]
    for part in again:
        part.load_state_dict(whole.state_dict())
    inputs, targets = data(3)
    expected, _ = whole.mix(3, inputs, targets)
    slices = zip(again, inputs.chunk(world), targets.chunk(world), strict=True)
    assert torch.equal(torch.cat([part.mix(3, x, y)[0] for part, x, y in slices]), expected)


def test_what_was_given_is_not_changed() -> None:
    mixup = make()
    mixup.mix(0, *data(0))
    inputs, targets = data(1)
    mixup.mix(1, inputs, targets)
    assert torch.equal(inputs, data(1)[0])


def test_a_batch_of_another_size_is_not_mixed() -> None:
    mixup = make()
    mixup.mix(0, *data(0))
    inputs, targets = data(1)
    mixed, _ = mixup.mix(1, inputs[:3], targets[:3])
    assert torch.equal(mixed, inputs[:3])


def test_text_is_refused() -> None:
    tokens = torch.zeros(BATCH, 4, dtype=torch.int64)
    with pytest.raises(UserError, match=r"train\.mixup = 0"):
        make().mix(0, tokens, tokens)


def test_a_bad_alpha_is_named() -> None:
    with pytest.raises(UserError, match="mixup=-1"):
        make(alpha=-1)
