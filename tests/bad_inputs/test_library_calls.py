"""The other public callables, given wrongly."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import kronfac
from kronfac.huggingface import optimizer_cls_and_kwargs
from tests.bad_inputs.answers import Answer, Row, check, rows
from tests.training import batch, kfac, mlp, train

NAN, INF = float("nan"), float("inf")


def each(name: str, call: Callable[[Any], Any], values: list[Any], phrase: str) -> list[Row]:
    """One row for each value; all of them are refused."""
    return [(f"{name}({v!r})"[:70], lambda v=v: call(v), "refused", phrase) for v in values]


# --- rules and schemes ------------------------------------------------------------------------

LM, STALE = kronfac.LevenbergMarquardt, kronfac.StaleInterval
RULES: list[Row] = [
    *each("LevenbergMarquardt", LM, [0, -1, "1", None, NAN, INF, True], "^initial="),
    *each("every", lambda v: LM(every=v), [0, 2.5, "5", None], "^every="),
    *each("omega", lambda v: LM(omega=v), [0, 1, 2, "0.9", None], "^omega="),
    *each("minimum", lambda v: LM(minimum=v), [0, -1, "x"], "^minimum="),
    *each("minimum", lambda v: LM(minimum=v), [1.0], "must lie between"),
    *each("maximum", lambda v: LM(maximum=v), [0, INF, None], "^maximum="),
    *each("maximum", lambda v: LM(maximum=v), [1e-5], "must lie between"),
    *each("StaleInterval", STALE, [0, -1, "0.1", None, NAN], "^tolerance="),
    *each("initial", lambda v: STALE(initial=v), [0, 1.5, "1", None], "^initial="),
    *each("initial", lambda v: STALE(initial=101), [101], "must not exceed"),
    *each("maximum", lambda v: STALE(maximum=v), [0, 1.5, "1", None], "^maximum="),
    *each("share", lambda v: STALE(share=v), [0, 2, "half", None], "^share="),
    *each("Hybrid", kronfac.Hybrid, [0, 1.5, -1, "half", None, NAN, True], r"^Hybrid\("),
    *each("Distribute", kronfac.Distribute, ["all", None, 3, []], "^distribute="),
    *each(
        "wire_dtype",
        lambda v: kronfac.Distribute("comm-opt", wire_dtype=v),
        ["bf16", torch.int8, 16],
        "^wire_dtype=",
    ),
    *each("auto", lambda v: kronfac.Distribute(wire_dtype=v), [torch.half], "name a scheme"),
    *each("overlap", lambda v: kronfac.Distribute(overlap=v), [1, None, "no"], "^overlap="),
    *each("triangles", lambda v: kronfac.Distribute(triangles=v), [0, None], "^triangles="),
    *each("deferred", lambda v: kronfac.Distribute(deferred=v), [0, None], "^deferred="),
    *each("balanced", lambda v: kronfac.Distribute(balanced=v), [0, None], "^balanced="),
    *each("split", lambda v: kronfac.Distribute(split=v), [0, None], "^split="),
    *each("slices", lambda v: kronfac.Distribute(slices=v), [0, None], "^slices="),
]

# --- functions --------------------------------------------------------------------------------


def grouped(**changes: Any) -> Callable[[], Any]:
    return lambda: kronfac.param_groups(**{"model": mlp(), "lr": 0.1, "other_lr": 0.1} | changes)


def trainer(**changes: Any) -> Callable[[], Any]:
    """As ``transformers.Trainer`` does it."""

    def call() -> Any:
        model = changes.pop("model", mlp())
        cls, options = optimizer_cls_and_kwargs(model, **{"lr": 0.1} | changes)
        return cls(mlp().parameters() if "stranger" in changes else model.parameters(), **options)

    return call


register = kronfac.register_layer
FUNCTIONS: list[Row] = [
    ("param_groups", grouped(), "fine", ""),
    ("param_groups of a list", grouped(model=[1]), "refused", "model must be a torch.nn.Module"),
    ("param_groups of a model's parameters", grouped(model=mlp().parameters()), "refused", "model"),
    ("param_groups lr text", grouped(lr="0.1"), "refused", "^lr="),
    ("param_groups lr negative", grouped(lr=-1), "refused", "^lr="),
    ("param_groups lr NaN", grouped(lr=NAN), "refused", "^lr="),
    ("param_groups other_lr", grouped(other_lr=None), "refused", "^other_lr="),
    ("param_groups lr tensor", grouped(lr=torch.tensor(0.1)), "fine", ""),
    ("param_groups include", grouped(include=3), "refused", "include holds 3"),
    ("param_groups exclude", grouped(exclude="zzz"), "refused", "matches no module"),
    *each(
        "register_layer", lambda v: register(v), [3, "Linear", nn.Linear(1, 1), int], "module_type="
    ),
    *each("layer_type", lambda v: register(nn.Bilinear, v), [3, nn.Linear], "layer_type="),
    *each("decorated", lambda v: register(nn.Bilinear)(v), [3, nn.Linear, len], "layer_type="),
    ("trainer", trainer(), "fine", ""),
    ("trainer without weight decay", trainer(weight_decay=0.0, base=SGD), "fine", ""),
    ("trainer model", trainer(model="gpt2"), "refused", "model must be a torch.nn.Module"),
    ("trainer base name", trainer(base="adamw"), "refused", "^base='adamw'"),
    ("trainer base built", trainer(base=AdamW(mlp().parameters())), "refused", "^base="),
    ("trainer lr", trainer(lr="0.1"), "refused", "^lr="),
    ("trainer weight decay", trainer(weight_decay="0.1"), "refused", "^weight_decay="),
    ("trainer negative decay", trainer(weight_decay=-1), "refused", "^weight_decay="),
    ("trainer base_options", trainer(base_options=[1]), "refused", "^base_options="),
    ("trainer typo", trainer(dampng=1), "refused", "did you mean 'damping'"),
    ("trainer damping", trainer(damping=-1), "refused", "^damping="),
]

# --- observe ----------------------------------------------------------------------------------


def observing(fisher: str = "mc", **changes: Any) -> Callable[[], None]:
    """One forward and one ``observe``; ``outputs`` may be a function of the true ones."""

    def call() -> None:
        model = mlp()
        optimizer = kfac(model, fisher=fisher)
        scores = model(batch()[0])
        outputs = changes.get("outputs", scores)
        given = outputs(scores) if callable(outputs) else outputs
        optimizer.observe(given, **{k: v for k, v in changes.items() if k != "outputs"})

    return call


def after_backward(scores: Tensor) -> Tensor:
    scores.sum().backward()
    return scores


def exact_of_many_classes() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1000)
    kfac(model, fisher="exact", factor_every=1, max_dim=1).observe(model(torch.randn(1, 4)))


targets = batch()[1]
OBSERVE: list[Row] = [
    ("logits", observing(), "fine", ""),
    ("log_softmax", observing(outputs=lambda s: s.log_softmax(-1)), "fine", ""),
    ("softmax", observing(outputs=lambda s: s.softmax(-1)), "warns", "look like probabilities"),
    (
        "softmax as values",
        observing(outputs=lambda s: s.softmax(-1), likelihood="gaussian"),
        "fine",
        "",
    ),
    ("detached", observing(outputs=Tensor.detach), "refused", "outputs without a graph"),
    ("after backward", observing(outputs=after_backward), "refused", "between the forward pass"),
    ("of a string", observing(outputs="x"), "refused", "got a str and needs a tensor"),
    ("of nothing", observing(outputs=None), "refused", "got a NoneType"),
    ("of a dict", observing(outputs=lambda s: {"logits": s}), "refused", "give its 'logits'"),
    ("of a tuple", observing(outputs=lambda s: (s,)), "refused", "got a tuple"),
    ("of labels", observing(outputs=targets), "refused", "not labels"),
    ("of a loss", observing(outputs=lambda s: s.sum()), "refused", "samples first"),
    ("of a vector", observing(outputs=lambda s: s[:, 0]), "refused", "samples first"),
    ("likelihood", observing(likelihood="softmax"), "refused", "^likelihood="),
    ("likelihood None", observing(likelihood=None), "refused", "^likelihood="),
    ("mask shape", observing(mask=torch.ones(3)), "refused", "mask has shape"),
    ("mask list", observing(mask=[1, 0]), "refused", "^mask="),
    ("ignore_index alone", observing(ignore_index=-100), "refused", "pass them as mask=targets"),
    ("ignore_index", observing(mask=targets, ignore_index="x"), "refused", "^ignore_index="),
    ("ignored targets", observing(mask=targets, ignore_index=0), "fine", ""),
    *[(f"samples={n}", observing(samples=n), "refused", "^samples=") for n in (0, 1.5, "2", None)],
    ("whole samples", observing(samples=2.0), "fine", ""),
    ("generator", observing(generator=3), "refused", "^generator="),
    ("samples of the exact", observing("exact", samples=5), "warns", "samples has no effect"),
    ("many classes", exact_of_many_classes, "warns", "1,000 for outputs .* fisher='mc' takes 1"),
    ("empirical", observing("empirical"), "refused", "needs no call"),
    ("forward", observing("forward"), "refused", "needs no call"),
]

# --- methods and attributes -------------------------------------------------------------------


def method(name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: getattr(kfac(mlp()), name)(*args, **kwargs)


def attribute(name: str, value: Any, **options: Any) -> Callable[[], None]:
    return lambda: setattr(kfac(mlp(), **options), name, value)


METHODS: list[Row] = [
    *each("step", lambda v: kfac(mlp()).step(v), [3, "closure", torch.ones(1)], "is a closure"),
    *each("add_param_group", lambda v: kfac(mlp()).add_param_group(v), [3, {}, []], "'params'"),
    *each("full_state_dict", lambda v: kfac(mlp()).full_state_dict(v), [1, -1, "0", None], "^to="),
    ("full_state_dict()", method("full_state_dict"), "fine", ""),
    ("damping", attribute("damping", 0), "refused", "^damping="),
    ("damping callable", attribute("damping", lambda: 1), "refused", "damping=lambda step"),
    ("damping adaptive", attribute("damping", LM(), rescale="unit"), "refused", "fixes the length"),
    ("factor_every", attribute("factor_every", 1.5), "refused", "^factor_every="),
    ("refresh_every", attribute("refresh_every", "1"), "refused", "^refresh_every="),
    ("decay", attribute("decay", 2), "refused", "^decay="),
    ("momentum late", attribute("momentum", 0.9), "refused", "build it with momentum=0.9"),
    ("momentum", attribute("momentum", "x", momentum=0.5), "refused", "^momentum="),
    ("momentum text", attribute("momentum", "0.9"), "refused", "momentum="),
    ("grad_scaler", attribute("grad_scaler", 1), "refused", "^grad_scaler="),
    ("stats", method("stats"), "fine", ""),
    ("summary", method("summary"), "fine", ""),
    ("consolidate", method("consolidate"), "fine", ""),
]


@rows(RULES)
def test_rules_and_schemes(call: Callable[[], Any], answer: Answer, phrase: str) -> None:
    check(call, answer, phrase)


@rows(FUNCTIONS)
def test_functions(call: Callable[[], Any], answer: Answer, phrase: str) -> None:
    check(call, answer, phrase)


@rows(OBSERVE)
def test_observe(call: Callable[[], Any], answer: Answer, phrase: str) -> None:
    check(call, answer, phrase)


@rows(METHODS)
def test_methods_and_attributes(call: Callable[[], Any], answer: Answer, phrase: str) -> None:
    check(call, answer, phrase)


def test_a_refused_argument_leaves_a_run_as_it_was() -> None:
    model = mlp()
    optimizer = kfac(model)
    train(model, optimizer, range(2))
    check(lambda: optimizer.step(3), "refused", "closure")  # type: ignore[call-overload]
    train(model, optimizer, range(2, 4))
    assert optimizer.stats()["steps"] == 4


@pytest.mark.parametrize(("program", "kind"), [("kronfac", "kronfac: error"), ("x.py", "Error")])
def test_torch_that_is_missing_is_one_sentence(program: str, kind: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; sys.argv = [{program!r}]; import kronfac"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == (2 if program == "kronfac" else 1)
    last = result.stderr.strip().splitlines()[-1]
    assert last.endswith("PyTorch is not installed, and kronfac needs it: pip install torch.")
    assert kind in last
    assert ("Traceback" in result.stderr) == (program != "kronfac")
