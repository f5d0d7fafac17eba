"""Closures that forget something are told so once; ordinary ones hear nothing."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import kronfac
from tests.bad_inputs.answers import Answer, Row, check, rows
from tests.training import batch, kfac, loss_of, mlp

Run = tuple[nn.Sequential, kronfac.KFAC]


def made(**options: Any) -> Run:
    model = mlp()
    return model, kfac(model, **options)


def closure_of(
    run: Run, clear: bool = True, backward: bool = True, result: bool = True
) -> Callable[[], Any]:
    model, optimizer = run

    def closure() -> Any:
        if clear:
            optimizer.zero_grad()
        loss = loss_of(model, batch())
        if backward:
            loss.backward()
        return loss if result else None

    return closure


def closures(steps: int = 3, **forgets: bool) -> None:
    run = made()
    for _ in range(steps):
        run[1].step(closure_of(run, **forgets))


def cleared_before_the_step(set_to_none: bool) -> None:
    run = made()
    for _ in range(3):
        run[1].zero_grad(set_to_none=set_to_none)
        run[1].step(closure_of(run, clear=False))


def cleared_to_zero_in_the_closure(clear: Callable[[Run], None]) -> None:
    model, optimizer = run = made()

    def closure() -> Tensor:
        clear(run)
        loss = loss_of(model, batch())
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[arg-type]


def accumulated_before_the_closure() -> None:
    """As trainers do: micro-batches before the step, the last one in its closure."""
    run = made()
    for _ in range(3):
        run[1].zero_grad()
        (loss_of(run[0], batch(1)) / 2).backward()
        run[1].step(closure_of(run, clear=False))


def backward_before_the_step() -> None:
    model, optimizer = made()
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, batch())
        loss.backward()
        optimizer.step(lambda loss=loss: loss)  # type: ignore[misc]


ZERO = {"set_to_none": False}
CLOSURES: list[Row] = [
    ("complete", closures, "fine", ""),
    ("without zero_grad", lambda: closures(clear=False), "warns", "closure has added to the grad"),
    (
        "without backward",
        lambda: closures(backward=False),
        "warns",
        "closure has left no gradients",
    ),
    ("skipped batch", lambda: closures(backward=False, result=False), "fine", ""),
    ("cleared outside", lambda: cleared_before_the_step(True), "fine", ""),
    ("zeroed outside", lambda: cleared_before_the_step(False), "fine", ""),
    (
        "zeroed",
        lambda: cleared_to_zero_in_the_closure(lambda r: r[1].zero_grad(**ZERO)),
        "fine",
        "",
    ),
    (
        "by the model",
        lambda: cleared_to_zero_in_the_closure(lambda r: r[0].zero_grad()),
        "fine",
        "",
    ),
    (
        "zeroed by the base",
        lambda: cleared_to_zero_in_the_closure(lambda r: r[1].base.zero_grad(**ZERO)),
        "fine",
        "",
    ),
    ("accumulated", accumulated_before_the_closure, "fine", ""),
    ("backward before", backward_before_the_step, "fine", ""),
]


@rows(CLOSURES)
def test_closures(call: Callable[[], Any], answer: Answer, phrase: str) -> None:
    check(call, answer, phrase)
