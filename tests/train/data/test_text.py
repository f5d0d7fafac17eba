"""Text as windows of bytes."""

import pytest
import torch

from kronfac.train import data
from kronfac.train.errors import UserError

TEXT = bytes(range(100))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def test_targets_are_the_bytes_that_follow(file):
    source = data.load("text", path=str(file), length=4)
    inputs, targets = source.train_batch(torch.tensor([0, 2]))
    assert inputs.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert targets.tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert inputs.dtype == targets.dtype == torch.int64


def test_the_last_tenth_is_the_test_part(file):
    source = data.load("text", path=str(file), length=4)
    assert (source.kind, source.num_classes, source.sample_shape) == ("text", 256, (4,))
    assert (source.num_train, source.num_test) == (22, 2)
    assert source.test_batch(torch.tensor([0]))[0].tolist() == [[90, 91, 92, 93]]
    _, last = source.train_batch(torch.tensor([21]))
    assert last.max() == 88


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name, content in {"b.txt": b"b" * 20, "a/z.txt": b"a" * 20}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    source = data.load("text", path=tmp_path, length=2)
    assert bytes(source.train_batch(torch.arange(10))[0].flatten().tolist()) == b"a" * 20


def test_size_and_parts_are_limited(file):
    assert data.load("text", path=file, length=1, size=50).num_train == 44
    source = data.load("text", path=file, length=4, train=5, test=1)
    assert (source.num_train, source.num_test) == (5, 1)


def test_without_a_path_it_is_pythons_own_library():
    source = data.load("text", size=100_000)
    assert source.num_train == 703
    inputs, _ = source.train_batch(torch.arange(703))
    assert b"def __init__(self" in bytes(inputs.flatten().tolist())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"length": 0}, r"data\.length = 0 is not a number of bytes"),
        ({"length": 10}, r"the text is too short: a part of 10 bytes"),
        ({"size": 0}, r"data\.size = 0 is not a number of bytes"),
        ({"length": 4, "train": 23}, r"data\.train = 23 .* give one from 1 to 22"),
        ({"path": "nowhere"}, r"data\.path = '.*nowhere' is neither a file nor a folder"),
    ],
)
def test_bad_options_are_refused(file, options, sentence):
    with pytest.raises(UserError, match=sentence):
        data.load("text", **{"path": file, **options})
