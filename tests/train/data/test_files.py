"""Where files of published data sets are found, and what is refused."""

import hashlib
from pathlib import Path

import pytest
import torch

from kronfac.runs.errors import UserError
from kronfac.train import data
from kronfac.train.data import cifar, idx
from tests.train.data.tiny import cifar_contents, idx_contents, publish, write


@pytest.mark.parametrize("folder", cifar.FILES.folders)
def test_cifar_is_found_in_the_usual_folders(tmp_path, monkeypatch, folder):
    contents = cifar_contents()
    publish(monkeypatch, "cifar10", contents)
    write(tmp_path / folder, contents)
    source = data.load("cifar10", tmp_path)
    assert (source.num_train, source.num_test, source.sample_shape) == (100, 20, (3, 32, 32))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        (name, folder)
        for name, files in idx.FILES.items()
        for folder in files.folders
        if not folder.startswith("/")
    ],
)
def test_idx_files_are_found_in_the_usual_folders(tmp_path, monkeypatch, name, folder, packed):
    contents = idx_contents(0)
    publish(monkeypatch, name, contents)
    write(tmp_path / folder, contents, packed=packed)
    source = data.load(name, tmp_path)
    assert (source.num_train, source.num_test, source.sample_shape) == (40, 20, (1, 28, 28))


def test_bytes_become_normalised_images_and_labels(tmp_path, monkeypatch):
    contents = cifar_contents()
    publish(monkeypatch, "cifar10", contents)
    write(tmp_path, contents)
    images, labels = data.load("cifar10", tmp_path).train_batch(torch.tensor([3, 21]))
    record = torch.tensor(list(contents["data_batch_2.bin"][3073:6146]))
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    expected = (record[1:].view(3, 32, 32) / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(images[1], expected)
    assert labels.tolist() == [3, 1]
    assert labels.dtype == torch.int64


def test_sets_with_equal_file_names_in_one_folder_are_told_apart(tmp_path, monkeypatch):
    publish(monkeypatch, "mnist", idx_contents(0))
    publish(monkeypatch, "fashion-mnist", idx_contents(1))
    write(tmp_path, idx_contents(1))
    assert data.load("fashion-mnist", tmp_path).num_train == 40
    with pytest.raises(UserError, match=f"MNIST is not in {tmp_path}"):
        data.load("mnist", tmp_path)


def test_a_damaged_file_is_named_with_both_checksums(tmp_path, monkeypatch):
    contents = cifar_contents()
    files = publish(monkeypatch, "cifar10", contents)
    write(tmp_path / "cifar10", {**contents, "data_batch_3.bin": b"oops"})
    for use in (data.load, data.fetch):
        with pytest.raises(UserError, match=r"data_batch_3\.bin is damaged") as caught:
            use("cifar10", tmp_path)
        assert files.sums["data_batch_3.bin"] in str(caught.value)
        assert hashlib.sha256(b"oops").hexdigest() in str(caught.value)


def test_a_truncated_gzip_file_is_refused(tmp_path, monkeypatch):
    contents = idx_contents(0)
    publish(monkeypatch, "mnist", contents)
    write(tmp_path / "mnist", contents, packed=True)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(
        UserError, match=r"train-images-idx3-ubyte\.gz is damaged .*; move it away and"
    ):
        data.load("mnist", tmp_path)


def test_a_file_that_is_not_idx_is_refused():
    with pytest.raises(UserError, match="x is not an idx file"):
        idx.parse(b"\0\0\x08\x01\0\0\0\x05abc", Path("x"))
    with pytest.raises(UserError, match="x is not an idx file"):
        idx.parse(b"", Path("x"))


def test_the_directory_is_the_argument_then_the_variable_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KRONFAC_DATA", "/from/variable")
    assert data.data_directory(tmp_path) == tmp_path
    assert data.data_directory() == Path("/from/variable")
    monkeypatch.delenv("KRONFAC_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data.data_directory() == Path("/cache/kronfac")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.data_directory() == Path.home() / ".cache" / "kronfac"
