"""Folders of images, decoded when they are wanted."""

import shutil
import sys

import pytest
import torch

from kronfac.runs.errors import UserError
from kronfac.train import data
from kronfac.train.data import Batches, Flip
from kronfac.train.data.crop_box import centre_box, random_box
from kronfac.train.data.source import RandomDecoding

Image = pytest.importorskip("PIL.Image")
COLOURS = {"cat": (250, 10, 10), "dog": (10, 250, 10), "eel": (10, 10, 250)}


@pytest.fixture
def folder(tmp_path):
    for part, num in (("train", 4), ("val", 2)):
        for name, colour in COLOURS.items():
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(num):
                suffix = "png" if number % 2 else "jpeg"
                image = Image.new("RGB", (60 + 10 * number, 50), colour)
                image.save(tmp_path / part / name / f"{number}.{suffix}")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    return tmp_path


def pixels(images):
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (images * std.view(3, 1, 1) + mean.view(3, 1, 1)) * 255


def test_classes_are_the_folders_by_name(folder):
    source = data.load("image-folder", path=folder, size=16)
    assert (source.num_train, source.num_test, source.num_classes) == (12, 6, 3)
    assert (source.kind, source.sample_shape) == ("image", (3, 16, 16))
    for images, labels in (
        source.train_batch(torch.arange(12)),
        source.test_batch(torch.arange(6)),
    ):
        for image, label in zip(pixels(images), labels.tolist(), strict=True):
            colour = torch.tensor(list(COLOURS.values())[label]).view(3, 1, 1)
            assert (image - colour).abs().max() < 4


def test_the_data_directory_is_the_default_path(folder):
    assert data.load("image-folder", folder, size=16).num_train == 12
    assert data.load("image-folder", folder.parent, path=folder.name, size=16).num_train == 12


def test_a_subset_has_all_classes(folder):
    source = data.load("image-folder", path=str(folder), size=16, train=6, test=3)
    assert source.train_batch(torch.arange(6))[1].bincount().tolist() == [2, 2, 2]
    assert source.test_batch(torch.arange(3))[1].bincount().tolist() == [1, 1, 1]


def test_samples_that_are_kept_apart_are_of_all_classes_and_training_crops_at_random(folder):
    source = data.hold_out(data.load("image-folder", path=folder, size=16), 6)
    assert (source.num_train, source.num_test) == (6, 6)
    assert len(source.test_batch(torch.arange(6))[1].unique()) == 3
    assert isinstance(source, RandomDecoding)
    inputs, labels = Batches(source, 6, seed=0).get(0)
    assert inputs.shape == (6, 3, 16, 16)
    together = torch.cat([labels, source.test_batch(torch.arange(6))[1]])
    assert together.bincount().tolist() == [4, 4, 4]


@pytest.fixture
def gradient(folder):
    """Replace one image by one that is brighter to the right, red, and to the bottom, green."""
    across = torch.linspace(0, 255, 256).expand(256, 256)
    image = torch.stack([across, across.T, torch.zeros(256, 256)], dim=2).byte()
    Image.fromarray(image.numpy()).save(folder / "train" / "cat" / "1.png")
    return folder


def test_the_centre_is_seven_eighths_of_the_shorter_side(gradient):
    source = data.load("image-folder", path=gradient, size=32)
    image = pixels(source.train_batch(torch.tensor([1]))[0])[0]
    step = 224 / 32
    expected = 16 + step * (torch.arange(32) + 0.5) - 0.5
    assert (image[0, 0] - expected).abs().max() < 2
    assert (image[1, :, 0] - expected).abs().max() < 2


def test_training_crops_are_random_and_the_same_on_one_and_on_two_ranks(gradient):
    source = data.load("image-folder", path=gradient, size=16)
    whole = Batches(source, 12, seed=0, augment=[Flip()])
    images, labels = whole.get(0)
    parts = [Batches(source, 12, seed=0, rank=r, world=2, augment=[Flip()]).get(0) for r in (0, 1)]
    assert torch.equal(images, torch.cat([part[0] for part in parts]))
    assert torch.equal(labels, torch.cat([part[1] for part in parts]))
    # A crop of one image has its own colours each time; all others have a single colour.
    assert not torch.equal(*(whole.get(step)[0].sum(0) for step in (0, 1)))


def test_training_crops_can_be_the_centre(gradient):
    source = data.load("image-folder", path=gradient, size=16, crop="center", workers=1)
    images, labels = Batches(source, 12, seed=0).get(0)
    order = labels.argsort(stable=True)
    plain, _ = source.train_batch(torch.arange(12))
    assert torch.allclose(images[order].sum(0), plain.sum(0), atol=1e-4)


def test_random_boxes_have_the_area_and_shape_of_the_definition():
    numbers = torch.rand(500, 10, 4, generator=torch.Generator().manual_seed(0)).tolist()
    for tries in numbers:
        left, top, right, bottom = random_box(300, 200, tries)
        wide, tall = right - left, bottom - top
        assert 0 <= left < right <= 300 + 1e-9
        assert 0 <= top < bottom <= 200 + 1e-9
        assert 0.08 - 1e-9 <= wide * tall / 60_000 <= 1
        assert 3 / 4 - 1e-9 <= wide / tall <= 4 / 3 + 1e-9


def test_when_no_box_fits_it_is_the_middle():
    large = [[0.99, 0.5, 0.0, 0.0]] * 10
    assert random_box(1000, 10, large) == pytest.approx((493.33, 0, 506.67, 10), abs=0.01)
    assert random_box(10, 1000, large) == pytest.approx((0, 493.33, 10, 506.67), abs=0.01)


def test_the_centre_box_is_a_square_in_the_middle():
    assert centre_box(320, 256) == (48, 16, 272, 240)


def test_a_damaged_image_is_named(folder):
    (folder / "train" / "dog" / "0.jpeg").write_bytes(b"not an image")
    source = data.load("image-folder", path=folder, size=16)
    with pytest.raises(UserError, match=r"dog/0\.jpeg cannot be decoded as an image"):
        source.train_batch(torch.arange(12))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": "nowhere"}, "nowhere holds no folder train"),
        ({"path": "nowhere", "size": 0}, r"data\.size = 0 is not a number of pixels"),
        ({"path": "nowhere", "crop": "left"}, r"data\.crop = 'left' is unknown"),
        ({"path": "nowhere", "workers": 0}, r"data\.workers = 0 is not a number of threads"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        data.load("image-folder", **options)


def test_a_folder_without_images_is_named(tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match="train holds no images in folders of classes"):
        data.load("image-folder", path=tmp_path)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("val", r"val holds no images of 1 of the classes in .*train: dog; both folders"),
        ("train", r"train holds no images of 1 of the classes in .*val: dog; both folders"),
    ],
)
def test_a_class_that_one_part_lacks_is_named(folder, part, words):
    for file in (folder / part / "dog").iterdir():
        file.unlink()
    with pytest.raises(UserError, match=words):
        data.load("image-folder", path=folder, size=16)
    (folder / part / "dog").rmdir()
    with pytest.raises(UserError, match=words):
        data.load("image-folder", path=folder, size=16)


def test_of_many_such_classes_the_first_are_named(folder):
    for number in range(5):
        shutil.copytree(folder / "train" / "cat", folder / "train" / f"cat{number}")
    with pytest.raises(
        UserError, match=r"no images of 5 of the .*: cat0, cat1, cat2, \.\.\.; both"
    ):
        data.load("image-folder", path=folder, size=16)


def test_a_folder_without_images_is_no_class(folder):
    (folder / "train" / ".cache").mkdir()
    assert data.load("image-folder", path=folder, size=16).classes == ["cat", "dog", "eel"]


def test_without_pillow_one_sentence_says_how_to_get_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"Pillow, which is not installed; run: pip install"):
        data.load("image-folder", path=folder)
