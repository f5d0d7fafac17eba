"""Ranks that really die: the others end with an error, and a restart goes on to the same result."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.equivalence import SCHEMES, Parameters, assert_near
from tests.distributed.mortal import PLACES, Run
from tests.distributed.mothers import ROOT, Mother
from tests.training import assert_same

#: Seconds that a rank has beyond the process group's timeout; the machine may be busy.
GRACE = 60.0
#: Seconds for a run that nobody disturbs, and the timeout of its process group.
LONG = 240.0
#: What a rank says that has lost another one: our sentence, or torch's own outside our messages.
LOST = (
    r"LostRankError: a message of phase '\w+' (did not arrive|could not be sent)",
    r"RuntimeError: .*(closed by peer|reset by peer|Timed out waiting|Broken pipe|Connection)",
    r"Dist(Network|Store|Backend)?Error",
)
WITHOUT = "layer-parallel without DDP"


@pytest.fixture(scope="module")
def mother() -> Iterator[Mother]:
    one = Mother()
    yield one
    one.close()


class Crew:
    """The ranks of one run."""

    def __init__(self, mother: Mother, run: Run, size: int, hosts_store: bool = False) -> None:
        self.mother, self.run, self.size = mother, run, size
        self.folder = Path(run.folder)
        environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        if hosts_store:  # rank 0 does, as without torchrun
            self.store = None
            environment |= {"MASTER_PORT": str(free_port())}
        else:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment |= {
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        self.logs = [self.folder / f"{time.monotonic_ns()}-{rank}.log" for rank in range(size)]
        self.ids = [
            mother.bear({"RANK": str(rank), **environment}, asdict(run), log)
            for rank, log in enumerate(self.logs)
        ]

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text() if self.logs[rank].exists() else ""

    def code(self, rank: int) -> int | None:
        return self.mother.codes.get(self.ids[rank])

    def wait_for(self, rank: int, text: str, seconds: float = LONG) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.said(rank):
            assert time.monotonic() < deadline, self.story()
            assert self.ids[rank] in self.mother.living or text in self.said(rank), self.story()
            self.mother.wait([self.ids[rank]], 0.01)

    def finish(self, ranks: list[int], seconds: float) -> None:
        """Wait until these ranks have ended; whoever is left afterwards is killed."""
        ids = [self.ids[rank] for rank in ranks]
        ended = self.mother.wait(ids, seconds)
        if not ended:
            for one in ids:
                if one in self.mother.living:
                    os.kill(one, signal.SIGUSR1)
            time.sleep(1)  # for them to write where they are
        self.mother.kill(self.ids)
        assert ended, f"ranks hang after {seconds:g} s\n{self.story()}"

    def story(self) -> str:
        ends = [self.code(rank) for rank in range(self.size)]
        return "\n".join(
            f"--- rank {rank}, ended with {end}:\n{self.said(rank)[-3000:]}"
            for rank, end in enumerate(ends)
        )

    def check_survivors(self, doomed: int) -> None:
        """Those who are left end by themselves, in time, and say why."""
        others = [rank for rank in range(self.size) if rank != doomed]
        self.finish(others, self.run.timeout + GRACE)
        for rank in others:
            assert self.code(rank) == 1, self.story()
            assert any(re.search(pattern, self.said(rank)) for pattern in LOST), self.story()

    def results(self) -> list[Parameters]:
        """Parameters at the end, of a run that nobody disturbs."""
        self.finish(list(range(self.size)), LONG)
        assert [self.code(rank) for rank in range(self.size)] == [0] * self.size, self.story()
        return read_results(self.folder, self.size)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def read_results(folder: Path, size: int) -> list[Parameters]:
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(size)]


# --- one rank dies ---------------------------------------------------------------------------

#: Where, who, and under which scheme.
#: Places that are tried by default; the others take their time.
OFTEN = ("forward", "send", "solve")
DEATHS = [
    ("build", 0, "comm-opt"),
    ("forward", 2, "comm-opt"),
    ("backward", 1, WITHOUT),
    ("send", 2, "mem-opt"),
    ("wait", 0, "hybrid"),
    ("solve", 1, "comm-opt"),
    ("between", 2, "replicated"),
    ("consolidate", 1, "spd"),
    ("save", 0, WITHOUT),
]


@pytest.mark.parametrize(
    ("place", "doomed", "scheme"),
    [one if one[0] in OFTEN else pytest.param(*one, marks=pytest.mark.slow) for one in DEATHS],
)
def test_a_killed_rank_ends_the_others(
    mother: Mother, tmp_path: Path, place: str, doomed: int, scheme: str
) -> None:
    run = Run(scheme, steps=1000, save_every=2, folder=str(tmp_path), place=place, doomed=doomed)
    crew = Crew(mother, run, 3)
    crew.check_survivors(doomed)
    assert crew.code(doomed) == -signal.SIGKILL
    assert f"struck at {place}" in crew.said(doomed)


def test_there_is_a_death_for_every_place() -> None:
    assert [place for place, _, _ in DEATHS] == list(PLACES)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 41))]
)
def test_a_rank_may_be_killed_at_any_moment(mother: Mother, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    scheme, doomed = chance.choice(list(SCHEMES)), chance.randrange(3)
    run = Run(scheme, steps=10**9, save_every=chance.choice([0, 3]), folder=str(tmp_path))
    crew = Crew(mother, run, 3)
    if chance.random() < 0.8:
        crew.wait_for(doomed, "step 0")
    time.sleep(chance.uniform(0, 1.5))
    os.kill(crew.ids[doomed], signal.SIGKILL)
    crew.check_survivors(doomed)


@pytest.mark.slow
def test_the_rank_that_hosts_the_store_may_die(mother: Mother, tmp_path: Path) -> None:
    run = Run(steps=1000, folder=str(tmp_path), place="solve", doomed=0)
    Crew(mother, run, 3, hosts_store=True).check_survivors(0)


@pytest.mark.parametrize(
    ("fate", "code"), [("raise", 1), pytest.param("leave", 0, marks=pytest.mark.slow)]
)
def test_a_rank_that_gives_up_ends_the_others(
    mother: Mother, tmp_path: Path, fate: str, code: int
) -> None:
    run = Run(steps=1000, folder=str(tmp_path), place="forward", fate=fate)
    crew = Crew(mother, run, 3)
    crew.check_survivors(1)
    assert crew.code(1) == code
    assert ("ValueError: this rank does not like its data" in crew.said(1)) == (fate == "raise")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "solve", "send"])
def test_a_rank_that_hangs_ends_the_others_after_the_timeout(
    mother: Mother, tmp_path: Path, place: str
) -> None:
    # Its connections stay open: only the timeout that the user gave can help.
    run = Run(steps=1000, folder=str(tmp_path), place=place, fate="stop", timeout=5)
    Crew(mother, run, 3).check_survivors(1)


@pytest.mark.slow
@pytest.mark.parametrize("farewell", ["destroy", "late", "none"])
def test_ranks_that_are_done_end_whenever_they_like(
    mother: Mother, tmp_path: Path, farewell: str
) -> None:
    run = Run(steps=4, folder=str(tmp_path), farewell=farewell, timeout=LONG)
    Crew(mother, run, 3).results()


# --- going on --------------------------------------------------------------------------------


def undisturbed(mother: Mother, run: Run, size: int, folder: Path) -> list[Parameters]:
    folder.mkdir()
    return Crew(mother, replace(run, folder=str(folder), place=""), size).results()


def start_torchrun(
    run: Run, size: int, restarts: int = 0, where: tuple[str, ...] = ("--standalone",)
) -> subprocess.Popen[str]:
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        # Otherwise ranks may read where those of the last attempt could be reached
        # (https://github.com/pytorch/pytorch/issues/135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", *where]
    command += ["--nproc-per-node", str(size), "--max-restarts", str(restarts)]
    command += [str(ROOT / "tests" / "distributed" / "mortal.py"), run.arguments()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | environment, text=True, **pipes)


def torchrun(run: Run, size: int, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    return finish_torchrun(start_torchrun(run, size, restarts))


def finish_torchrun(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        output, errors = process.communicate(timeout=2 * LONG)
    finally:
        process.terminate()  # it ends its ranks; nothing happens if it has ended
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.mark.parametrize(
    ("scheme", "size", "place", "whole"),
    [
        pytest.param(WITHOUT, 2, "solve", False, marks=pytest.mark.slow),
        pytest.param("comm-opt", 2, "between", True, marks=pytest.mark.slow),
        pytest.param("mem-opt", 3, "send", False, marks=pytest.mark.slow),
    ],
)
def test_torchrun_restarts_and_goes_on_to_the_same_result(
    mother: Mother, tmp_path: Path, scheme: str, size: int, place: str, whole: bool
) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    run = Run(scheme, save_every=2, whole=whole, folder=str(folder), place=place, at=6)
    run = replace(run, timeout=LONG, steps=9)
    ended = torchrun(run, size, restarts=3)
    assert ended.returncode == 0, ended.stderr
    assert f"struck at {place} in step 6" in ended.stdout
    assert f"rank 0 of {size} goes on from step 6" in ended.stdout
    found = read_results(folder, size)
    expected = undisturbed(mother, run, size, tmp_path / "undisturbed")
    if size == 2:
        assert_same(found, expected)
    else:  # DDP settles its buckets after its first backward, which changes bits
        for rank, values in enumerate(found):
            assert_near(values, expected[rank], f"rank {rank}")


@pytest.mark.slow
def test_two_hosts_restart_together(mother: Mother, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    run = Run(save_every=2, folder=str(folder), place="solve", at=6, steps=9, timeout=LONG)
    where = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two")
    where += ("--rdzv-endpoint", f"localhost:{free_port()}")
    hosts = [start_torchrun(run, 2, restarts=3, where=where) for _ in range(2)]
    for ended in [finish_torchrun(host) for host in hosts]:
        assert ended.returncode == 0, ended.stderr
        assert "goes on from step 6" in ended.stdout
    expected = undisturbed(mother, run, 4, tmp_path / "undisturbed")
    for rank, values in enumerate(read_results(folder, 4)):
        assert_near(values, expected[0], f"rank {rank}")


@pytest.mark.slow
def test_torchrun_goes_on_with_fewer_ranks(mother: Mother, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    run = Run(save_every=2, folder=str(folder), place="solve", at=6, steps=9, timeout=LONG)
    ended = torchrun(run, 3)
    assert ended.returncode == 1
    assert "struck at solve in step 6" in ended.stdout
    ended = torchrun(replace(run, place=""), 2)
    assert ended.returncode == 0, ended.stderr
    assert "rank 1 of 2 goes on from step 6" in ended.stdout
    expected = undisturbed(mother, run, 3, tmp_path / "undisturbed")
    for rank, values in enumerate(read_results(folder, 2)):
        assert_near(values, expected[0], f"rank {rank}")


@pytest.mark.parametrize(
    ("scheme", "size", "place", "whole", "then", "fewer"),
    [
        pytest.param("hybrid", 4, "wait", False, "hybrid", 3, marks=pytest.mark.slow),
        pytest.param(WITHOUT, 3, "save", False, WITHOUT, 2, marks=pytest.mark.slow),
        pytest.param("mem-opt", 3, "forward", True, "auto", 2, marks=pytest.mark.slow),
        pytest.param("auto", 2, "consolidate", False, "spd", 1, marks=pytest.mark.slow),
        pytest.param("spd", 2, "backward", False, "comm-opt", 3, marks=pytest.mark.slow),
    ],
)
def test_another_number_of_ranks_goes_on_to_the_same_result(
    mother: Mother,
    tmp_path: Path,
    scheme: str,
    size: int,
    place: str,
    whole: bool,
    then: str,
    fewer: int,
) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    run = Run(scheme, save_every=2, whole=whole, folder=str(folder), place=place, at=5, steps=9)
    Crew(mother, run, size).check_survivors(1)
    crew = Crew(mother, replace(run, scheme=then, place="", timeout=LONG), fewer)
    expected = undisturbed(mother, replace(run, timeout=LONG), size, tmp_path / "undisturbed")
    for rank, values in enumerate(crew.results()):
        assert_near(values, expected[0], f"rank {rank}")
    assert "goes on from step 4" in crew.said(0)
