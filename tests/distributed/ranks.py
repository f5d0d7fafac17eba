"""Real Gloo ranks for tests: processes that are started once and run one function after another.

``run(3, function, *args)`` calls ``function(rank, *args)`` on three ranks of a process group made for
this call, and returns their results by rank. The function must be importable by name. Warnings are
errors in ranks too, and each call finds torch's default dtype and seed as they were at the start.

A rank that is done keeps its group until all ranks are: others may still be connecting to it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZE = 4
#: Seconds after which a collective that a rank waits for fails.
TIMEOUT = 120.0
#: Seconds for a whole call.
LIMIT = 240.0
#: Seconds for the processes to start, which import torch all at once.
START = 300.0
#: Seconds that ranks have left once one of them has failed.
GRACE = 15.0


class RankError(AssertionError):
    """A rank has raised; the message ends with its traceback."""


class RankTimeoutError(AssertionError):
    """A rank has not answered; the message shows where each silent rank stood."""


@dataclass(frozen=True)
class Answer:
    """What a call gives, or the exception that ends it, its traceback, and when it was raised."""

    result: Any
    error: BaseException | None = None
    shown: str = ""
    raised: float = 0.0


# --- the rank's side -------------------------------------------------------------------------


def _serve(connection: Connection, stacks: str) -> None:
    """Run what arrives until the other side is gone."""
    torch.set_num_threads(1)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        _send(connection, Answer("ready"))
        while True:
            try:
                task = _receive(connection)
                _send(connection, _answer(*task))
                _receive(connection)  # until all ranks have answered, or one of them has failed
            except EOFError:
                return
            _leave()
            _send(connection, Answer("left"))


def _answer(*task: Any) -> Answer:
    """Call the function in a group of its own, which stays if it succeeds."""
    try:
        answer = Answer(_call(*task))
    except Exception as error:
        # The time is that of the machine, so that cause and consequence on other ranks can be told.
        raised, shown = time.monotonic(), traceback.format_exc()
        answer = Answer(None, _picklable(error), shown, raised)
    torch.set_default_dtype(torch.float32)
    gc.collect()  # what still refers to the group has to go before it
    gc.freeze()  # modules and the like stay: looking at them takes longer than most tests
    if answer.error is not None:
        _leave()  # at once: ranks that wait for this one have to notice
    return answer


def _call(
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    dist.barrier()  # all ranks are there before one of them fails
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The same exceptions as in pyproject.toml.
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        warnings.filterwarnings("ignore", "momentum=.* comes on top", UserWarning)
        return function(rank, *args)


def _leave() -> None:
    """End the process group, unless the function has done so."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # It keeps meshes, and takes them for later ones of the same shape, whose groups are others.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _send(connection: Connection, value: Any) -> None:
    """Send bytes: what a connection pickles by itself are handles of tensors, which the sender keeps."""
    connection.send_bytes(pickle.dumps(value))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _picklable(error: Exception) -> Exception:
    """The error without what it may refer to."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# --- the test's side -------------------------------------------------------------------------


class Pool:
    """Rank processes that live until they are closed or until one of them does not answer."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.folder: Path | None = None
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        self.calls = 0

    def start(self) -> None:
        """Start the processes if there are none, and wait until they are ready for a call."""
        if self.processes:
            return
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = multiprocessing.get_context("spawn")
        added = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                stacks = str(self._stacks(rank))
                process = context.Process(target=_serve, args=(theirs, stacks), daemon=True)
                process.start()
                theirs.close()  # so that we notice when the rank dies
                self.processes.append(process)
                self.connections.append(ours)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        self._wait_for_start()

    def _wait_for_start(self) -> None:
        """No rank waits in a call for another one that still starts, nor does a call's limit run."""
        deadline = time.monotonic() + START
        for rank, connection in enumerate(self.connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise RankTimeoutError(f"rank {rank} did not start within {START:g} s.")
            if (first := self._hear(rank)).error is not None:
                self.close()
                raise RankError(first.shown)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()
        self.processes, self.connections = [], []
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        expect_errors: bool = False,
        limit: float = LIMIT,
        grace: float = GRACE,
        timeout: float = TIMEOUT,
    ) -> list[Any]:
        """Results of ``function(rank, *args)`` by rank.

        The first exception is raised, unless ``expect_errors``: then exceptions are results.
        """
        self.start()
        assert self.folder is not None
        self.calls += 1
        store = str(self.folder / f"store-{self.calls}")
        name = getattr(function, "__name__", str(function))
        for rank in range(world_size):
            task = (rank, world_size, store, timeout, function, args)
            _send(self.connections[rank], task)
        answers = self._collect(world_size, limit, grace)
        failed = [rank for rank, answer in answers.items() if answer.error is not None]
        first = min(failed, key=lambda rank: answers[rank].raised, default=None)
        silent = [rank for rank in range(world_size) if rank not in answers]
        broken = bool(silent) or not all(process.is_alive() for process in self.processes)
        try:
            if first is not None and not (expect_errors and not silent):
                also = f"; rank(s) {silent} did not answer afterwards" if silent else ""
                raise RankError(
                    f"rank {first} of {world_size} in {name}{also}:\n{answers[first].shown}"
                )
            if silent:
                stacks = self._where(silent)
                raise RankTimeoutError(
                    f"rank(s) {silent} of {world_size} did not answer within {limit:g} s in {name}.\n"
                    f"{stacks}"
                )
        finally:
            if broken:
                self.close()
        found = [answers[rank] for rank in range(world_size)]
        return [one.result if one.error is None else one.error for one in found]

    def _collect(self, world_size: int, limit: float, grace: float) -> dict[int, Answer]:
        """Answers by rank, as far as they arrive in time."""
        answers: dict[int, Answer] = {}
        released: set[int] = set()
        deadline = time.monotonic() + limit
        waiting = {self.connections[rank]: rank for rank in range(world_size)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                answers[rank] = self._hear(rank)
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + grace)
            if not waiting or any(one.error is not None for one in answers.values()):
                self._release(answers.keys() - released)
                released |= answers.keys()
        self._see_off(released, answers, deadline)
        return answers

    def _hear(self, rank: int) -> Answer:
        """The answer of a rank, which may be that its process has ended."""
        try:
            return _receive(self.connections[rank])
        except (EOFError, ConnectionError):  # nothing comes before the end of a process
            code = self._exit_code(rank)
            error = RuntimeError(f"the process of rank {rank} has ended with {code}.")
            return Answer(None, error, str(error))

    def _release(self, ranks: Iterable[int]) -> None:
        """Let ranks that have answered end their process group."""
        for rank in ranks:
            with contextlib.suppress(ConnectionError):  # a process that has ended needs no word
                _send(self.connections[rank], "leave")

    def _see_off(self, ranks: set[int], answers: dict[int, Answer], deadline: float) -> None:
        """Wait until these ranks are ready for the next call; one that is not has not answered."""
        for rank in ranks:
            if not self.connections[rank].poll(max(1.0, deadline - time.monotonic())):
                del answers[rank]
            elif (last := self._hear(rank)).error is not None and answers[rank].error is None:
                answers[rank] = last

    def _exit_code(self, rank: int) -> int | None:
        self.processes[rank].join(5)
        return self.processes[rank].exitcode

    def _stacks(self, rank: int) -> Path:
        assert self.folder is not None
        return self.folder / f"stacks-{rank}"

    def _where(self, ranks: list[int]) -> str:
        """Python stacks of ranks that do not answer."""
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)  # for the handlers to write
        return "\n".join(f"rank {rank}:\n{self._stacks(rank).read_text()}" for rank in ranks)


_pool = Pool()
atexit.register(_pool.close)
run = _pool.run
