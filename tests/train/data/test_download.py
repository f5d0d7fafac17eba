"""Fetching, from pages that are files here."""

import gzip
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from kronfac.runs.errors import UserError
from kronfac.train import data
from kronfac.train.data.download import download
from tests.train.data.tiny import cifar_contents, idx_contents, publish, write


def archive(path: Path, contents: dict[str, bytes]) -> str:
    with tarfile.open(path, "w:gz") as file:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path.as_uri()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def cifar_files(monkeypatch):
    return publish(monkeypatch, "cifar10", cifar_contents())


@pytest.fixture
def mnist_files(monkeypatch):
    return publish(monkeypatch, "mnist", idx_contents(0))


def test_an_archive_is_unpacked_and_nothing_else_is_left(tmp_path, cifar_files):
    url = archive(tmp_path / "page.tar.gz", {**cifar_contents(), "readme.html": b"hello"})
    folder = download(replace(cifar_files, urls=(url,)), tmp_path / "cache")
    assert folder == tmp_path / "cache" / "cifar-10-batches-bin"
    assert names(folder) == sorted(cifar_contents())
    assert data.load("cifar10", tmp_path / "cache").num_train == 100


def test_single_files_are_kept_packed(tmp_path, mnist_files):
    write(tmp_path / "page", idx_contents(0), packed=True)
    url = (tmp_path / "page").as_uri() + "/"
    folder = download(replace(mnist_files, urls=(url,)), tmp_path / "cache")
    assert names(folder) == sorted(f"{name}.gz" for name in idx_contents(0))
    assert data.load("mnist", tmp_path / "cache").num_train == 40


def test_files_that_are_there_are_not_overwritten(tmp_path, cifar_files):
    url = archive(tmp_path / "page.tar.gz", cifar_contents())
    write(tmp_path / "cifar-10-batches-bin", {"test_batch.bin": b"mine"})
    folder = download(replace(cifar_files, urls=(url,)), tmp_path)
    assert (folder / "test_batch.bin").read_bytes() == b"mine"
    assert names(folder) == sorted(cifar_contents())


def test_the_second_page_is_tried_when_the_first_does_not_answer(tmp_path, mnist_files):
    write(tmp_path / "page", idx_contents(0), packed=True)
    url = (tmp_path / "page").as_uri() + "/"
    pages = ("file:///nowhere/", url)
    assert download(replace(mnist_files, urls=pages), tmp_path).name == "mnist"


@pytest.mark.parametrize("use", [data.load, data.fetch])
def test_without_network_one_sentence_says_which_files_go_where(tmp_path, mnist_files, use):
    with pytest.raises(UserError) as caught:
        use("mnist", tmp_path)
    sentence = str(caught.value)
    assert sentence.startswith(f"MNIST is not in {tmp_path} and file:///nowhere/ does not answer")
    assert "put train-images-idx3-ubyte, " in sentence
    assert sentence.endswith(f"into {tmp_path / 'mnist'}")
    assert "\n" not in sentence


def test_a_wrong_file_in_an_archive_is_refused_and_not_kept(tmp_path, cifar_files):
    url = archive(tmp_path / "page.tar.gz", {**cifar_contents(), "data_batch_1.bin": b"oops"})
    with pytest.raises(
        UserError, match=r"data_batch_1\.bin in file:.* is damaged .*; try again later"
    ):
        download(replace(cifar_files, urls=(url,)), tmp_path / "cache")
    assert names(tmp_path / "cache" / "cifar-10-batches-bin") == []


def test_an_archive_without_a_file_is_refused(tmp_path, cifar_files):
    url = archive(tmp_path / "page.tar.gz", {"readme.html": b"hello"})
    with pytest.raises(UserError, match=r"does not hold data_batch_1\.bin"):
        download(replace(cifar_files, urls=(url,)), tmp_path / "cache")


@pytest.mark.parametrize("content", [b"<html>", gzip.compress(b"x" * 9999, mtime=0)[:-20]])
def test_something_that_is_no_archive_is_refused(tmp_path, cifar_files, content):
    page = tmp_path / "page.tar.gz"
    page.write_bytes(content)
    with pytest.raises(UserError, match="damaged archive"):
        download(replace(cifar_files, urls=(page.as_uri(),)), tmp_path / "cache")


def test_a_damaged_single_file_is_refused_and_not_kept(tmp_path, mnist_files):
    write(tmp_path / "page", idx_contents(0), packed=True)
    (tmp_path / "page" / "train-images-idx3-ubyte.gz").write_bytes(b"<html>")
    url = (tmp_path / "page").as_uri() + "/"
    with pytest.raises(
        UserError, match=r"page/train-images-idx3-ubyte\.gz is damaged .*; try again"
    ):
        download(replace(mnist_files, urls=(url,)), tmp_path / "cache")
    assert names(tmp_path / "cache" / "mnist") == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path, mnist_files):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write to .*file/mnist \(Not a directory\)"):
        download(mnist_files, tmp_path / "file")


def test_what_has_nothing_to_fetch_says_so():
    assert data.fetch("digits").is_dir()
    with pytest.raises(
        UserError, match=r"text has nothing to fetch: it reads what data\.path names"
    ):
        data.fetch("text")
