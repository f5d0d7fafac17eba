"""Every keyword of ``kronfac.KFAC``, given wrongly: refused by name, or said once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, RMSprop

import kronfac
from tests.bad_inputs.answers import Answer, Row, check, rows
from tests.training import mlp

NAN, INF = float("nan"), float("inf")


def build(**options: Any) -> Callable[[], kronfac.KFAC]:
    """Defaults, and these options."""

    def call() -> kronfac.KFAC:
        model = mlp()
        return kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), **options)

    return call


def over(make: Callable[[nn.Module], Any], **options: Any) -> Callable[[], kronfac.KFAC]:
    """The same over another base optimizer."""

    def call() -> kronfac.KFAC:
        model = mlp()
        return kronfac.KFAC(model, make(model), **options)

    return call


def of(make: Callable[[], Any], **options: Any) -> Callable[[], kronfac.KFAC]:
    """The same of another model."""

    def call() -> kronfac.KFAC:
        model = make()
        return kronfac.KFAC(model, SGD(list(model.parameters()), lr=0.1), **options)

    return call


def options(name: str, values: list[Any], answer: Answer, phrase: str) -> list[Row]:
    return [(f"{name}={v!r}"[:70], build(**{name: v}), answer, phrase) for v in values]


def late(step: int, other: int) -> float:
    return 0.1


REFUSED: list[Row] = [
    *options("damping", [0, -1, NAN, INF, "1e-3", None, [1e-3], True], "refused", "^damping="),
    *options("damping", [torch.tensor(1e-3), torch.ones(2), 1j], "refused", "^damping="),
    *options("damping", [lambda: 1e-3, late], "refused", "damping=lambda step"),
    *options("damping", [kronfac.StaleInterval(), SGD], "refused", "^damping="),
    *options("factor_every", [0, 2.5, -3, "10", None, INF, [10]], "refused", "^factor_every="),
    *options("factor_every", [lambda: 10], "refused", "factor_every=lambda step"),
    *options("factor_every", [kronfac.StaleInterval()], "refused", "needs the same rule as"),
    *options("refresh_every", [0, 2.5, -3, "100", None, NAN, {}], "refused", "^refresh_every="),
    *options("refresh_every", [lambda: 10], "refused", "refresh_every=lambda step"),
    *options("refresh_every", [kronfac.LevenbergMarquardt()], "refused", "^refresh_every="),
    *options("decay", [-0.5, 1.5, "0.5", None, NAN, torch.tensor(0.5)], "refused", "^decay="),
    *options("decay", [lambda: 0.5], "refused", "decay=lambda step"),
    *options("fisher", ["true", None, 3, ["mc"], torch.ones(2)], "refused", "^fisher="),
    *options("sharing", ["shared", None, True], "refused", "^sharing="),
    *options("solver", ["svd", None, torch.linalg.eigh], "refused", "^solver="),
    *options("power", [0, -1, 2, "0.5", None, NAN, True], "refused", "^power="),
    *options("momentum", [1, -0.1, "0.9", None, NAN, (0.9, 0.99)], "refused", "^momentum="),
    *options("momentum", [lambda step: 0.9], "refused", "^momentum="),
    *options("nesterov", ["yes", 1, None], "refused", "^nesterov="),
    *options("nesterov", [True], "refused", "needs momentum"),
    *options("rescale", ["clip", 1, True, ["unit"], torch.ones(2)], "refused", "^rescale="),
    *options("kl_clip", [0, -1, None, "small", NAN, INF], "refused", "^kl_clip="),
    *options("trust_radius", [0, -1, None, "small", NAN, INF], "refused", "^trust_radius="),
    *options("early_refresh", [0, None, "no"], "refused", "^early_refresh="),
    *options("stagger", [1, None, "yes"], "refused", "^stagger="),
    *options("rows", [0, 4095, "all", 5000.5, INF, torch.ones(2)], "refused", "^rows="),
    *options("max_dim", [0, -1, None, "big", 0.5, INF], "refused", "^max_dim="),
    *options("loss_average", ["mean", 0, -1, NAN, True, []], "refused", "^loss_average="),
    *options("loss_average", [torch.ones(2)], "refused", "^loss_average="),
    *options("include", [3, [3], [None], nn.Linear(1, 1), {"a": 1}], "refused", "include"),
    *options("include", ["nothing.*"], "refused", "'nothing.*' in include or exclude matches no"),
    *options("exclude", [3, [3], [None], nn.Linear(1, 1), {"a": 1}], "refused", "exclude"),
    *options("exclude", ["nothing.*"], "refused", "'nothing.*' in include or exclude matches no"),
    *options("on_missing", ["error", None, False], "refused", "^on_missing="),
    *options("grad_scaler", [1.0, "amp", SGD], "refused", "^grad_scaler="),
    *options("max_grad_norm", [0, -1, "1", NAN, INF, True], "refused", "^max_grad_norm="),
    *options("distribute", ["all", None, 3, [], kronfac.KFAC], "refused", "^distribute="),
    *options("process_group", ["x", 0], "refused", "torch.distributed is not initialised"),
    ("power with cholesky", build(power=0.5, solver="cholesky"), "refused", "needs eigenvalues"),
    ("power and quadratic", build(power=0.5, rescale="quadratic"), "refused", "quadratic model"),
    (
        "adaptive damping with a fixed length",
        build(damping=kronfac.LevenbergMarquardt(), rescale="unit"),
        "refused",
        "fixes the length of a step",
    ),
    (
        "adaptive damping without curvature",
        build(damping=kronfac.LevenbergMarquardt(), solver="cholesky"),
        "refused",
        "needs the undamped curvature",
    ),
    (
        "stagger with one interval for all",
        build(stagger=True, refresh_every=kronfac.StaleInterval()),
        "refused",
        "choose one of the two",
    ),
    (
        "quadratic steps over momentum",
        over(lambda m: SGD(m.parameters(), lr=1.0, momentum=0.9), rescale="quadratic"),
        "refused",
        "chooses the momentum itself",
    ),
    ("typo", build(dampng=0.1), "refused", "no option 'dampng'; did you mean 'damping'"),
    ("unknown", build(zzz=1), "refused", "no option 'zzz'; its options are damping, "),
    ("lr beside a base", build(lr=0.1), "refused", "lr belongs to the base optimizer: write"),
    ("lr instead of a base", lambda: kronfac.KFAC(mlp(), lr=0.1), "refused", "write KFAC"),  # type: ignore[call-arg]
    ("no base", lambda: kronfac.KFAC(mlp()), "refused", "needs a base optimizer"),  # type: ignore[call-arg]
    ("no arguments", lambda: kronfac.KFAC(), "refused", "write KFAC"),  # type: ignore[call-arg]
    ("parameters", lambda: kronfac.KFAC(mlp().parameters(), lr=1), "refused", "write KFAC"),  # type: ignore[call-arg, arg-type]
    ("positional option", over(lambda m: SGD(m.parameters(), lr=0.1)), "fine", ""),
    ("no model", lambda: kronfac.KFAC(None, SGD(mlp().parameters())), "refused", "model must be"),  # type: ignore[arg-type]
    ("a list", lambda: kronfac.KFAC([mlp()], SGD(mlp().parameters())), "refused", "not list"),  # type: ignore[arg-type]
    ("a class as base", over(lambda m: SGD), "refused", "build it first"),
    ("a name as base", over(lambda m: "sgd"), "refused", "build it first"),
    ("a rate as base", over(lambda m: 0.1), "refused", "build it first"),
    ("LBFGS", over(lambda m: torch.optim.LBFGS(m.parameters())), "refused", "inside its step"),
]

WARNED: list[Row] = [
    ("nothing supported", of(lambda: nn.Bilinear(2, 2, 2)), "warns", "no layer of the Bilinear"),
    (
        "no parameters of its own",
        over(lambda m: SGD(mlp(1).parameters())),
        "warns",
        "of this model",
    ),
    ("all excluded", build(exclude=nn.Linear), "warns", r"0\.weight \(in exclude\)"),
    ("all but a few included", build(include="1"), "warns", r"0\.weight \(not in include\)"),
    ("all frozen", of(lambda: mlp().requires_grad_(False)), "warns", "frozen, '0' for example"),
    ("norms at orthogonal steps", of(lambda: nn.LayerNorm(4), rescale="unit"), "warns", "matrices"),
    (
        "a lazy layer",
        of(lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))),
        "warns",
        "layers '0' are lazy",
    ),
    ("all are lazy", of(lambda: nn.LazyLinear(4)), "warns", "are lazy"),
    (
        "momentum in SGD too",
        over(lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9), momentum=0.9),
        "warns",
        r"momentum=0.9 comes on top .*\(momentum=0.9 in group 0\)",
    ),
    (
        "momentum over AdamW",
        over(lambda m: AdamW(m.parameters()), momentum=0.5, rescale="graft"),
        "warns",
        "betas=",
    ),
    (
        "over AdamW",
        over(lambda m: AdamW(m.parameters())),
        "warns",
        r"AdamW divides each entry .* Give torch\.optim\.SGD",
    ),
    (
        "kl_clip without its rule",
        build(kl_clip=0.1),
        "warns",
        "kl_clip=0.1 has no effect with rescale='auto'; give rescale='kl-clip'",
    ),
    (
        "trust_radius without its rule",
        build(rescale="kl-clip", trust_radius=0.1),
        "warns",
        "trust_radius=0.1 has no effect with rescale='kl-clip'; give rescale='trust-region'",
    ),
    (
        "stagger",
        build(stagger=True, factor_every=1, refresh_every=1),
        "warns",
        "stagger=True has no",
    ),
    (
        "refreshed too often",
        build(refresh_every=5),
        "warns",
        "refresh_every=5 is less than factor_",
    ),
    (
        "K-FAC of K-FAC",
        over(lambda m: kronfac.KFAC(m, SGD(m.parameters(), lr=0.1))),
        "warns",
        "the base optimizer is a KFAC itself",
    ),
]


def body_and_head() -> nn.Sequential:
    """Transfer learning: all frozen but the head."""
    model = mlp()
    model[:4].requires_grad_(False)
    return model


FINE: list[Row] = [
    ("defaults", build(), "fine", ""),
    ("a head alone", of(body_and_head), "fine", ""),
    ("only the head is given", over(lambda m: SGD(m[4].parameters(), lr=0.1)), "fine", ""),
    ("exclude all on purpose", build(exclude="*"), "fine", ""),
    ("momentum here", build(momentum=0.9, nesterov=True), "fine", ""),
    ("momentum there", over(lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9)), "fine", ""),
    (
        "no momentum",
        over(lambda m: RMSprop(m.parameters()), momentum=0.9, rescale="graft"),
        "fine",
        "",
    ),
    (
        "betas of 0",
        over(lambda m: AdamW(m.parameters(), betas=(0.0, 0.9)), momentum=0.9, rescale="graft"),
        "fine",
        "",
    ),
    (
        "momentum for the others only",
        of(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), momentum=0.9, rescale="unit"),
        "fine",
        "",
    ),
    ("kl_clip with its rule", build(rescale="kl-clip", kl_clip=0.1), "fine", ""),
    ("its radius", build(rescale="trust-region", trust_radius=0.1), "fine", ""),
    ("a smaller max_dim", build(max_dim=100), "fine", ""),
    ("a loss described", build(loss_average="token", fisher="forward"), "fine", ""),
    ("both intervals", build(factor_every=5, refresh_every=5), "fine", ""),
    ("whole floats", build(factor_every=5.0, refresh_every=50.0, max_dim=64.0), "fine", ""),
    ("a damping schedule", build(refresh_every=5, damping=lambda step: 0.1), "fine", ""),
    ("a bound method", build(decay=(0.5).__add__, factor_every=1), "fine", ""),
    ("several ranks in mind", build(distribute=kronfac.Hybrid(0.5)), "fine", ""),
    ("a gradient scaler", build(grad_scaler=torch.amp.GradScaler("cpu")), "fine", ""),
]


@rows(REFUSED)
def test_refused(call: Callable[[], Any], answer: Answer, phrase: str) -> None:
    check(call, answer, phrase)


@rows(WARNED)
def test_said_once(call: Callable[[], Any], answer: Answer, phrase: str) -> None:
    check(call, answer, phrase)


@rows(FINE)
def test_ordinary_code_hears_nothing(call: Callable[[], Any], answer: Answer, phrase: str) -> None:
    check(call, answer, phrase)


def test_a_warning_names_the_line_that_built_the_optimizer() -> None:
    with pytest.warns(UserWarning, match="kl_clip") as caught:
        build(kl_clip=0.1)()
    assert [one.filename for one in caught] == [__file__]
