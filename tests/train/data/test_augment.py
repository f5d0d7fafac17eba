"""Augmentation against its definition, sample by sample."""

import pytest
import torch
from torch.nn import functional as F

from kronfac.runs.errors import UserError
from kronfac.train import data
from kronfac.train.data import Crop, Flip, augmentation


@pytest.fixture
def images():
    return torch.randn(64, 3, 8, 6, generator=torch.Generator().manual_seed(0))


def drawn(change, num=64, seed=0):
    return change.draw(num, (3, 8, 6), torch.Generator().manual_seed(seed))


def test_flip_mirrors_the_chosen_images(images):
    numbers = drawn(Flip())
    flipped = Flip().apply(images, numbers)
    for before, after, chosen in zip(images, flipped, numbers["flip"], strict=True):
        assert torch.equal(after, before.flip(-1) if chosen else before)
    assert 16 < numbers["flip"].sum() < 48


@pytest.mark.parametrize("pad", [1, 2, 4])
def test_crop_cuts_each_padded_image_at_its_place(images, pad):
    crop = Crop(pad)
    numbers = drawn(crop)
    cropped = crop.apply(images, numbers)
    assert cropped.is_contiguous()
    padded = F.pad(images, (pad,) * 4)
    for number, after in enumerate(cropped):
        top, left = int(numbers["top"][number]), int(numbers["left"][number])
        assert torch.equal(after, padded[number, :, top : top + 8, left : left + 6])


def test_crop_reaches_every_place():
    numbers = drawn(Crop(1), num=300)
    assert numbers["top"].unique().tolist() == numbers["left"].unique().tolist() == [0, 1, 2]
    assert not torch.equal(numbers["top"], numbers["left"])


def test_inputs_are_not_changed_in_place(images):
    before = images.clone()
    for change in (Flip(), Crop()):
        change.apply(images, drawn(change))
    assert torch.equal(images, before)


def test_recipes_name_them_by_strings():
    assert augmentation("flip") == Flip()
    assert augmentation("crop") == Crop(4)
    assert augmentation("crop:2") == Crop(2)
    source = data.load("digits")
    assert data.Batches(source, 8, seed=0, augment=["crop:1"]).augment == [Crop(1)]


@pytest.mark.parametrize("spec", ["", "flop", "flip:2", "crop:", "crop:x", "crop:-1", "crop:0"])
def test_other_strings_are_refused(spec):
    with pytest.raises(UserError, match=r"augmentation|padding of crop"):
        augmentation(spec)
