"""`nn.MultiheadAttention`: four K-FAC blocks, for queries, keys, values and the output."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronfac
from tests import layer_oracles, oracles
from tests.attention_oracle import (
    PROJECTIONS,
    ReferenceAttention,
    attention_gradients,
    with_separate_weights,
)
from tests.layers.kinds import (
    ATTENTIONS,
    GAMMA,
    HEADS,
    LENGTH,
    WIDTH,
    Attending,
    Kind,
    Loss,
    N,
    attending,
    loss_on,
)
from tests.layers.watching import left_out, observed, stepped, watched
from tests.training import CLASSES, assert_close, assert_same, gradients

pytestmark = pytest.mark.usefixtures("double_precision")

SOLVERS = {"eigen": oracles.eigen_step, "cholesky": oracles.cholesky_step}


def reference_of(kind: Kind) -> nn.Module:
    return layer_oracles.replaced(kind.model, "attention", ReferenceAttention)


def expected_steps(kind: Kind, loss: Loss, divisor: float | None = N, **how: Any) -> dict[str, Any]:
    """The step of each projection that is trained."""
    model = reference_of(kind)
    return {
        name: layer_oracles.linear_step(model, f"attention.{name}", loss, GAMMA, divisor, **how)
        for name in PROJECTIONS
        if model.get_parameter(f"attention.{name}.weight").requires_grad
    }


def matrices_after(kind: Kind, optimizer: Any, *losses: Loss) -> dict[str, Tensor]:
    stepped(kind.model, optimizer, *losses)
    return attention_gradients(kind.model.attention)


# --- the module itself is untouched ----------------------------------------------------------


@pytest.mark.parametrize("name", ATTENTIONS)
def test_outputs_and_gradients_are_those_of_the_module_alone(name: str) -> None:
    kind, alone = attending(name), attending(name)
    optimizer = watched(kind.model)
    inputs, loss = kind.data()[:-1], loss_on(kind.data())
    for found, expected in zip(
        kind.model.middle(*inputs), alone.model.middle(*inputs), strict=True
    ):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    optimizer.zero_grad()
    loss(kind.model).backward()
    loss(alone.model).backward()
    found, expected = gradients(kind.model), gradients(alone.model)
    assert sorted(found) == sorted(expected)
    for parameter in expected:
        torch.testing.assert_close(found[parameter], expected[parameter], rtol=0, atol=1e-12)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_draws_the_same_numbers(need_weights: bool) -> None:
    name = "self" if need_weights else "self-no-weights"
    kind, alone = attending(name, dropout=0.5), attending(name, dropout=0.5)
    optimizer = watched(kind.model)
    torch.manual_seed(1)
    before, _ = stepped(kind.model, optimizer, loss_on(kind.data()))
    torch.manual_seed(1)
    loss_on(alone.data())(alone.model).backward()
    assert_close(before, gradients(alone.model))


def test_evaluation_is_that_of_the_module_alone() -> None:
    kind, alone = attending("self-no-weights"), attending("self-no-weights")
    optimizer = watched(kind.model)
    x = kind.data()[0]
    kind.model.eval()
    alone.model.eval()
    with torch.no_grad():
        assert_same(kind.model(x), alone.model(x))
    kind.model.train()
    expected = expected_steps(kind, loss_on(kind.data()))
    assert_close(matrices_after(kind, optimizer, loss_on(kind.data())), expected)


# --- one step --------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_one_step(name: str, solver: Any) -> None:
    kind = attending(name)
    loss = loss_on(kind.data())
    expected = expected_steps(kind, loss, solve=SOLVERS[solver])
    optimizer = watched(kind.model, solver=solver)
    assert_close(matrices_after(kind, optimizer, loss), expected)
    biases = {"attention.bias_k", "attention.bias_v"} if "bias-kv" in name else set()
    assert set(left_out(optimizer)) == biases


@pytest.mark.parametrize("name", ["self", "self-no-weights", "cross", "no-bias", "other-widths"])
def test_reduce(name: str) -> None:
    kind = attending(name)
    loss = loss_on(kind.data())
    expected = expected_steps(kind, loss, sharing="reduce")
    assert_close(matrices_after(kind, watched(kind.model, sharing="reduce"), loss), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("solver", SOLVERS)
def test_packed_and_separate_weights_take_the_same_step(
    bias: bool, batch_first: bool, solver: Any
) -> None:
    packed = attending("cross", bias=bias, batch_first=batch_first)
    separate = Kind(
        layer_oracles.replaced(packed.model, "attention", with_separate_weights), packed.shapes
    )
    loss = loss_on(packed.data())
    steps = [
        matrices_after(kind, watched(kind.model, solver=solver), loss)
        for kind in (packed, separate)
    ]
    assert separate.model.attention.in_proj_weight is None
    assert_close(steps[1], steps[0])
    assert_close(steps[0], expected_steps(packed, loss, solve=SOLVERS[solver]))


def test_arguments_by_name() -> None:
    class Named(Attending):
        def _attend(self, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
            query, key, value = tensors
            return self.attention(value=value, query=query, key=key)

    kind = attending("cross")
    named = Kind(Named(copy.deepcopy(kind.model.attention)), kind.shapes)
    named.model.load_state_dict(kind.model.state_dict())
    loss = loss_on(kind.data())
    expected = expected_steps(kind, loss)
    assert_close(matrices_after(named, watched(named.model), loss), expected)


def test_wide_sides_keep_their_diagonal() -> None:
    kind = attending("self")
    loss, model = loss_on(kind.data()), reference_of(kind)
    expected = {}
    for name in PROJECTIONS:
        A, G = layer_oracles.linear_factors(model, f"attention.{name}", loss, N)
        V = layer_oracles.linear_gradient(model, f"attention.{name}", loss)
        expected[name] = oracles.eigen_step(A.diag().diag(), G, V, GAMMA)
    assert_close(matrices_after(kind, watched(kind.model, max_dim=WIDTH), loss), expected)


# --- other Fishers, averages -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["self", "cross", "sequence-first", "other-widths"])
def test_exact_fisher(name: str) -> None:
    kind = attending(name)
    *inputs, _ = kind.data()
    loss, model = loss_on(kind.data()), reference_of(kind)
    expected = {}
    for projection in PROJECTIONS:
        layer = model.attention.get_submodule(projection)
        with layer_oracles.recorded(layer) as calls:
            outputs = model(*inputs)
        sent = oracles.type2_output_gradients(outputs, calls[0].z, "categorical")
        A, G = oracles.type2_factors(layer, calls[0].x, sent)
        V = layer_oracles.linear_gradient(model, f"attention.{projection}", loss)
        expected[projection] = oracles.eigen_step(A, G, V, GAMMA)
    observed(watched(kind.model, fisher="exact"), loss, lambda model: model(*inputs))
    assert_close(attention_gradients(kind.model.attention), expected)


def test_forward_only_curvature() -> None:
    kind = attending("cross")
    loss, model = loss_on(kind.data()), reference_of(kind)
    expected = {}
    for name in PROJECTIONS:
        A, _ = layer_oracles.linear_factors(model, f"attention.{name}", loss, N)
        V = layer_oracles.linear_gradient(model, f"attention.{name}", loss)
        expected[name] = oracles.eigen_step(A, None, V, GAMMA)
    assert_close(matrices_after(kind, watched(kind.model, fisher="forward"), loss), expected)


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["self", "other-widths"])
def test_two_steps(name: str, decay: float) -> None:
    kind = attending(name)
    losses, model = [loss_on(kind.data(0)), loss_on(kind.data(1, 4))], reference_of(kind)
    expected = {}
    for projection in PROJECTIONS:
        named = f"attention.{projection}"
        first = layer_oracles.linear_factors(model, named, losses[0], N)
        second = layer_oracles.linear_factors(model, named, losses[1], 4)
        A, G = (
            layer_oracles.decayed(*pair, decay, (N, 4)) for pair in zip(first, second, strict=True)
        )
        V = layer_oracles.linear_gradient(model, named, losses[1])
        expected[projection] = oracles.eigen_step(A, G, V, GAMMA)
    optimizer = watched(kind.model, decay=decay)
    stepped(kind.model, optimizer, losses[0])
    assert_close(matrices_after(kind, optimizer, losses[1]), expected)


# --- what is left out ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bias-kv", "bias-kv-and-zero-attn"])
def test_biases_of_keys_and_values_pass_raw(name: str) -> None:
    kind = attending(name)
    before, after = stepped(kind.model, watched(kind.model), loss_on(kind.data()))
    for parameter in ("attention.bias_k", "attention.bias_v"):
        assert before[parameter].any()
        assert_same(after[parameter], before[parameter])


@pytest.mark.parametrize("name", ["self", "other-widths"])
def test_a_frozen_bias_is_no_column(name: str) -> None:
    kind = attending(name)
    kind.model.attention.in_proj_bias.requires_grad_(False)
    loss = loss_on(kind.data())
    expected = expected_steps(kind, loss)
    assert expected["q_proj"].shape == (WIDTH, WIDTH)
    optimizer = watched(kind.model)
    assert_close(matrices_after(kind, optimizer, loss), expected)
    assert left_out(optimizer) == {"attention.in_proj_bias": "frozen"}


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("no-bias", ["in_proj_weight"]),
        ("other-widths-no-bias", ["k_proj_weight"]),
        ("other-widths-no-bias", ["q_proj_weight", "v_proj_weight"]),
        ("no-bias", ["out_proj.weight"]),
    ],
)
def test_frozen_weights_leave_the_others_as_they_are(name: str, frozen: list[str]) -> None:
    kind, free = attending(name), attending(name)
    for parameter in frozen:
        kind.model.attention.get_parameter(parameter).requires_grad_(False)
    loss = loss_on(kind.data())
    optimizer = watched(kind.model)
    _, after = stepped(kind.model, optimizer, loss)
    _, whole = stepped(free.model, watched(free.model), loss)
    names = {f"attention.{parameter}" for parameter in frozen}
    assert left_out(optimizer) == dict.fromkeys(names, "frozen")
    assert_close(after, {n: value for n, value in whole.items() if n not in names})


# --- length of the step ----------------------------------------------------------------------


def test_graft_keeps_the_norm_of_each_projection() -> None:
    kind = attending("cross")
    loss = loss_on(kind.data())
    solved = expected_steps(kind, loss)
    after = matrices_after(kind, watched(kind.model, rescale="graft"), loss)
    model = reference_of(kind)
    for name in PROJECTIONS:
        raw = layer_oracles.linear_gradient(model, f"attention.{name}", loss)
        assert_close(after[name], solved[name] * raw.norm() / solved[name].norm())


def test_unit_gives_each_projection_its_norm() -> None:
    kind = attending("other-widths")
    after = matrices_after(kind, watched(kind.model, rescale="unit"), loss_on(kind.data()))
    for matrix in after.values():
        rows, columns = matrix.shape
        expected = math.sqrt(min(rows, columns)) * math.sqrt(max(1, rows / columns))
        assert float(matrix.norm()) == pytest.approx(expected)


# --- inside torch's own layers ---------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_layer_is_preconditioned_throughout(norm_first: bool) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 5, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(LENGTH * WIDTH, CLASSES))
    kind = Kind(model, ((LENGTH, WIDTH),))
    loss = loss_on(kind.data())
    reference = layer_oracles.replaced(model, "0.self_attn", ReferenceAttention)
    linear = {
        name: layer_oracles.linear_step(reference, f"0.{name}", loss, GAMMA, N)
        for name in (*(f"self_attn.{p}" for p in PROJECTIONS), "linear1", "linear2")
    }
    u = {
        name: layer_oracles.norm_sample_gradients(model, f"0.{name}", loss, N)
        for name in ("norm1", "norm2")
    }
    optimizer = watched(model)
    stepped(model, optimizer, loss)
    assert left_out(optimizer) == {}
    for name, matrix in attention_gradients(encoder.self_attn).items():
        assert_close(matrix, linear[f"self_attn.{name}"])
    for name in ("linear1", "linear2"):
        assert_close(oracles.matrix_gradient(encoder.get_submodule(name)), linear[name])
    for name, samples in u.items():
        norm: Any = encoder.get_submodule(name)
        step = layer_oracles.norm_step(layer_oracles.norm_fisher(samples, N), samples.sum(0), GAMMA)
        assert_close(torch.stack([norm.weight.grad, norm.bias.grad], dim=-1), step)


# --- a forward that somebody has replaced ------------------------------------------------------


def replace_forward(module: nn.MultiheadAttention) -> list[int]:
    """Patch the instance, as tracers and offloaders do; return a list of its calls."""
    own, calls = module.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        out, weights = own(*args, **kwargs)
        return 2 * out, weights

    module.forward = forward  # type: ignore[method-assign]
    return calls


def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x, x, x)[0]
    return out


def test_a_forward_that_was_replaced_before_stays() -> None:
    module = nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 2, 4)
    replace_forward(module)
    expected = outputs_of(module, x)
    optimizer = kronfac.KFAC(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert_same({"out": outputs_of(module, x)}, {"out": expected})
    assert "its forward was replaced" in optimizer.summary()


def test_a_forward_that_is_replaced_later_stays_and_is_named() -> None:
    module = nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 2, 4)
    optimizer = kronfac.KFAC(module, torch.optim.SGD(module.parameters(), lr=0.1))
    calls = replace_forward(module)
    out = outputs_of(module, x)
    assert calls == [1]
    out.square().mean().backward()
    with pytest.warns(UserWarning, match="nothing was captured for .*'query'"):
        optimizer.step()
