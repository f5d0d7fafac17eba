"""The same run on two real ranks."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from kronfac.runs.errors import UserError
from kronfac.runs.events import read
from kronfac.train.launch.ranks import Ranks
from kronfac.train.record.folder import free_path
from kronfac.train.run.run import train
from tests.distributed.ranks import run
from tests.train import small
from tests.train.small import at_step

#: BatchNorm sees a rank's share only, so that N ranks equal one rank for models without it.
PLAIN: dict[str, Any] = {"model": {"name": "mlp", "hidden": [16]}}


def run_whole(rank: int, out: str, optimizer: str, changes: dict[str, Any]) -> Any:
    result = train(small.recipe(**changes), optimizer, out=out)
    return result.loss, [point.accuracy for point in result.curve]


def run_parts(rank: int, out: str, optimizer: str, changes: dict[str, Any], hit: int) -> Any:
    """One rank alone is interrupted; both stop at the same step and go on together."""
    recipe = small.recipe(**changes)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    if rank == hit:
        _interrupt_at(4, interrupt)
    try:
        part = train(recipe, optimizer, out=out)
    finally:
        _restore()
    rest = train(recipe, optimizer, resume=out)
    return part.status, part.signal, part.step, rest.status, rest.step, rest.loss


def _interrupt_at(step: int, act: Any) -> None:
    """Listeners hear on the first rank only, so that others are told by their steps."""
    from kronfac.train.run import stepping

    _restore.real = stepping.Stepper.take  # type: ignore[attr-defined]

    def take(self: Any, now: int, *args: Any) -> Any:
        if now == step:
            act()
        return _restore.real(self, now, *args)  # type: ignore[attr-defined]

    stepping.Stepper.take = take  # type: ignore[method-assign]


def _restore() -> None:
    from kronfac.train.run import stepping

    real = getattr(_restore, "real", None)
    if real is not None:
        stepping.Stepper.take = real  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("optimizer", "fisher"), [("sgd", "empirical"), ("kfac", "empirical"), ("kfac", "exact")]
)
def test_two_ranks_give_the_numbers_of_one(tmp_path: Path, optimizer: str, fisher: str) -> None:
    changes = {"train__mixup": 0.4, "optimizers__kfac__fisher": fisher, **PLAIN}
    alone = train(small.recipe(**changes), optimizer)
    both = run(2, run_whole, str(tmp_path / "run"), optimizer, changes)
    assert both[0] == both[1]
    assert both[0][0] == pytest.approx(alone.loss, rel=1e-3)
    start = read(tmp_path / "run" / "events.jsonl")[0]
    assert start["world"] == 2


@pytest.mark.parametrize("hit", [0, 1])
def test_two_ranks_stop_together_and_resume_with_the_same_bits(tmp_path: Path, hit: int) -> None:
    changes = {"train__mixup": 0.4, "optimizers__kfac__distribute": "comm-opt"}
    changes["optimizers__kfac__fisher"] = "mc"  # each rank draws labels of its own
    whole = run(2, run_whole, str(tmp_path / "whole"), "kfac", changes)
    parts = run(2, run_parts, str(tmp_path / "part"), "kfac", changes, hit)
    assert parts[0] == parts[1]
    status, number, step, end, last, loss = parts[0]
    assert (status, number, end, last) == ("stopped", signal.SIGTERM, "done", 12)
    assert 4 < step < 8
    assert loss == whole[0][0]
    assert small.same(small.weights(tmp_path / "whole"), small.weights(tmp_path / "part"))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "kfac"])
def test_three_ranks_resume_with_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    """From three ranks on, the order in which gradients are added matters.

    So does the scheme, which "auto" would choose for each run by what it measures.
    """
    changes = {"train__batch": 48, "train__steps": 10, "optimizers__kfac__distribute": "comm-opt"}
    whole = run(3, run_whole, str(tmp_path / "whole"), optimizer, changes)
    parts = run(3, run_parts, str(tmp_path / "part"), optimizer, changes, 2)
    assert parts[0][-1] == whole[0][0]
    assert small.same(small.weights(tmp_path / "whole"), small.weights(tmp_path / "part"))


def fill_disk(rank: int, out: str) -> str:
    def fill() -> None:
        (Path(out) / "checkpoint.pt.part").symlink_to("/dev/full")

    try:
        train(small.recipe(), "sgd", out=out, listeners=[at_step(6, fill)])
    except UserError as error:
        return str(error)
    return ""


def test_a_full_disk_is_told_on_all_ranks(tmp_path: Path) -> None:
    said = run(2, fill_disk, str(tmp_path / "run"))
    assert said[0] == said[1]
    assert "the disk is full" in said[0]


def name_too_long(rank: int, out: str) -> str:
    try:
        Ranks().on_first(lambda: free_path(Path(out), "run"))
    except UserError as error:
        return str(error)
    return ""


def test_what_the_system_says_about_a_path_is_told_on_all_ranks() -> None:
    said = run(2, name_too_long, "a" * 300)
    assert said[0] == said[1]
    assert said[0].endswith("aaa/run cannot be used: File name too long.")


def lose_numbers(rank: int, out: str) -> tuple[str, int]:
    """The loss of one rank only is not finite."""
    from kronfac.train.run import stepping

    real = stepping.Stepper.take

    def take(self: Any, step: int, *args: Any) -> torch.Tensor:
        loss = real(self, step, *args)
        return loss * float("nan") if rank == 1 and step == 5 else loss

    stepping.Stepper.take = take  # type: ignore[method-assign]
    try:
        result = train(small.recipe(), "sgd", out=out)
    finally:
        stepping.Stepper.take = real  # type: ignore[method-assign]
    return result.status, result.step


def test_all_ranks_fail_together(tmp_path: Path) -> None:
    ends = run(2, lose_numbers, str(tmp_path / "run"))
    assert ends[0] == ends[1]
    assert ends[0][0] == "failed"


def agree(rank: int) -> list[Any]:
    ranks = Ranks()
    late = [ranks.agree(5 if rank == 1 and turn == 1 else 0) for turn in range(4)]
    ranks.settle()
    return [late, ranks.agree_now(rank), ranks.total([1.0, float(rank)]), ranks.gather(rank)]


def test_flags_arrive_one_call_late_or_at_once() -> None:
    first, second = run(2, agree)
    assert first == [[0, 0, 5, 0], 1, [2.0, 1.0], [0, 1]]
    assert second == [[0, 0, 5, 0], 1, [2.0, 1.0], []]


def test_alone_there_is_nobody_to_ask() -> None:
    ranks = Ranks()
    assert (ranks.agree(3), ranks.agree_now(4), ranks.total([1.5])) == (3, 4, [1.5])
    assert ranks.gather("x") == ["x"]
    assert ranks.on_first(lambda: 7) == 7
