"""Data sets by name, whole and in part."""

import os
from pathlib import Path

import pytest
import torch

from kronfac.runs.errors import UserError
from kronfac.train import data
from kronfac.train.data.subset import balanced_order


def test_digits_come_with_the_package():
    source = data.load("digits")
    assert (source.num_train, source.num_test, source.num_classes) == (1297, 500, 10)
    assert (source.kind, source.sample_shape) == ("image", (1, 8, 8))
    images, labels = source.train_batch(torch.arange(1297))
    assert abs(images.mean()) < 0.01
    assert abs(images.std() - 1) < 0.01
    assert labels.bincount().min() > 100


def test_digits_are_those_of_scikit_learn():
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    source = data.load("digits")
    parts = [source.train_batch(torch.arange(1297)), source.test_batch(torch.arange(500))]
    images, labels = (torch.cat(values) for values in zip(*parts, strict=True))
    pixels = ((images * 0.3764 + 0.3059) * 16).round().long().view(-1, 64)
    ours = torch.cat([pixels, labels[:, None]], dim=1)
    theirs = torch.cat(
        [torch.tensor(digits.data).long(), torch.tensor(digits.target)[:, None]], dim=1
    )
    assert sorted(ours.tolist()) == sorted(theirs.tolist())


def test_a_subset_has_the_classes_in_equal_shares_and_is_always_the_same():
    small = data.load("digits", train=100, test=50)
    assert (small.num_train, small.num_test) == (100, 50)
    images, labels = small.train_batch(torch.arange(100))
    assert labels.bincount().tolist() == [10] * 10
    assert small.test_batch(torch.arange(50))[1].bincount().tolist() == [5] * 10
    larger, _ = data.load("digits", train=200).train_batch(torch.arange(100))
    assert torch.equal(images, larger)


def test_a_balanced_order_holds_every_sample_once():
    labels = torch.tensor([0] * 7 + [1] * 2 + [5] * 4)
    order = balanced_order(labels)
    assert order.sort().values.tolist() == list(range(13))
    assert sorted(labels[order][:6].tolist()) == [0, 0, 1, 1, 5, 5]


@pytest.mark.parametrize("wanted", [0, -1, 1298, 1.5, True, "all"])
def test_a_subset_that_does_not_exist_is_refused(wanted):
    with pytest.raises(UserError, match=r"data\.train = .* give one from 1 to 1297"):
        data.load("digits", train=wanted)


def test_unknown_names_and_options_are_refused_with_what_there_is():
    with pytest.raises(
        UserError, match="unknown data set 'cifar'; there are digits, fashion-mnist"
    ):
        data.load("cifar")
    with pytest.raises(UserError, match=r"unknown option data\.size: digits has no options but"):
        data.load("digits", size=3)
    with pytest.raises(
        UserError, match=r"unknown option data\.lenght: text has path, length, size"
    ):
        data.load("text", lenght=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_the_real_sets_are_normalised(name):
    if "KRONFAC_DATA" not in os.environ:
        pytest.skip("needs the data sets in $KRONFAC_DATA")
    source = data.load(name, Path(os.environ["KRONFAC_DATA"]))
    images, labels = source.train_batch(torch.arange(source.num_train))
    assert source.num_test == 10_000
    assert len(labels.unique()) == 10
    assert images.mean((0, 2, 3)).abs().max() < 1e-3
    assert (images.std((0, 2, 3)) - 1).abs().max() < 1e-3
