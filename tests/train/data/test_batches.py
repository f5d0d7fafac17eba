"""Batches as a pure function of seed and step, shared out over ranks."""

import pytest
import torch

from kronfac.runs.errors import UserError
from kronfac.train import data
from kronfac.train.data import Batches, Crop, Flip


@pytest.fixture(scope="module")
def source():
    return data.load("digits", train=100, test=47)


class Numbers:
    """A source whose inputs say which sample they are."""

    name, kind, num_classes, sample_shape = "numbers", "image", 10, (1, 4, 4)

    def __init__(self, num_train=50, num_test=7):
        self.num_train, self.num_test = num_train, num_test

    def train_batch(self, indices):
        return indices.float().view(-1, 1, 1, 1).expand(-1, 1, 4, 4), indices

    test_batch = train_batch


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


AUGMENT = (Flip(), Crop(2))


def test_an_epoch_holds_every_sample_at_most_once():
    batches = Batches(Numbers(), 8, seed=0)
    assert batches.timetable.step(1) == 6
    seen = torch.cat([batches.get(step)[1] for step in range(6)])
    assert len(seen.unique()) == 48
    following = torch.cat([batches.get(step)[1] for step in range(6, 12)])
    assert not torch.equal(seen, following)


def test_a_batch_depends_on_seed_and_step_only(source):
    first = Batches(source, 16, seed=3, augment=AUGMENT)
    again = Batches(source, 16, seed=3, augment=AUGMENT)
    for step in (11, 2, 30):
        assert equal(first.get(step), again.get(step))
    assert not equal(first.get(2), first.get(3))
    assert not equal(first.get(2), Batches(source, 16, seed=4, augment=AUGMENT).get(2))


def test_the_same_samples_are_changed_differently_in_each_epoch():
    batches = Batches(Numbers(8), 8, seed=0, augment=[Crop(2)])
    first, second = batches.get(0), batches.get(1)
    assert not torch.equal(first[0][first[1].argsort()], second[0][second[1].argsort()])


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_see_what_one_would_see(source, world):
    whole = Batches(source, 16, seed=1, augment=AUGMENT).get(9)
    parts = [
        Batches(source, 16, seed=1, rank=r, world=world, augment=AUGMENT).get(9)
        for r in range(world)
    ]
    assert all(len(part[1]) == 16 // world for part in parts)
    assert equal(whole, [torch.cat(tensors) for tensors in zip(*parts, strict=True)])


def test_iterating_gives_the_same_batches(source):
    batches = Batches(source, 16, seed=1, augment=AUGMENT)
    made = list(batches.iterate(4, 15))
    assert len(made) == 11
    assert all(equal(batch, batches.get(4 + i)) for i, batch in enumerate(made))


@pytest.mark.parametrize("world", [1, 3, 9])
def test_every_test_sample_is_seen_once_over_ranks(world):
    parts = [Batches(Numbers(), 9, seed=0, rank=r, world=world).test(2) for r in range(world)]
    seen = [number for part in parts for _, targets in part for number in targets.tolist()]
    assert sorted(seen) == list(range(7))


def test_texts_go_through_as_they_are(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)))
    batches = Batches(data.load("text", path=tmp_path / "text", length=3), 5, seed=0)
    tokens, targets = batches.get(1)
    assert tokens.shape == targets.shape == (5, 3)
    assert torch.equal(targets, tokens + 1)


@pytest.mark.parametrize(
    ("batch", "world", "sentence"),
    [
        (51, 1, r"train\.batch = 51 does not fit: numbers has 50 training samples"),
        (0, 1, r"train\.batch = 0 does not fit"),
        (9, 2, r"train\.batch = 9 cannot be shared by 2 ranks; give a multiple of 2"),
    ],
)
def test_batches_that_cannot_be_are_refused(batch, world, sentence):
    with pytest.raises(UserError, match=sentence):
        Batches(Numbers(), batch, seed=0, world=world)
