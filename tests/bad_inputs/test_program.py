"""Flags of the program with wrong types, values and combinations: each gets one clear answer.

A row is the command line, the kind of answer (``refused`` or ``accepted``) and a phrase of it.
"""

import shlex
from pathlib import Path

import pytest

from tests.train import small
from tests.train.answers import ask, check, without_training


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a recipe, a file and a folder that is no run."""
    monkeypatch.chdir(tmp_path)
    without_training(monkeypatch)
    small.write(tmp_path / "small.toml")
    small.write(tmp_path / "plain.toml", optimizer="sgd", optimizers={"sgd": {"lr": 0.1}})
    (tmp_path / "file").write_text("no run")
    (tmp_path / "folder").mkdir()


TRAIN = [
    ("train nonsense", "refused", "unknown recipe 'nonsense'"),
    ("train nowhere.toml", "refused", "there is no recipe file 'nowhere.toml'"),
    ("train folder", "refused", "unknown recipe 'folder'"),
    ("train small.toml plain.toml", "refused", "unrecognized arguments: plain.toml"),
    ("train small.toml --optimizer", "refused", "expected one argument"),
    ("train small.toml --optimizer lbfgs", "refused", "has no optimizer 'lbfgs'"),
    ("train small.toml --optimizer sgd,kfac", "refused", "has no optimizer 'sgd,kfac'"),
    ("train small.toml --lr fast", "refused", "invalid float value: 'fast'"),
    ("train small.toml --lr -0.1", "refused", "lr = -0.1 must be a number of at least 0"),
    ("train small.toml --lr nan", "refused", "lr = nan must be a number of at least 0"),
    ("train small.toml --lr inf", "refused", "lr = inf must be a number of at least 0"),
    ("train small.toml --lr 0", "accepted", "runs/small-kfac-s0"),
    ("train small.toml --seed one", "refused", "invalid int value: 'one'"),
    ("train small.toml --seed 1.5", "refused", "invalid int value: '1.5'"),
    ("train small.toml --seed -1", "refused", "train.seed = -1 must be at least 0"),
    ("train small.toml --seed 4294967296", "refused", "must be at most 4294967295"),
    ("train small.toml --seed 4294967295", "accepted", "runs/small-kfac-s4294967295"),
    ("train small.toml --epochs 0", "refused", "must be a positive number of epochs"),
    ("train small.toml --epochs -1", "refused", "must be a positive number of epochs"),
    ("train small.toml --epochs nan", "refused", "must be a positive number of epochs"),
    ("train small.toml --epochs inf", "refused", "must be a positive number of epochs"),
    ("train small.toml --epochs 1e300", "refused", "must be a positive number of epochs"),
    ("train small.toml --batch 0", "refused", "train.batch = 0 must be at least 1"),
    ("train small.toml --batch -8", "refused", "train.batch = -8 must be at least 1"),
    ("train small.toml --batch 1e3", "refused", "invalid int value: '1e3'"),
    ("train small.toml --batch 129", "refused", "has 128 training samples"),
    ("train small.toml --nproc two", "refused", "invalid int value: 'two'"),
    ("train small.toml --nproc -2", "refused", "--nproc -2 must be at least 1"),
    ("train small.toml --nproc 12", "refused", "cannot be divided over 12 rank(s)"),
    ("train small.toml --nproc 70 --batch 64", "refused", "--nproc 70"),
    ("train small.toml --nproc 1000000 --batch 1000000", "refused", "starts more ranks than"),
    ("train small.toml --nproc 2 --device toaster", "refused", "--device 'toaster' is unknown"),
    ("train small.toml --nproc 2 --log paper", "refused", "unknown logger 'paper'"),
    ("train small.toml --device ''", "refused", "--device '' is unknown"),
    ("train small.toml --device cpu:x", "refused", "--device 'cpu:x' is unknown"),
    ("train small.toml --device mps", "refused", "--device 'mps' is unknown"),
    ("train small.toml --log paper", "refused", "unknown logger 'paper' in --log"),
    ("train small.toml --log wandb,wandb", "refused", "names 'wandb' more than once"),
    ("train small.toml --log ''", "accepted", "runs/small-kfac-s0"),
    ("train small.toml --out file", "refused", "file exists already"),
    ("train small.toml --out file/run", "refused", "file/run"),
    ("train small.toml --out new --runs other", "refused", "--runs and --out both say which"),
    ("train small.toml --resume folder --out new", "refused", "give one of them"),
    ("train small.toml --resume folder --runs x", "refused", "--runs and --resume both say"),
    ("train small.toml --resume folder", "refused", "folder is no run folder"),
    ("train small.toml --resume file", "refused", "file is no run folder"),
    ("train small.toml --resume nowhere", "refused", "nowhere is no run folder"),
    ("train small.toml --resume", "refused", "there is no run runs/small-kfac-s0 with"),
    ("train small.toml --runs file", "refused", "file/small-kfac-s0"),
    ("train small.toml --stop-at-target", "refused", "--stop-at-target needs a target"),
    ("train small.toml --stop-at-target --set train.target=0.5", "accepted", "runs/small"),
    ("train small.toml --no-stop-at-target", "accepted", "runs/small-kfac-s0"),
    ("train small.toml --set", "refused", "expected one argument"),
    ("train small.toml --set train", "refused", "must look like key=value"),
    ("train small.toml --set =3", "refused", "must look like key=value"),
    ("train small.toml --set train.batch=", "refused", "must look like key=value"),
    ("train small.toml --set .=3", "refused", "unknown key ''"),
    ("train small.toml --set train.=3", "refused", "unknown key ''"),
    ("train small.toml --set a.b.c=3", "refused", "unknown key 'a'"),
    ("train small.toml --set train=3", "refused", "must be a table, [train]"),
    ("train small.toml --set train.batch.size=3", "refused", "'batch' is a value"),
    ("train small.toml --set optimizers.mine.lr=1", "refused", "unknown kind 'mine'"),
    ("train small.toml --quiet yes", "refused", "unrecognized arguments: yes"),
    ("train small.toml --optimizers sgd", "refused", "unrecognized arguments: --optimizers"),
    ("train mnist --data-dir file", "refused", "file"),
]

COMPARE = [
    ("compare small.toml --optimizers sgd,sgd", "refused", "names 'sgd' more than once"),
    ("compare small.toml --optimizers ' sgd , sgd '", "refused", "names 'sgd' more than once"),
    ("compare small.toml --optimizers ''", "refused", "names none; leave it out for all"),
    ("compare small.toml --optimizers lbfgs", "refused", "has no optimizer 'lbfgs'"),
    ("compare small.toml --seeds -1", "refused", "--seeds -1 must be at least 1"),
    ("compare small.toml --seeds 1.5", "refused", "invalid int value: '1.5'"),
    ("compare small.toml --seeds 2 --set train.seed=4294967295", "refused", "at most 4294967295"),
    ("compare small.toml --lr 0.1", "refused", "unrecognized arguments: --lr"),
    ("compare small.toml --out folder", "refused", "folder exists already"),
    ("compare small.toml --resume folder", "refused", "folder holds no runs"),
    ("compare small.toml --resume folder --out new", "refused", "give one of them"),
    ("compare small.toml --resume folder --runs new", "refused", "--runs and --resume both"),
    ("compare small.toml --out new --runs new", "refused", "--runs and --out both say which"),
    ("compare small.toml --resume", "refused", "expected one argument"),
    ("compare small.toml --nproc 70 --batch 64", "refused", "--nproc 70"),
    ("compare small.toml --nproc 12", "refused", "cannot be divided over 12 rank(s)"),
    ("compare small.toml --stop-at-target", "refused", "--stop-at-target needs a target"),
    ("compare small.toml --no-report=1", "refused", "ignored explicit argument '1'"),
    ("compare small.toml --device toaster", "refused", "--device 'toaster' is unknown"),
    ("compare small.toml --log paper", "refused", "unknown logger 'paper'"),
]

OTHERS = [
    ("", "refused", "required: COMMAND"),
    ("fly", "refused", "invalid choice: 'fly'"),
    ("--verbose train", "refused", "see `kronfac --help`"),
    ("report", "refused", "required: RUN"),
    ("report nowhere", "refused", "nowhere does not exist"),
    ("report file", "refused", "file is a file"),
    ("report folder", "refused", "folder is no run"),
    ("report folder --out", "refused", "expected one argument"),
    ("report folder --title", "refused", "expected one argument"),
    ("recipes nonsense", "refused", "unknown recipe 'nonsense'"),
    ("recipes digits mnist", "refused", "unrecognized arguments: mnist"),
    ("recipes nowhere.toml", "refused", "there is no recipe file"),
    ("recipes digits", "accepted", "[optimizers.kfac]"),
    ("data nonsense", "refused", "unknown data set 'nonsense'"),
    ("data text", "refused", "text has nothing to fetch"),
    ("data mnist --data-dir file", "refused", "file"),
    ("data digits", "accepted", "data"),
    ("plan small.toml", "refused", "required: --ranks"),
    ("plan small.toml --ranks many", "refused", "invalid int value: 'many'"),
    ("plan small.toml --ranks 0", "refused", "--ranks 0 must be at least 2"),
    ("plan small.toml --ranks -4", "refused", "--ranks -4 must be at least 2"),
    ("plan small.toml --ranks 1000000000", "refused", "--ranks 1000000000 must be at most"),
    ("plan small.toml --ranks 4 --gbit 0", "refused", "--gbit 0 must be positive"),
    ("plan small.toml --ranks 4 --gbit inf", "refused", "--gbit inf must be positive"),
    ("plan small.toml --ranks 4 --gbit fast", "refused", "invalid float value: 'fast'"),
    ("plan small.toml --ranks 4 --latency -1", "refused", "--latency -1 must be 0 or more"),
    ("plan small.toml --ranks 4 --latency nan", "refused", "--latency nan must be 0 or more"),
    ("plan plain.toml --ranks 4", "refused", "has no optimizer of kind 'kfac' to plan for"),
    ("plan nonsense --ranks 4", "refused", "unknown recipe 'nonsense'"),
    ("plan small.toml --ranks 4 --set model.name=x", "refused", "unknown model 'x'"),
    ("plan small.toml --ranks 4", "accepted", "comm-opt"),
]


@pytest.mark.parametrize(
    ("line", "kind", "phrase"),
    [*TRAIN, *COMPARE, *OTHERS],
    ids=[row[0] or "nothing" for row in [*TRAIN, *COMPARE, *OTHERS]],
)
def test_flags(line: str, kind: str, phrase: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(ask(shlex.split(line), capsys), kind, phrase)


ENVIRONMENT = [
    ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many' must be a whole number"),
    ({"WORLD_SIZE": "0", "RANK": "0"}, "RANK=0 is not one of WORLD_SIZE=0 ranks"),
    ({"WORLD_SIZE": "2"}, "RANK='' must be a whole number"),
    ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is not one of WORLD_SIZE=2 ranks"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2 ranks need MASTER_ADDR"),
]


@pytest.mark.parametrize(("variables", "phrase"), ENVIRONMENT)
def test_an_environment_that_describes_no_ranks(
    variables: dict[str, str],
    phrase: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check(ask(["train", "small.toml"], capsys), "refused", phrase)


def test_nproc_under_torchrun_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = ask(["train", "small.toml", "--nproc", "2"], capsys)
    check(answer, "refused", "leave it out under torchrun")
