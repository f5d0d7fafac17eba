"""Processes that can be killed, without the seconds that each would need to import torch.

A mother process imports everything once and forks a child for each rank. A child is a whole process:
it runs :mod:`tests.distributed.mortal` to its end, with an exit code or a signal, as a script would.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


# --- the mother's side -----------------------------------------------------------------------


def _bear(order: dict[str, Any]) -> bool:
    """Fork. Returns in both processes; true in the child."""
    child = os.fork()
    if child:
        print(json.dumps({"born": child}), flush=True)
        return False
    os.environ.update(order["environment"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(here, there)
    return True


def _wait_for_orders() -> dict[str, Any] | None:
    """Serve until the other side is gone. Returns in children only, with what they have to do."""
    children = 0
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.02)
        if readable:
            line = sys.stdin.readline()
            if not line:
                return None
            order = json.loads(line)
            if _bear(order):
                return order["run"]
            children += 1
        while children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            children -= 1
            print(
                json.dumps({"ended": child, "code": os.waitstatus_to_exitcode(status)}), flush=True
            )


def _serve() -> None:
    import torch

    from tests.distributed.mortal import Run, train

    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports more than all of the above
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    print(json.dumps({"ready": True}), flush=True)
    given = _wait_for_orders()
    if given is not None:
        train(Run(**given))


# --- the test's side -------------------------------------------------------------------------


class Mother:
    """Bears ranks and tells how they have ended."""

    def __init__(self) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.mothers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=ROOT,
            env=environment,
        )
        self.codes: dict[int, int] = {}
        self.living: set[int] = set()
        self._heard = b""
        self._hear()

    def _hear(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The mother's next word, or ``None`` if she says nothing for so long."""
        assert self.process.stdout is not None
        while b"\n" not in self._heard:
            if not select.select([self.process.stdout], [], [], seconds)[0]:
                return None
            more = os.read(self.process.stdout.fileno(), 4096)
            assert more, "the mother process has ended"
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        word: dict[str, Any] = json.loads(line)
        if "ended" in word:
            self.codes[word["ended"]] = word["code"]
            self.living.discard(word["ended"])
        return word

    def bear(self, environment: dict[str, str], run: dict[str, Any], log: Path) -> int:
        """Start one rank; returns its process id."""
        assert self.process.stdin is not None
        order = {"environment": environment, "run": run, "log": str(log)}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        while (word := self._hear()) is not None and "born" not in word:
            pass
        assert word is not None
        self.living.add(word["born"])
        return int(word["born"])

    def wait(self, ids: list[int], seconds: float) -> bool:
        """Whether all of these end within the time."""
        deadline = time.monotonic() + seconds
        while any(one in self.living for one in ids):
            left = deadline - time.monotonic()
            if left <= 0 or self._hear(left) is None:
                return False
        return True

    def kill(self, ids: list[int]) -> None:
        """Kill those that are still alive, and wait until they are not."""
        for one in ids:
            if one in self.living:
                os.kill(one, signal.SIGKILL)
        self.wait(ids, 30)

    def close(self) -> None:
        self.kill(list(self.living))
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


if __name__ == "__main__":
    _serve()
