"""Joining the group of ranks that the environment describes, as torchrun sets it."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from kronfac.distributed.comm.collectives import LostRankError
from kronfac.runs.errors import UserError
from kronfac.train.launch import ranks

#: Set by our own launcher, which prints for all ranks.
LAUNCHED = "KRONFAC_LAUNCHED"
#: How long a message between ranks may take.
TIMEOUT = timedelta(minutes=10)
#: Gloo's errors have no type of their own, but each names the source file that raised it.
_GLOO_SOURCE = re.compile(r"\[[^\]]*\bgloo/[^\]]*:\d+\]")


class LostGroupError(Exception):
    """Another rank has ended; the message is one sentence."""


def world_size() -> int:
    """``WORLD_SIZE`` of the environment; 1 without it."""
    return _number("WORLD_SIZE", 1)


@contextmanager
def joined() -> Iterator[None]:
    """Join the process group inside, if the environment describes one."""
    size = world_size()
    if size == 1:
        yield
        return
    _watch_launcher()
    _join(size)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_loss(error):
            raise LostGroupError(
                "another rank has ended or cannot be reached; what was saved is still there: "
                "start all ranks again with --resume."
            ) from error
        raise
    _leave()


def _leave() -> None:
    """Destroy the group last: its threads must not outlive it."""
    ranks.forget()
    gc.collect()
    dist.destroy_process_group()


def leave_at_once(code: int) -> None:
    """End the process if it is still in a group, which happens after errors.

    Python's own exit would wait for threads that talk to lost ranks.
    """
    if dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_loss(error: BaseException) -> bool:
    """Whether an error means that another rank is gone.

    Our own messages raise :class:`LostRankError`, and torch's other backends and its store raise
    ``DistError``. What is left are the passes of DistributedDataParallel over Gloo.
    """
    if isinstance(error, LostRankError | dist.DistError):
        return True
    return type(error) is RuntimeError and _GLOO_SOURCE.search(str(error)) is not None


def _join(size: int) -> None:
    rank, local = _number("RANK"), _number("LOCAL_RANK", 0)
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank} is not one of WORLD_SIZE={size} ranks.")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(f"WORLD_SIZE={size} ranks need {name}; torchrun sets it.")
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise UserError(_why(error)) from error


def _why(error: Exception) -> str:
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if "address already in use" in str(error).lower() or "EADDRINUSE" in str(error):
        return f"port {os.environ['MASTER_PORT']} is taken; choose another one in MASTER_PORT."
    return f"ranks could not meet at {place}: {' '.join(str(error).split())[:200]}"


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text!r} must be a whole number; torchrun sets it.") from None


def _watch_launcher() -> None:
    """Save a checkpoint and end when the launcher is gone."""
    if os.environ.get(LAUNCHED) is None:
        return

    def wait() -> None:
        os.read(0, 1)  # not sys.stdin: Python cannot end while a thread holds its buffer
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
