"""Starting several ranks on this machine, and ending them together."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO, Any

from kronfac.runs.errors import UserError
from kronfac.train.launch import signals
from kronfac.train.launch.group import LAUNCHED

#: Exit codes: what a run can end with.
DONE, FAILED, WRONG, LOST = 0, 1, 2, 3
#: Seconds that ranks have left once one of them has failed.
GRACE = 20.0
_LAST_PORT = 65_535
#: Ranks that even a small machine may start.
_MOST_RANKS = 64

#: What every rank runs.
PROGRAM = (sys.executable, "-m", "kronfac")


def check_count(count: int) -> None:
    """Raise if this machine cannot run ``count`` ranks."""
    cores = os.cpu_count() or 1
    most = max(_MOST_RANKS, 4 * cores)
    if count > most:
        raise UserError(
            f"--nproc {count} starts more ranks than a machine with {cores} core(s) can run; give at "
            f"most {most}, or spread them over machines with torchrun."
        )


def launch(arguments: Sequence[str], count: int, program: Sequence[str] = PROGRAM) -> int:
    """Run ``kronfac`` with these arguments on ``count`` ranks; returns one exit code for all.

    Only the first rank prints. Signals that end a run are passed on to all.
    """
    ranks = _Ranks()
    before = signals.handle(ranks.pass_on)
    try:
        ranks.start([*program, *arguments], count)
        codes = ranks.wait()
        return _verdict(codes, ranks.first_failed, ranks.errors)
    finally:
        ranks.end()
        signals.restore(before)


class _Ranks:
    """Processes of the ranks."""

    def __init__(self) -> None:
        self.errors: list[IO[bytes]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.first_failed: int | None = None
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._started = False
        self._early: list[int] = []

    def start(self, command: list[str], count: int) -> None:
        """Start all ranks; signals that arrive meanwhile are passed on afterwards."""
        port = _port()
        for rank in range(count):
            self.errors.append(tempfile.TemporaryFile())  # noqa: SIM115
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=_environment(rank, count, port),
                    stdin=subprocess.PIPE,  # never written to: ranks see its end when we are gone
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    stderr=None if rank == 0 else self.errors[rank],
                    start_new_session=True,  # Ctrl-C reaches them through us, once
                )
            )
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()
        self._started = True
        for number in self._early:
            self.pass_on(number, None)

    def _watch(self, rank: int) -> None:
        self.processes[rank].wait()
        self._ended.put(rank)

    def wait(self) -> list[int | None]:
        """Exit codes by rank, once all have ended; after a failure others have ``GRACE`` seconds."""
        deadline: float | None = None
        for _ in self.processes:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                rank = self._ended.get(timeout=left)
            except queue.Empty:
                break
            code = self.processes[rank].returncode
            if code not in (DONE, LOST) and self.first_failed is None:
                self.first_failed = rank
            if code != DONE and deadline is None:
                deadline = time.monotonic() + GRACE
        return [process.poll() for process in self.processes]

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal to all ranks."""
        if not self._started:
            self._early.append(number)
            return
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def end(self) -> None:
        """Kill what still runs and close its files."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for errors in self.errors:
            errors.close()


def _verdict(codes: list[int | None], first_failed: int | None, errors: list[IO[bytes]]) -> int:
    """One exit code, and one sentence unless the first rank has printed it."""
    if all(code == DONE for code in codes):
        return DONE
    if first_failed is None:
        print("kronfac: ranks have lost each other; continue with --resume.", file=sys.stderr)
        return FAILED
    code = codes[first_failed]
    assert code is not None
    if first_failed == 0 and code > 0:
        return code
    if codes[0] == code and code > 0:
        return code  # all have failed for the same reason, and the first one has printed it
    print(_sentence(first_failed, code, errors[first_failed]), file=sys.stderr)
    return code if code == WRONG else FAILED


def _sentence(rank: int, code: int, errors: IO[bytes]) -> str:
    errors.seek(0)
    said = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    if said and said[-1].startswith("kronfac"):
        return said[-1]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    why = f" ({said[-1].strip()})" if said and code > 0 else ""
    return (
        f"kronfac: rank {rank} {how}{why}, and the others have stopped; what was saved is still "
        "there: continue with --resume."
    )


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    own: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        LAUNCHED: 1,
    }
    default = {"OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // count)}
    if sys.platform == "linux":
        default["GLOO_SOCKET_IFNAME"] = "lo"  # type: ignore[assignment]
    texts = {key: str(value) for key, value in own.items()}
    return {**{key: str(value) for key, value in default.items()}, **os.environ, **texts}


def _port() -> int:
    """A free port of this machine, or the one that MASTER_PORT names."""
    wanted = os.environ.get("MASTER_PORT", "0")
    if not wanted.isdecimal() or int(wanted) > _LAST_PORT:
        raise UserError(
            f"MASTER_PORT={wanted!r} must be the number of a port, at most {_LAST_PORT}."
        )
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", int(wanted)))
        except OSError as error:
            raise UserError(
                f"port {wanted} is taken; choose another one in MASTER_PORT, or none."
            ) from error
        return int(probe.getsockname()[1])
