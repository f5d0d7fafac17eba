"""What goes wrong with sharded parameters unless it is seen to: each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import kronfac
from kronfac.layers import LinearLayer
from kronfac.layers.shards import local
from tests.distributed.equivalence import Case, alone, assert_near, case, double_precision
from tests.distributed.models import BASES, KINDS
from tests.distributed.ranks import run
from tests.sharded.harness import (
    Way,
    build,
    check,
    ignore_advice,
    on_rank,
    shard,
    train,
    whole_parameters,
)

MLP = case("mlp", steps=4)
TRANSFORMER = case("transformer", steps=4)


def kfac(model: nn.Module, **options: Any) -> Any:
    options = {"damping": 0.1, **options}
    return kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


# --- 1, 6, 7, 12, 13: which tensors are which ---------------------------------------------------


def recognises(rank: int) -> dict[str, bool]:
    model = shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), Way())
    optimizer = kfac(model)
    seen = {}
    for state in optimizer.layers:
        state.layer.module.register_forward_hook(
            lambda m, a, o, s=state: seen.update(
                {s.name: s.layer.uses(m) and m.weight is not s.layer.weight}
            ),
            prepend=True,
        )
    model(torch.randn(3, 4))
    return seen


def test_trap_1_the_gathered_form_of_a_weight_is_recognised() -> None:
    for seen in run(2, recognises):
        assert seen == {"0": True, "1": True}


class Scaled(nn.Linear):
    """A module type of a user's own."""


class ScaledLayer(LinearLayer):
    """Its layer."""


class Conv1D(nn.Module):
    """The linear layer of GPT-2."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def sharded_leaves(rank: int) -> dict[str, tuple[str, str]]:
    kronfac.register_layer(Scaled, ScaledLayer)
    model = nn.Sequential(Scaled(4, 6), Conv1D(4, 6), nn.Linear(4, 2))
    shard(model, Way("leaves"))
    optimizer = kfac(model)
    backward(model, torch.randn(3, 4))
    optimizer.step()
    return {s.name: (type(s.layer).__name__, s.layer.kind) for s in optimizer.layers}


def test_trap_6_a_leaf_that_is_sharded_keeps_its_layer_type() -> None:
    for found in run(2, sharded_leaves):
        assert found == {
            "0": ("ScaledLayer", "Scaled"),
            "1": ("TransposedLinearLayer", "Conv1D"),
            "2": ("LinearLayer", "Linear"),
        }


def owners(rank: int) -> dict[str, str]:
    ignore_advice()
    _, optimizer = build(TRANSFORMER, Way())
    return {s.name: optimizer.owners(s) for s in optimizer.layers}


def test_trap_7_parts_of_one_weight_have_one_owner() -> None:
    found = run(3, owners)[0]
    parts = {found[f"attention.{part}"] for part in ("query", "key", "value")}
    assert len(parts) == 1
    assert len(set(found.values())) > 1


def replicated(rank: int) -> Any:
    with double_precision():
        model = KINDS["mlp"].model()
        replicate(model, mesh=init_device_mesh("cpu", (2,)))
        base = BASES["momentum"](model)
        optimizer = kronfac.KFAC(model, base, distribute="comm-opt", **dict(MLP.options))
        assert isinstance(model[0].weight, DTensor)
        train(rank, model, optimizer, MLP)
        return whole_parameters(model), optimizer.placement.scheme


def test_trap_12_replicas_by_fsdp_are_whole_parameters() -> None:
    for found, scheme in run(2, replicated):
        assert_near(found, alone(MLP).parameters, "replicate")
        assert scheme == "comm-opt"


def assigned(rank: int) -> Any:
    with double_precision():
        model, optimizer = build(MLP, Way())
        train(rank, model, optimizer, case("mlp", steps=2))
        before = model[0].weight
        saved = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(saved, assign=True)
        assert model[0].weight is not before
        train(rank, model, optimizer, MLP, first=2)
        return whole_parameters(model)


def test_trap_13_assigned_parameters_take_the_place_of_the_old_ones() -> None:
    for found in run(2, assigned):
        assert_near(found, alone(MLP).parameters, "assign=True")


# --- 2, 3, 4, 5: what a rank sees of its shard --------------------------------------------------


class Halves(nn.Module):
    """A layer of which the second half has no gradient, and one that has a NaN in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, :2]


def decides_alone(rank: int, kind: str, **options: Any) -> tuple[bool, Tensor]:
    ignore_advice()
    torch.manual_seed(0)
    model = shard(Halves(), Way())
    optimizer = kfac(model, on_missing="ignore", **options)
    if kind != "first":
        backward(model, torch.randn(3, 4))
        optimizer.step()
        optimizer.zero_grad()
    if kind == "unobserved":
        with optimizer.no_capture():
            backward(model, torch.randn(3, 4))
    else:
        backward(model, torch.randn(3, 4))
    grad = local(model.layer.weight.grad)
    if kind == "nan" and rank == 0:
        grad[0] = torch.nan
    zero = not grad.any()
    optimizer.step()
    return bool(zero), whole_parameters(model)["layer.weight"]


@pytest.mark.parametrize("kind", ["first", "unobserved", "nan"])
def test_trap_2_no_rank_decides_on_its_own_shard(kind: str) -> None:
    (zero, one), (other_zero, other) = run(2, decides_alone, kind)
    assert (zero, other_zero) == (False, True)
    assert torch.equal(one, other) or kind == "nan"
    assert one.isnan().any() == (kind == "nan")


def with_options(rank: int, kind: str, options: dict[str, Any]) -> tuple[bool, Tensor]:
    return decides_alone(rank, kind, **options)


@pytest.mark.parametrize("kind", ["first", "unobserved", "nan"])
@pytest.mark.parametrize(
    "options",
    [
        {"rescale": "graft", "max_grad_norm": 0.1},
        {"rescale": "kl-clip", "momentum": 0.9},
        {"rescale": "auto", "momentum": 0.9},
        {"refresh_every": kronfac.StaleInterval(1)},
        {"solver": "cholesky", "damping": kronfac.Relative(0.1)},
    ],
    ids=str,
)
def test_trap_2_whatever_sets_the_length_of_steps(options: dict[str, Any], kind: str) -> None:
    """Of three ranks one has a gradient, which may not be finite, one zeros and one nothing."""
    found = run(3, with_options, kind, options)
    assert [zero for zero, _ in found] == [False, True, True]
    for _, weight in found:
        assert torch.equal(weight.nan_to_num(), found[0][1].nan_to_num())
        assert weight.isnan().any() == (kind == "nan")


def looks_at_weights(rank: int) -> Any:
    ignore_advice()
    with double_precision():
        return on_rank(rank, case("transformer", steps=3, method="MLBFGS"), Way()).parameters


def test_trap_3_an_owner_alone_touches_no_sharded_weight() -> None:
    expected = alone(case("transformer", steps=3, method="MLBFGS")).parameters
    for found in run(2, looks_at_weights):
        assert_near(found, expected, "weights of packed attention")


def test_trap_4_accumulated_gradients_are_not_taken_for_cleared_ones() -> None:
    check(
        2,
        (case("mlp", steps=3, micro=3), Way()),
        (case("cnn", steps=2, micro=2, syncs=True), Way()),
    )


def cleared(rank: int) -> tuple[bool, bool]:
    model = shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), Way())
    optimizer = kfac(model)
    backward(model, torch.randn(3, 4))
    seen = all(state.pending.has_outputs for state in optimizer.layers)
    model.zero_grad()
    model(torch.randn(3, 4))
    return seen, any(state.pending.has_outputs for state in optimizer.layers)


def test_gradients_that_somebody_else_has_cleared_are_noticed() -> None:
    assert run(2, cleared) == [(True, False)] * 2


def evaluates(rank: int) -> Any:
    with double_precision():
        model, optimizer = build(MLP, Way("model", reshard=False))
        names = set(optimizer.state_dict()["param_groups"][0]["kronfac.names"])
        with torch.no_grad():
            model(torch.randn(2, 5))
        held = model[0].weight
        assert set(optimizer.state_dict()["param_groups"][0]["kronfac.names"]) == names
        str(optimizer)
        train(rank, model, optimizer, MLP)
        return isinstance(held, DTensor), whole_parameters(model)


def test_trap_5_an_evaluation_leaves_other_tensors_in_the_root() -> None:
    for sharded, found in run(2, evaluates):
        assert not sharded
        assert_near(found, alone(MLP).parameters, "after an evaluation")


# --- 8, 9, 10, 11, 14: averages, states, meshes -------------------------------------------------


TOKENS = case("transformer", steps=4, loss_average="token")


def summed_loss(rank: int) -> Any:
    ignore_advice()
    with double_precision():
        model, optimizer = build(TOKENS, Way())
        model.set_gradient_divide_factor(1.0)
        for module in model.children():
            module.set_gradient_divide_factor(1.0)
        for number in range(TOKENS.steps):
            x, y = KINDS["transformer"].batch(number, 12)
            optimizer.zero_grad()
            scores = model(x[6 * rank : 6 * rank + 6])
            own = y[6 * rank : 6 * rank + 6].flatten()
            total = F.cross_entropy(scores.flatten(0, -2), own, reduction="sum")
            (total / y.numel()).backward()
            optimizer.step()
        return whole_parameters(model)


def test_trap_8_a_loss_divided_by_the_tokens_of_all_ranks() -> None:
    for found in run(2, summed_loss):
        assert_near(found, alone(TOKENS).parameters, "sum over global tokens")


def refused(rank: int) -> list[str]:
    model = shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), Way())
    found = []
    for options in (
        {"damping": kronfac.LevenbergMarquardt(), "rescale": None},
        {"rescale": "quadratic", "damping": 0.1},
        {"distribute": "comm-opt"},
    ):
        base = torch.optim.SGD(model.parameters(), lr=1.0)
        found.append(refusal(lambda b=base, o=options: kronfac.KFAC(model, b, **o)))
    return found


def test_trap_10_steps_that_need_all_gradients_are_refused() -> None:
    for damping, rescale, scheme in run(2, refused):
        assert "damping=LevenbergMarquardt(...) needs the whole gradient of every layer" in damping
        assert "rescale='quadratic' needs the whole gradient of every layer" in rescale
        assert "leave distribute='auto'" in scheme


def test_trap_11_a_mesh_of_one_rank() -> None:
    check(1, (MLP, Way()), (case("transformer", steps=3, max_grad_norm=0.1), Way()))


def counts_calls(rank: int) -> dict[str, int]:
    model, optimizer = build(MLP, Way())
    train(rank, model, optimizer, case("mlp", steps=1))
    counted: dict[str, int] = {}
    names = ("all_gather", "all_gather_into_tensor", "all_to_all_single", "broadcast")
    before = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] = counted.get(name, 0) + 1
            return before[name](*args, **kwargs)

        return call

    x, y = KINDS["mlp"].batch(1, 4)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for name in names:
        setattr(dist, name, counting(name))
    try:
        optimizer.step()
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
    return counted


def test_trap_14_gradients_travel_by_two_all_to_alls() -> None:
    for counted in run(2, counts_calls):
        assert counted == {"all_to_all_single": 2}


def ragged(rank: int) -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Shard(0)]))
    local(model.weight)  # three rows each
    uneven = DTensor.from_local(
        torch.zeros(2 if rank else 4, 4),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=(6, 4),
        stride=(4, 1),
    )
    model.weight = nn.Parameter(uneven)
    placement = refusal(lambda: kfac(model))
    half = dist.new_group([rank], use_local_synchronization=True)
    other = fully_shard(nn.Linear(4, 6), mesh=mesh)
    return placement, refusal(lambda: kfac(other, process_group=half))


def test_placements_and_groups_that_do_not_fit_are_refused() -> None:
    for placement, group in run(2, ragged):
        assert "parameter 'weight' is placed as" in placement
        assert "chunks of a dimension (Shard) only" in placement
        assert "is sharded over a mesh of ranks 0, 1, but the optimizer has ranks" in group
        assert "process_group=" in group


def test_the_optimizer_may_be_built_before_sharding() -> None:
    check(2, (MLP, Way(order="before")), (TRANSFORMER, Way("model", order="before")))


def built_on_meta(rank: int, order: str, one: Case = MLP) -> Any:
    with double_precision():
        source = KINDS["mlp"].model().state_dict()
        with torch.device("meta"):
            model = KINDS["mlp"].make()
        options = dict(one.options)

        def make() -> Any:
            base = BASES["momentum"](model)
            return kronfac.KFAC(model, base, **options)

        optimizer = make() if order == "meta" else None
        shard(model, Way())
        optimizer = make() if order == "sharded" else optimizer
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.copy_(distribute_tensor(source[name], mesh, placements))
        train(rank, model, optimizer or make(), one)
        return whole_parameters(model)


@pytest.mark.parametrize("order", ["meta", "sharded", "filled"])
def test_models_made_on_the_meta_device(order: str) -> None:
    for found in run(2, built_on_meta, order):
        assert_near(found, alone(MLP).parameters, order)
