"""Run folders and the files in them."""

import errno
import io
import os
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from kronfac.runs import disk
from kronfac.runs.errors import UserError
from kronfac.runs.events import EventFile, Recorder, drop_half_line, finite, read
from kronfac.train.record.folder import RunFolder, free_path, last_run, run_name


def test_names_do_not_collide(tmp_path: Path) -> None:
    name = run_name("digits", "kfac", 0)
    assert free_path(tmp_path, name) == tmp_path / "digits-kfac-s0"
    (tmp_path / name).mkdir()
    (tmp_path / f"{name}-2").mkdir()
    assert free_path(tmp_path, name) == tmp_path / "digits-kfac-s0-3"


def test_the_last_run_is_the_one_saved_last(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="with a checkpoint to resume"):
        last_run(tmp_path, "a-b-s1")
    for number, name in enumerate(["a-b-s1-2", "a-b-s1", "a-b-s10", "a-b-s1-3"]):
        (tmp_path / name).mkdir()
        if name != "a-b-s1-3":
            (tmp_path / name / "checkpoint.pt").touch()
            os.utime(tmp_path / name / "checkpoint.pt", (number, number))
    assert last_run(tmp_path, "a-b-s1") == tmp_path / "a-b-s1"


@pytest.mark.parametrize(
    ("lines", "finished"),
    [
        ("", False),
        ('{"event": "start"}\n', False),
        ('{"event": "start"}\n{"event": "finish", "status": "done"}\n', True),
        ('{"event": "start"}\n{"event": "finish", "status": "failed"}\n', True),
        ('{"event": "start"}\n{"event": "finish", "status": "stopped"}\n', False),
        ('{"event": "finish", "status": "done"}\n{"event": "start"}\n', False),
    ],
)
def test_a_run_is_finished_when_its_last_part_is(
    tmp_path: Path, lines: str, finished: bool
) -> None:
    (tmp_path / "events.jsonl").write_text(lines)
    assert RunFolder(tmp_path).is_finished is finished


def test_a_damaged_config_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read or is damaged"):
        RunFolder(tmp_path).read_config()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    disk.replace(path, lambda file: file.write(b"first"))

    def fail(file: IO[bytes]) -> None:
        file.write(b"sec")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        disk.replace(path, fail)
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        RunFolder(tmp_path / "file" / "run").create({})


def test_a_line_that_was_not_finished_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "start"}\n{"event": "st')
    assert read(path) == [{"event": "start"}]
    drop_half_line(path)
    assert path.read_text() == '{"event": "start"}\n'


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    assert finite({"a": [float("nan"), 1.0], "b": float("inf")}) == {"a": [None, 1.0], "b": None}
    file = EventFile(tmp_path / "events.jsonl")
    Recorder([file])("step", loss=float("nan"))
    file.close()
    [event] = read(tmp_path / "events.jsonl")
    assert (event["event"], event["loss"]) == ("step", None)
    assert event["time"] > 0


def test_a_disk_that_gets_full_within_a_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    """Torch then raises an error of its own, about the end of its file."""

    class Full(io.BytesIO):
        def write(self, content: Any) -> int:
            if self.tell() + len(content) > 1000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"the last one")
    with pytest.raises(UserError, match="the disk is full; what was saved before is still there"):
        disk.replace(path, lambda file: torch.save({"x": torch.zeros(10_000)}, Full()))
    assert path.read_bytes() == b"the last one"
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_errors_that_are_not_the_disks_are_not_explained_away(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="something else"), disk.explained(tmp_path):
        raise RuntimeError("something else")
