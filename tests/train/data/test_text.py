"""Text as windows of bytes."""

import pytest
import torch

from kronfac.runs.errors import UserError
from kronfac.train import data

TEXT = bytes(range(100))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def windows(source, part):
    """All inputs of a part, sorted."""
    count = source.num_train if part == "train" else source.num_test
    batch = source.train_batch if part == "train" else source.test_batch
    return sorted(batch(torch.arange(count))[0].tolist())


def test_targets_are_the_bytes_that_follow(file):
    source = data.load("text", path=str(file), length=4)
    inputs, targets = source.train_batch(torch.tensor([0, 2]))
    assert torch.equal(inputs + 1, targets)
    assert inputs[:, 0].remainder(4).tolist() == [0, 0]
    assert inputs.dtype == targets.dtype == torch.int64


def test_every_tenth_run_of_windows_is_the_test_part(file):
    source = data.load("text", path=str(file), length=4)
    assert (source.kind, source.num_classes, source.sample_shape) == ("text", 256, (4,))
    # 24 windows in runs of two: only the tenth run, windows 18 and 19, is tested.
    assert windows(source, "test") == [[72, 73, 74, 75], [76, 77, 78, 79]]
    everything = sorted(windows(source, "train") + windows(source, "test"))
    assert everything == torch.arange(96).view(24, 4).tolist()


def test_the_order_is_shuffled_and_always_the_same(file):
    source, again = (data.load("text", path=str(file), length=4) for _ in range(2))
    first = source.train_batch(torch.arange(22))[0]
    assert torch.equal(first, again.train_batch(torch.arange(22))[0])
    assert first.tolist() != windows(source, "train")


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name, content in {"b.txt": b"b" * 20, "a/z.txt": b"a" * 20}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    source = data.load("text", path=tmp_path, length=2, size=24)
    found = windows(source, "train") + windows(source, "test")
    assert bytes(byte for window in sorted(found) for byte in window) == b"a" * 20 + b"b" * 2


def test_size_and_parts_are_limited(file):
    source = data.load("text", path=file, length=1, size=50)
    assert (source.num_train, source.num_test) == (45, 4)
    source = data.load("text", path=file, length=4, train=5, test=1)
    assert (source.num_train, source.num_test) == (5, 1)


def test_without_a_path_it_is_pythons_own_library():
    source = data.load("text", size=100_000)
    assert source.num_train + source.num_test == 781
    inputs, _ = source.train_batch(torch.arange(source.num_train))
    assert b"def __init__(self" in bytes(inputs.flatten().tolist())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"length": 0}, r"data\.length = 0 is not a number of bytes"),
        ({"length": 10}, r"the text is too short: 100 bytes hold 9 windows of 10 bytes"),
        ({"size": 0}, r"data\.size = 0 is not a number of bytes"),
        ({"length": 4, "train": 23}, r"data\.train = 23 .* give one from 1 to 22"),
        ({"path": "nowhere"}, r"data\.path = '.*nowhere' is neither a file nor a folder"),
    ],
)
def test_bad_options_are_refused(file, options, sentence):
    with pytest.raises(UserError, match=sentence):
        data.load("text", **{"path": file, **options})
