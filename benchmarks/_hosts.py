"""Several hosts on one machine: network namespaces joined by links of a chosen speed.

    with make_hosts(4, rate="100mbit") as hosts:
        hosts.run([sys.executable, "train.py"])

Each host is a namespace with one network card, and a further namespace holds the switch that they
are plugged into. `tc tbf` limits both directions of every link. This needs root and iproute2;
`make_hosts` says so otherwise and starts all ranks on the loopback of this machine, without limits.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType

#: No limit.
UNLIMITED = "unlimited"
CARD = "eth0"
PREFIX = "kronfac-"
_SUBNET = "10.77.0"
#: A short burst, so that small messages do not pass for free after a pause.
_BURST = "16kb"
_QUEUE = "50ms"


class Loopback:
    """Ranks on this machine, with nothing between them."""

    limited = False

    def __init__(self, count: int) -> None:
        self.count = count
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, command: Sequence[str], **extra: str) -> list[subprocess.Popen[bytes]]:
        """Start `command` once per rank, with what torch.distributed wants in the environment."""
        address, port, card = self._meeting_point()
        for rank in range(self.count):
            places = {
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(self.count),
                "GLOO_SOCKET_IFNAME": card,
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # hosts here have addresses but no names
            }
            environment = os.environ | places | extra
            process = subprocess.Popen([*self._enter(rank), *command], env=environment)
            self._running.append(process)
        return list(self._running)

    def run(self, command: Sequence[str], *, timeout: float = 3600, **extra: str) -> None:
        """Start `command` once per rank and wait; when one rank fails, the others are ended."""
        started = self.start(command, **extra)
        until = time.monotonic() + timeout
        try:
            while None in (codes := [process.poll() for process in started]):
                failed = [rank for rank, code in enumerate(codes) if code]
                if failed or time.monotonic() > until:
                    why = f"rank {failed[0]} failed" if failed else f"no end after {timeout:g} s"
                    raise RuntimeError(f"{why}: {' '.join(command)}")
                time.sleep(0.05)
        finally:
            self.stop()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}: {' '.join(command)}")

    def stop(self) -> None:
        """End what still runs."""
        for process in self._running:
            if process.poll() is None:
                process.terminate()
        for process in self._running:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def _enter(self, rank: int) -> list[str]:
        return []

    def _meeting_point(self) -> tuple[str, int, str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return "127.0.0.1", free.getsockname()[1], "lo"


class Namespaces(Loopback):
    """One namespace per rank behind a common switch; all are gone when the context ends."""

    limited = True

    def __init__(self, count: int, rate: str = UNLIMITED) -> None:
        super().__init__(count)
        self.rate = rate
        self._names = [f"{PREFIX}{os.getpid()}-{rank}" for rank in range(count)]
        self._switch = f"{PREFIX}{os.getpid()}-switch"

    def __enter__(self) -> "Namespaces":
        _sweep()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            self._remove()

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for rank, name in enumerate(self._names):
            port = f"port{rank}"
            _ip("netns", "add", name)
            cable = ["link", "add", CARD, "type", "veth", "peer", "name", port]
            _ip("-n", name, *cable, "netns", self._switch)
            _ip("-n", name, "address", "add", f"{_SUBNET}.{rank + 1}/24", "dev", CARD)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge")
            for place, card in ((name, "lo"), (name, CARD), (self._switch, port)):
                _ip("-n", place, "link", "set", card, "up")
            if self.rate != UNLIMITED:
                self._limit(name, CARD)
                self._limit(self._switch, port)

    def _limit(self, place: str, card: str) -> None:
        tbf = ["tbf", "rate", self.rate, "burst", _BURST, "latency", _QUEUE]
        _call("tc", "-n", place, "qdisc", "add", "dev", card, "root", *tbf)

    def _remove(self) -> None:
        """Remove the namespaces; cards and limits go with them."""
        existing = _existing()
        for name in (*self._names, self._switch):
            if name in existing:
                _ip("netns", "delete", name)

    def _enter(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self._names[rank]]

    def _meeting_point(self) -> tuple[str, int, str]:
        return f"{_SUBNET}.1", 29500, CARD


def make_hosts(count: int, rate: str = UNLIMITED) -> Loopback:
    """Make `count` hosts with links of `rate` (as `tc` writes it: "100mbit"), if this can be done."""
    return Loopback(count) if missing() else Namespaces(count, rate)


def missing() -> str | None:
    """Say in one sentence why there can be no namespaces here, or nothing."""
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"Limited links need iproute2 ({', '.join(absent)} not found): loopback, no limits."
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "Limited links need root (network namespaces): loopback, no limits."
    return None


def _sweep() -> None:
    """Remove what runs that were killed have left."""
    for name in _existing():
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            _ip("netns", "delete", name)


def _existing() -> list[str]:
    lines = _ip("netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def _ip(*words: str) -> str:
    return _call("ip", *words)


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
