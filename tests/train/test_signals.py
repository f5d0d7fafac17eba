"""Signals that end a run with a checkpoint."""

import os
import signal
from collections.abc import Iterator

import pytest

from kronfac.train.launch.signals import SIGNALS, Interruption


@pytest.fixture(autouse=True)
def handlers(hears_hangups: None) -> Iterator[None]:
    """Leave the handlers of the tests as they were."""
    before = {one: signal.getsignal(one) for one in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_remembered(number: int) -> None:
    with Interruption() as interruption:
        send(number)
        assert interruption() == number


def test_a_closed_terminal_may_say_so_twice() -> None:
    with Interruption() as interruption:
        send(signal.SIGHUP)
        send(signal.SIGHUP)
        assert interruption() == signal.SIGHUP


def test_a_second_ctrl_c_ends_at_once() -> None:
    with Interruption():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_nohup_keeps_its_meaning() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption() as interruption:
        send(signal.SIGHUP)
        assert interruption() == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_handlers_are_as_before_afterwards() -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with Interruption():
        send(signal.SIGHUP)
    assert [signal.getsignal(one) for one in SIGNALS] == before
