"""What samples look like, without the data."""

import pytest

from kronfac.runs.errors import UserError
from kronfac.train import data
from tests.train.data import tiny


def same(form: data.Form, source: data.Source) -> bool:
    known = (form.kind, form.num_classes, form.sample_shape)
    return known == (source.kind, source.num_classes, source.sample_shape)


def test_digits_and_texts_look_as_they_are_said_to():
    assert same(data.form("digits"), data.load("digits"))
    assert same(data.form("text"), data.load("text", size=10_000))
    assert same(data.form("text", length=16), data.load("text", length=16, size=10_000))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_published_data_sets_look_as_they_are_said_to(name, tmp_path, monkeypatch):
    contents = tiny.cifar_contents() if name == "cifar10" else tiny.idx_contents(0)
    tiny.publish(monkeypatch, name, contents)
    tiny.write(tmp_path / name, contents)
    assert same(data.form(name), data.load(name, tmp_path))


def test_every_data_set_has_a_form(tmp_path):
    assert all(data.form(name, tmp_path).num_classes > 1 for name in data.NAMES)


def test_classes_of_an_image_folder_are_counted_or_assumed(tmp_path):
    form = data.form("image-folder", tmp_path, path="mine", size=32, crop="center")
    assert (form.num_classes, form.sample_shape) == (1000, (3, 32, 32))
    assert form.note == f"{tmp_path}/mine/train is not there: 1000 classes are assumed."
    for name in ("cat", "dog"):
        (tmp_path / "mine" / "train" / name).mkdir(parents=True)
    form = data.form("image-folder", tmp_path, path="mine")
    assert (form.num_classes, form.sample_shape, form.note) == (2, (3, 224, 224), "")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("digit", {}, "unknown data set 'digit'"),
        ("digits", {"size": 9}, "unknown option data.size"),
        ("image-folder", {"size": 0}, "data.size = 0 is not a number of pixels"),
        ("text", {"length": 0}, "data.length = 0 is not a number of bytes"),
    ],
)
def test_options_are_checked_as_if_the_data_were_loaded(name, options, words):
    with pytest.raises(UserError, match=words):
        data.form(name, **options)
