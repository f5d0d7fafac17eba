"""Calls at the wrong moment, and several optimizers at once; ordinary loops hear nothing."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import kronfac
from tests.bad_inputs.answers import Answer, Row, check, rows
from tests.training import batch, kfac, loss_of, mlp, step, train

Run = tuple[nn.Sequential, kronfac.KFAC]


def made(**options: Any) -> Run:
    model = mlp()
    return model, kfac(model, **options)


def trained(**options: Any) -> Run:
    model, optimizer = made(**options)
    train(model, optimizer, range(2))
    return model, optimizer


# --- several optimizers -------------------------------------------------------------------------


def both_step() -> None:
    model, first = made()
    train(model, first, range(1))
    second = kfac(model)
    train(model, second, range(2))
    assert first is not second


def replaced() -> None:
    """A notebook's cell that is run again."""
    model, optimizer = made()
    train(model, optimizer, range(2))
    optimizer = kfac(model)
    train(model, optimizer, range(2))


def detached_before_the_next() -> None:
    model, first = trained()
    first.detach()
    train(model, kfac(model), range(2))
    assert first.stats()["steps"] == 2


def disjoint_layers() -> None:
    """Body and head, each with its own."""
    model = mlp()
    body = kfac(model, SGD(model[:4].parameters(), lr=0.1))
    head = kfac(model, SGD(model[4].parameters(), lr=0.1))
    for _ in range(2):
        model.zero_grad()
        loss_of(model, batch()).backward()
        body.step()
        head.step()


def two_models() -> None:
    """As adversarial training has them."""
    (one, first), (two, second) = made(), made()
    for number in range(2):
        step(one, first, batch(number))
        step(two, second, batch(number))


def copied() -> None:
    model, optimizer = trained()
    other, twin = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(2))
    train(other, twin, range(2))


def base_beside() -> None:
    model, optimizer = made()
    for number in range(3):
        step(model, optimizer, batch(number))
        optimizer.base.step()


def base_instead() -> None:
    model, optimizer = made()
    for number in range(3):
        step(model, optimizer.base, batch(number))


def base_after_detach() -> None:
    model, optimizer = trained()
    optimizer.detach()
    step(model, optimizer.base, batch())


def base_without_capture() -> None:
    model, optimizer = made()
    with optimizer.no_capture():
        step(model, optimizer.base, batch())
    train(model, optimizer, range(2))


def base_of_one_that_is_gone() -> None:
    model, optimizer = trained()
    base = optimizer.base
    del optimizer
    gc.collect()
    step(model, base, batch())


def with_a_scheduler() -> None:
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for number in range(3):
        step(model, optimizer, batch(number))
        schedule.step()


OPTIMIZERS: list[Row] = [
    ("two on one model", both_step, "warns", "another K-FAC optimizer watches layer '0'"),
    ("replaced", replaced, "fine", ""),
    ("detached", detached_before_the_next, "fine", ""),
    ("disjoint", disjoint_layers, "fine", ""),
    ("two models", two_models, "fine", ""),
    ("copied", copied, "fine", ""),
    ("base beside ours", base_beside, "warns", r"SGD\.step\(\) was called beside K-FAC"),
    ("base instead of ours", base_instead, "warns", r"SGD\.step\(\) was called beside K-FAC"),
    ("base after detach", base_after_detach, "fine", ""),
    ("base without capture", base_without_capture, "fine", ""),
    ("base of one that is gone", base_of_one_that_is_gone, "fine", ""),
    ("a scheduler", with_a_scheduler, "fine", ""),
]

# --- before, between and after ------------------------------------------------------------------


def observed(moment: str) -> Callable[[], Any]:
    """``observe`` at some moment of a loop."""

    def call() -> None:
        model, optimizer = made(fisher="mc")
        if moment == "before forward":
            optimizer.observe(torch.randn(8, 3, requires_grad=True))
        if moment == "in evaluation":
            model.eval()
        with torch.set_grad_enabled(moment != "without gradients"):
            scores = model(batch()[0])
        if moment == "never":
            scores.sum().backward()
            optimizer.step()
        if moment == "detached optimizer":
            optimizer.detach()
        if moment == "paused":
            with optimizer.no_capture():
                optimizer.observe(scores)
            return
        optimizer.observe(scores)
        if moment == "twice":
            optimizer.observe(scores)

    return call


def in_evaluation() -> None:
    model, optimizer = made()
    model.eval()
    step(model, optimizer, batch())


def paused_all_the_time() -> None:
    model, optimizer = made()
    with optimizer.no_capture():
        step(model, optimizer, batch())


def too_late_for_the_compiler() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    compiled(batch()[0])
    step(compiled, kfac(model), batch())


def adaptive_without_closure() -> None:
    model, optimizer = made(damping=kronfac.LevenbergMarquardt())
    step(model, optimizer, batch())


def interval_set(first: str, second: str) -> None:
    """From 1 to 5, or back, one after the other: for a moment the order is wrong."""
    model, optimizer = trained()
    setattr(optimizer, first, 5)
    setattr(optimizer, second, 5)
    train(model, optimizer, range(12))


def intervals_left_apart() -> None:
    model, optimizer = trained()
    optimizer.factor_every = 5
    train(model, optimizer, range(12))


def schedule_of_text() -> None:
    model, optimizer = made(damping=lambda step: "small")
    step(model, optimizer, batch())


MOMENTS: list[Row] = [
    ("observe", observed("in time"), "fine", ""),
    ("observe before forward", observed("before forward"), "refused", "found no forward pass"),
    ("observe twice", observed("twice"), "refused", "once after each forward"),
    ("observe in evaluation", observed("in evaluation"), "refused", "in training mode"),
    ("observe without gradients", observed("without gradients"), "refused", "found no forward"),
    ("observe never", observed("never"), "refused", "has observed nothing: call"),
    ("observe when paused", observed("paused"), "fine", ""),
    ("observe when detached", observed("detached optimizer"), "fine", ""),
    ("evaluation mode", in_evaluation, "warns", "nothing was captured for '0', '2', '4'"),
    ("always paused", paused_all_the_time, "warns", "nothing was captured for '0', '2', '4'"),
    ("compiled before", too_late_for_the_compiler, "refused", "before the first compiled call"),
    ("no closure", adaptive_without_closure, "refused", r"call step\(closure\)"),
    ("a schedule of text", schedule_of_text, "refused", r"^damping\(step=0\)='small'"),
    ("step without backward", lambda: made()[1].step(), "fine", ""),
    ("step after detach", detached_before_the_next, "fine", ""),
    ("detach twice", lambda: [made()[1].detach() for _ in range(2)], "fine", ""),
    ("summary in the middle", lambda: trained()[1].summary(), "fine", ""),
    ("factor, then refresh", lambda: interval_set("factor_every", "refresh_every"), "fine", ""),
    ("refresh, then factor", lambda: interval_set("refresh_every", "factor_every"), "fine", ""),
    (
        "intervals apart",
        intervals_left_apart,
        "warns",
        "refresh_every=1 is less than factor_every=5",
    ),
]


@rows(OPTIMIZERS)
def test_several_optimizers(call: Callable[[], Any], answer: Answer, phrase: str) -> None:
    check(call, answer, phrase)


@rows(MOMENTS)
def test_moments(call: Callable[[], Any], answer: Answer, phrase: str) -> None:
    check(call, answer, phrase)
