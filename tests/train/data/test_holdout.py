"""Training samples that are tested on instead of the test set."""

import pytest
import torch

from kronfac.runs.errors import UserError
from kronfac.train import data


def test_the_last_training_samples_are_tested():
    source = data.load("digits", train=100)
    kept = data.HeldOut(source, 30)
    assert (kept.num_train, kept.num_test) == (70, 30)
    inputs, targets = kept.test_batch(torch.arange(30))
    expected = source.train_batch(torch.arange(70, 100))
    assert torch.equal(inputs, expected[0])
    assert torch.equal(targets, expected[1])
    assert torch.equal(kept.train_batch(torch.arange(3))[0], source.train_batch(torch.arange(3))[0])


@pytest.mark.parametrize("count", [0, 100])
def test_a_part_must_be_left_for_both(count):
    with pytest.raises(UserError, match="give one from 1 to 99"):
        data.HeldOut(data.load("digits", train=100), count)
