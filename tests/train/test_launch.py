"""Starting ranks, with small scripts in the place of the program."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from kronfac.distributed.comm.collectives import LostRankError
from kronfac.runs.errors import UserError
from kronfac.train.launch import group, launch
from kronfac.train.launch.ranks import Ranks


def start(script: str, count: int = 2) -> int:
    head = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    return launch.launch([], count, [sys.executable, "-S", "-E", "-c", head + script])


def test_ranks_learn_who_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
    script = (
        f"open(r'{tmp_path}/' + str(rank), 'w').write(','.join(os.environ[n] for n in {names}))"
    )
    assert start(script, 3) == 0
    threads = max(1, (os.cpu_count() or 1) // 3)
    said = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert said == [f"3,{rank},127.0.0.1,{threads}" for rank in range(3)]


def test_threads_that_were_asked_for_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert start(f"open(r'{tmp_path}/' + str(rank), 'w').write(os.environ['OMP_NUM_THREADS'])") == 0
    assert (tmp_path / "0").read_text() == "7"


def test_a_killed_rank_ends_all_with_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    """The others notice, and end with the code that says so."""
    script = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else sys.exit(3)"
    assert start(script, 3) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("kronfac: rank 1 was ended by SIGKILL, and the others have stopped")


def test_a_rank_that_hangs_afterwards_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.1)
    assert start("sys.exit('some trouble') if rank == 1 else time.sleep(1000)") == 1
    assert "rank 1 ended with code 1 (some trouble)" in capfd.readouterr().err


def test_a_sentence_of_one_rank_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    script = "if rank: sys.stderr.write('kronfac: no such file.\\n'); sys.exit(2)\nsys.exit(3)"
    assert start(script) == 2
    assert capfd.readouterr().err == "kronfac: no such file.\n"


def test_a_sentence_of_all_ranks_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert start("sys.stderr.write('kronfac: no such file.\\n'); sys.exit(2)") == 2
    assert capfd.readouterr().err == "kronfac: no such file.\n"


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signals_reach_all_ranks(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first rank sends one to us once all are ready, and each ends with the usual code."""
    script = f"""
signal.signal(signal.{name}, lambda number, frame: os._exit(128 + number))
open(r'{tmp_path}/' + str(rank), 'w').close()
while rank == 0 and not os.path.exists(r'{tmp_path}/1'):
    time.sleep(0.01)
if rank == 0:
    os.kill(os.getppid(), signal.{name})
time.sleep(1000)
"""
    assert start(script) == {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}[name]
    assert capfd.readouterr().err == ""


def test_a_signal_before_all_ranks_are_there_reaches_them_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start_process = subprocess.Popen

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if kwargs["env"]["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return start_process(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    assert start("time.sleep(1000)") == 1
    assert "was ended by SIGTERM" in capfd.readouterr().err


def test_ranks_that_lost_each_other_say_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert start("sys.exit(3)") == 1
    assert capfd.readouterr().err.count("\n") == 1


def test_a_busy_port_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        monkeypatch.setenv("MASTER_PORT", str(busy.getsockname()[1]))
        with pytest.raises(UserError, match="is taken; choose another one in MASTER_PORT"):
            start("pass")


@pytest.mark.parametrize("port", ["http", "99999"])
def test_a_port_is_a_number(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(UserError, match=f"MASTER_PORT='{port}' must be the number of a port"):
        start("pass")


# --- joining ranks that others have started ------------------------------------------------------


def test_without_ranks_nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with group.joined():
        assert group.world_size() == 1


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' must be a whole number"),
        ({"WORLD_SIZE": "2"}, "RANK='' must be a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is not one of WORLD_SIZE=2 ranks"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "need MASTER_ADDR; torchrun sets it"),
    ],
)
def test_an_incomplete_environment_is_one_sentence(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", group.LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words), group.joined():
        pass


def test_a_busy_port_under_torchrun_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        known = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**known, "MASTER_PORT": busy.getsockname()[1]}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(UserError, match="is taken"), group.joined():
            pass


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:5] Read error"), True),
        (LostRankError("whatever it says"), True),
        (dist.DistNetworkError("whatever it says"), True),
        (RuntimeError("size mismatch"), False),
        (RuntimeError("the connection closed by peer timed out"), False),
        (ValueError("connection closed"), False),
    ],
)
def test_lost_connections_are_told_from_other_errors(error: Exception, lost: bool) -> None:
    assert group.is_loss(error) is lost


def test_a_message_that_fails_means_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("whatever it says")

    monkeypatch.setattr(dist, "all_reduce", fail)
    ranks = Ranks()
    ranks.size = 2
    for send in (lambda: ranks.total([1.0]), lambda: ranks.agree(1)):
        with pytest.raises(LostRankError, match="whatever it says"):
            send()
