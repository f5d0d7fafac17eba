"""What a block may ask of the engine, each wish against a few lines that do the same by hand."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.protocol.block import Given, Part, Statistic
from tests import oracles
from tests.distributed.equivalence import double_precision
from tests.distributed.ranks import run
from tests.methods import toys
from tests.methods.test_protocol import GAMMA, assert_equal, dense_solve, normal, sample_losses

N, STEPS = 6, 5


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    with double_precision():
        yield


def layer() -> nn.Linear:
    return nn.Linear(4, 3, bias=False)


def take(optimizer: Any, x: Tensor, parts: int = 1) -> tuple[Tensor, Tensor]:
    """One step of a lone layer: its gradient, before and after."""
    model = optimizer.model
    optimizer.zero_grad()
    for one in x.chunk(parts):
        outputs = model(one)
        if optimizer.needs_observe:
            optimizer.observe(outputs)
        (sample_losses(outputs).mean() / parts).backward()
    before = model.weight.grad.clone()
    optimizer.step()
    return before, model.weight.grad.clone()


def state_of(optimizer: Any) -> Any:
    (state,) = optimizer.layers
    return state


# --- when parts are solved ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:refresh_every=1 is less")
@pytest.mark.parametrize("refresh_every", [1, 2, 7])
def test_each_update_comes_to_its_part_once(refresh_every: int) -> None:
    model = layer()
    optimizer = toys.ShermanMorrison(model, SGD(model.parameters(), lr=0.0))
    optimizer.factor_every, optimizer.refresh_every = 2, refresh_every
    expected = torch.eye(4)
    for number in range(STEPS):
        x = normal(N, 4)
        before, after = take(optimizer, x)
        if number % 2 == 0:
            a = x.mean(0)
            expected = torch.linalg.inv((torch.linalg.inv(expected) + torch.outer(a, a)) / 2)
        assert_equal(after, before @ expected)


def test_what_was_only_allocated_is_nothing_to_update() -> None:
    """Loaders make empty tensors by a step without gradients; no solution follows from those."""
    model = layer()
    optimizer = toys.ShermanMorrison(model, SGD(model.parameters(), lr=0.0))
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert not state_of(optimizer).solution["J"].any()
    x = normal(N, 4)
    before, after = take(optimizer, x)
    a = x.mean(0)
    assert_equal(after, before @ torch.linalg.inv((torch.eye(4) + torch.outer(a, a)) / 2))


class SumBlock(toys.GradientBlock):
    """`V / ΣV²`, of sums."""

    label = "sums"

    def __init__(self, one: Any) -> None:
        super().__init__(one)
        self.statistics = {"S": Statistic(self.shape, "gradient")}
        self.solution_shapes = {"S": self.shape}

    def observe_gradient(self, gradient: Tensor, context: Any = None) -> dict[str, Tensor]:
        return {"S": gradient.square()}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        return {"S": given.means["S"] * given.counts["S"]}

    def precondition(self, solution: Any, gradient: Tensor, damping: float) -> Tensor:
        return gradient / solution["S"]


@dataclass(frozen=True, kw_only=True)
class SumMethod(toys.Toy):
    made = SumBlock


Sum = kronfac.register_method(SumMethod)


def sums(rank: int, scheme: str, size: int) -> tuple[Tensor, Tensor]:
    """The step that is found, and the one that follows from all gradients."""
    with double_precision():
        torch.manual_seed(0)
        model, expected = layer(), torch.zeros(3, 4)
        wrapped = DistributedDataParallel(model) if size > 1 else model
        base = SGD(model.parameters(), lr=0.0)
        optimizer = Sum(wrapped, base, decay=0.5, distribute=scheme)
        for _ in range(STEPS):
            x = normal(N, 4).chunk(size)[rank]
            optimizer.zero_grad()
            sample_losses(wrapped(x)).mean().backward()
            assert model.weight.grad is not None
            gradient = model.weight.grad.clone()
            expected = 0.5 * expected + gradient.square()
            optimizer.step()
        return model.weight.grad, gradient / expected


def test_counts_make_sums_of_means() -> None:
    assert_equal(*sums(0, "auto", 1))


@pytest.mark.parametrize("scheme", ["replicated", "comm-opt", "mem-opt", "local"])
def test_counts_make_sums_of_means_on_ranks(scheme: str) -> None:
    for found in run(2, sums, scheme, 2):
        assert_equal(*found)


def test_a_layer_that_is_not_used_is_not_updated() -> None:
    model = nn.ModuleList([layer(), layer()])
    optimizer = toys.ShermanMorrison(model, SGD(model.parameters(), lr=0.0), on_missing="ignore")
    states = optimizer.layers
    x = normal(N, 4)
    sample_losses(model[0](x) + model[1](x)).mean().backward()
    optimizer.step()
    first = [state.solution["J"].clone() for state in states]
    optimizer.zero_grad()
    sample_losses(model[0](x)).mean().backward()
    optimizer.step()
    assert not torch.equal(states[0].solution["J"], first[0])
    assert torch.equal(states[1].solution["J"], first[1])


@pytest.mark.parametrize("kind", ["every update", "moments of samples", "moments of gradients"])
def test_tensors_that_loaders_make_are_no_solution(kind: str) -> None:
    """An empty step, by which loaders make state appear: its zeros are nothing to start from."""
    found = []
    for empty in (True, False):
        torch.manual_seed(0)
        model = layer()
        optimizer = toys.KINDS[kind](model, SGD(model.parameters(), lr=0.1))
        if empty:
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
            assert state_of(optimizer).solution is not None
        for number in range(3):
            take(optimizer, normal(N, 4) + number)
        found.append(model.weight.detach())
    assert torch.equal(*found)


def test_parts_of_every_step_follow_the_gradient_between_refreshes() -> None:
    model = layer()
    optimizer = toys.GradientMoments(model, SGD(model.parameters(), lr=0.0))
    optimizer.factor_every = optimizer.refresh_every = 3
    total, count, basis = torch.zeros(3, 4), 0.0, None
    for number in range(STEPS):
        before, after = take(optimizer, normal(N, 4))
        solution = state_of(optimizer).solution
        left, right = solution["G.vectors"], solution["A.vectors"]
        if basis is not None:
            total, count = 0.9 * total, 0.9 * count
            total += (basis[0].mT @ before @ basis[1]).square()
            count += 1
            turned = [
                (new.mT @ old).square() for new, old in zip((left, right), basis, strict=True)
            ]
            total = turned[0] @ total @ turned[1].mT
            moments = total / count
        else:
            moments = torch.outer(solution["G.values"], solution["A.values"])
        basis = (left, right)
        expected = left @ ((left.mT @ before @ right) / (moments + GAMMA)) @ right.mT
        assert_equal(after, expected)
        assert optimizer.stats()["refreshes"] == 1 + number // 3


@pytest.mark.parametrize("parts", [1, 2])
def test_moments_of_samples_are_the_diagonal_in_the_basis(parts: int) -> None:
    model = layer()
    optimizer = toys.SampleMoments(model, SGD(model.parameters(), lr=0.0), decay=0.0)
    optimizer.refresh_every = 9
    take(optimizer, normal(N, 4))
    x = normal(N, 4)
    fisher = oracles.empirical_fisher_block(model, sample_losses(model(x)))
    before, after = take(optimizer, x, parts)
    solution = state_of(optimizer).solution
    basis = torch.kron(solution["G.vectors"], solution["A.vectors"])
    turned = basis.mT @ fisher @ basis
    assert_equal(solution["S"].flatten(), turned.diagonal())
    expected = basis @ ((basis.mT @ before.flatten()) / (turned.diagonal() + GAMMA))
    assert_equal(after.flatten(), expected)


# --- what is observed --------------------------------------------------------------------------


def test_weights_are_seen_at_every_step() -> None:
    model = layer()
    optimizer = toys.Weights(model, SGD(model.parameters(), lr=0.1), factor_every=1)
    seen = []
    for _ in range(STEPS):
        seen.append(model.weight.detach().clone())
        before, after = take(optimizer, normal(N, 4))
        assert_equal(after, before * (torch.stack(seen).mean(0).square() + GAMMA))


@pytest.mark.parametrize("parts", [1, 2])
def test_the_gradient_at_the_outputs_reaches_every_sample(parts: int) -> None:
    model = layer()
    optimizer = toys.Outputs(model, SGD(model.parameters(), lr=0.0))
    assert optimizer.needs_observe
    x = normal(N, 4)
    z = model(x)
    rows = [
        torch.autograd.grad(one, model.weight, retain_graph=True)[0] for one in sample_losses(z)
    ]
    U = torch.stack(rows).flatten(1)
    s = (2 * (z.detach() - 1)).square().sum(1)
    kernel = U @ U.T / N + GAMMA * torch.eye(N)
    _, after = take(optimizer, x, parts)
    assert_equal(after.flatten(), U.T @ torch.linalg.solve(kernel, s) / N)


def test_a_scaler_that_is_found_late_is_taken_out_of_the_gradient_at_the_outputs() -> None:
    found = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = layer()
        optimizer = toys.Outputs(model, SGD(model.parameters(), lr=0.1))
        outputs = model(normal(N, 4))
        optimizer.observe(outputs)
        loss = sample_losses(outputs).mean()
        if scaled:
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        else:
            loss.backward()
            optimizer.step()
        found.append(model.weight.detach().clone())
    assert_equal(*found)


def test_outputs_that_were_not_shown_are_asked_for() -> None:
    model = layer()
    optimizer = toys.Outputs(model, SGD(model.parameters(), lr=0.0))
    sample_losses(model(normal(N, 4))).mean().backward()
    with pytest.raises(
        RuntimeError, match=r"Outputs needs the model's outputs .* optimizer\.observe"
    ):
        optimizer.step()


def test_outputs_of_another_batch_are_refused() -> None:
    model = layer()
    optimizer = toys.Outputs(model, SGD(model.parameters(), lr=0.0))
    outputs = model(normal(N, 4))
    with pytest.raises(ValueError, match=r"outputs of shape \(2, 3\) after a forward of 6 samples"):
        optimizer.observe(outputs[:2])


def test_rows_that_are_held_outlive_the_batch() -> None:
    """Loops may fill one buffer again and again, before the step too."""
    found = []
    for reuses in (False, True):
        torch.manual_seed(0)
        model = layer()
        optimizer = toys.DenseRows(model, SGD(model.parameters(), lr=0.1))
        buffer = torch.empty(N, 4)
        for _ in range(2):
            x = buffer.copy_(normal(N, 4)) if reuses else normal(N, 4)
            (sample_losses(model(x)).mean() / 2).backward()
        optimizer.step()
        found.append(model.weight.detach().clone())
    assert_equal(*found)


# --- rows that are compressed ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:another K-FAC optimizer")
def test_draws_are_saved() -> None:
    """Signs do not matter for the step, but they are in the solution."""
    model = layer()
    batches = [normal(N, 4) for _ in range(4)]
    optimizer = toys.CompressedRows(model, SGD(model.parameters(), lr=0.1))
    for x in batches[:2]:
        take(optimizer, x)
    other = copy.deepcopy(model)
    resumed = toys.CompressedRows(other, SGD(other.parameters(), lr=0.1))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x in batches[2:]:
        take(optimizer, x)
        take(resumed, x)
    found = state_of(resumed).solution["g"]
    assert torch.equal(state_of(optimizer).solution["g"], found)
    fresh = toys.CompressedRows(model, SGD(model.parameters(), lr=0.1))
    take(fresh, batches[3])
    assert not torch.equal(state_of(fresh).solution["g"].sign(), found.sign())


class HalfBlock(toys.SampleSpaceBlock):
    """Each rank sends the longer half of its rows."""

    def compress(self, given: Given) -> dict[str, Tensor]:
        chosen = longer_half(given.means["a"])
        return {name: value[chosen] for name, value in given.means.items()}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        assert len(given.shards["a"]) in (1, 3)
        return super().solve(part, given)


def longer_half(a: Tensor) -> Tensor:
    return a.norm(dim=-1).argsort(descending=True)[: (len(a) + 1) // 2].sort().values


@dataclass(frozen=True, kw_only=True)
class HalfMethod(toys.Toy):
    made = HalfBlock


Half = kronfac.register_method(HalfMethod)


def half_on_rank(rank: int, scheme: str) -> Tensor:
    with double_precision():
        torch.manual_seed(0)
        model = DistributedDataParallel(layer())
        optimizer = Half(model, SGD(model.parameters(), lr=0.0), distribute=scheme)
        x = torch.randn(4 * dist.get_world_size(), 4)[4 * rank : 4 * rank + 4]
        sample_losses(model(x)).mean().backward()
        optimizer.step()
        return model.module.weight.grad.clone()


@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt"])
def test_every_rank_compresses_its_own_rows(scheme: str) -> None:
    found = run(3, half_on_rank, scheme)
    torch.manual_seed(0)
    model = layer()
    x = torch.randn(12, 4)
    chosen = torch.cat([shard[longer_half(shard)] for shard in x.chunk(3)])
    fisher = oracles.empirical_fisher_block(model, sample_losses(model(chosen)))
    sample_losses(model(x)).mean().backward()
    expected = dense_solve(fisher, model.weight.grad)
    for one in found:
        assert_equal(one, expected)


def idle_on_rank(rank: int, idle: int, refresh_every: int) -> Tensor:
    """Rows that the idle rank keeps from the step before do not come back beside new ones."""
    with double_precision():
        torch.manual_seed(0)
        model = layer()
        options: dict[str, Any] = {"distribute": "comm-opt", "on_missing": "ignore"}
        options["refresh_every"] = lambda step: refresh_every
        wrapped = DistributedDataParallel(model)
        optimizer = toys.SampleSpace(wrapped, SGD(model.parameters(), lr=0.0), **options)
        for number in range(refresh_every + 1):
            x = torch.randn(2, 4) if number and rank == idle else torch.randn(4, 4)
            optimizer.zero_grad()
            context = optimizer.no_capture() if number and rank == idle else torch.enable_grad()
            with context:
                sample_losses(wrapped(x)).mean().backward()
            optimizer.step()
        return optimizer.layers[0].solution["a"]


@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize("idle", [0, 1])
def test_rows_of_an_idle_rank_are_not_gathered_again(idle: int, refresh_every: int) -> None:
    for rows in run(2, idle_on_rank, idle, refresh_every):
        assert rows.shape == (4, 4)


class CountingBlock(toys.SampleSpaceBlock):
    """Remembers what its rows are divided by, when they are compressed and when they are solved."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        made = Statistic((1,), "compressed", combine="gather")
        self.statistics = {**self.statistics, "before": made}
        self.solution_shapes = {**self.solution_shapes, "counts": (2,)}

    def compress(self, given: Given) -> dict[str, Tensor]:
        return {**given.means, "before": given.means["a"].new_full((1, 1), given.counts["g"])}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        found = [float(given.means["before"][0]), given.counts["g"]]
        return {**super().solve(part, given), "counts": torch.tensor(found)}


@dataclass(frozen=True, kw_only=True)
class CountingMethod(toys.Toy):
    made = CountingBlock


Counting = kronfac.register_method(CountingMethod)


def counts_on_rank(rank: int, scheme: str) -> list[Tensor]:
    with double_precision():
        torch.manual_seed(0)
        model = layer()
        wrapped = DistributedDataParallel(model)
        options: dict[str, Any] = {"distribute": scheme, "on_missing": "ignore"}
        optimizer = Counting(wrapped, SGD(model.parameters(), lr=0.0), **options)
        found = []
        for number in range(2):
            optimizer.zero_grad()
            context = optimizer.no_capture() if number and rank else torch.enable_grad()
            with context:
                sample_losses(wrapped(torch.randn(4, 4))).mean().backward()
            optimizer.step()
            found.append((optimizer.layers[0].solution or {}).get("counts"))
        return found


@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt", "local"])
def test_counts_are_those_of_the_rows_that_are_there(scheme: str) -> None:
    """Eight samples on two ranks; then one of them observes nothing and keeps older rows."""
    (first, second), *_ = run(2, counts_on_rank, scheme)
    assert first.tolist() == ([4, 4] if scheme == "local" else [8, 8])
    assert second.tolist() == [4, 4]


def test_a_batch_that_was_dropped_does_not_count() -> None:
    model = layer()
    optimizer = Counting(model, SGD(model.parameters(), lr=0.0))
    for x in (normal(4, 4), torch.full((2, 4), torch.nan)):
        sample_losses(model(x)).sum().div(6).backward()
    model.weight.grad.nan_to_num_(0)
    optimizer.step()
    assert state_of(optimizer).solution["counts"].tolist() == [4, 4]


class PickyBlock(toys.SampleSpaceBlock):
    def check_rows(self, inputs: Any) -> None:
        if inputs.samples > 4:
            raise ValueError(f"{inputs.samples} samples are too many")


@dataclass(frozen=True, kw_only=True)
class PickyMethod(toys.Toy):
    made = PickyBlock


Picky = kronfac.register_method(PickyMethod)


def test_rows_can_be_refused_before_they_are_kept() -> None:
    model = layer()
    optimizer = Picky(model, SGD(model.parameters(), lr=0.0))
    take(optimizer, normal(4, 4))
    with pytest.raises(ValueError, match="6 samples are too many"):
        take(optimizer, normal(6, 4))


def test_rows_are_in_the_summary() -> None:
    model = layer()
    optimizer = toys.SampleSpace(model, SGD(model.parameters(), lr=0.0))
    assert "Rows are kept until the step and gathered: 56 B for one row" in optimizer.summary()
    assert state_of(optimizer).held_bytes == 0
    take(optimizer, normal(N, 4))
    # rows as they were observed, rows in the solution, and the kernel
    assert state_of(optimizer).held_bytes == 8 * (2 * N * (4 + 3) + N * N)


# --- where things travel and how they are kept -------------------------------------------------


def bytes_on_rank(rank: int, kind: str, scheme: str) -> dict[str, int]:
    with double_precision():
        torch.manual_seed(0)
        model = DistributedDataParallel(layer())
        options: dict[str, Any] = {"distribute": scheme, "rescale": None, "refresh_every": 3}
        options |= {"factor_every": 1, "damping": 0.1}
        made = {
            "kfac": kronfac.KFAC,
            "moments": toys.GradientMoments,
            "samples": toys.SampleMoments,
        }
        optimizer = made[kind](model, SGD(model.parameters(), lr=0.0), **options)
        for _ in range(4):
            optimizer.zero_grad()
            sample_losses(model(torch.randn(4, 4))).mean().backward()
            optimizer.step()
        found: dict[str, int] = optimizer.stats()["bytes"]
        return found


@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt"])
def test_moments_of_gradients_travel_as_little_as_kfac(scheme: str) -> None:
    for moments, kfac in zip(
        run(2, bytes_on_rank, "moments", scheme), run(2, bytes_on_rank, "kfac", scheme), strict=True
    ):
        assert moments == kfac


def test_a_basis_that_others_observe_in_is_shared_with_them() -> None:
    """With mem-opt only one rank works on the layer, but both rotate their rows."""
    for found in run(2, bytes_on_rank, "samples", "mem-opt"):
        assert found["share"] == 2 * 8 * (4 * 4 + 4 + 3 * 3 + 3)  # two refreshes
    for found in run(2, bytes_on_rank, "kfac", "mem-opt"):
        assert found["share"] == 0


@pytest.mark.parametrize(("method", "hooked"), [("RankOne", True), ("GradientOnly", False)])
def test_outputs_that_nobody_looks_at_are_not_hooked(method: str, hooked: bool) -> None:
    model = layer()
    optimizer = getattr(toys, method)(model, SGD(model.parameters(), lr=0.0))
    assert bool(model(normal(N, 4))._backward_hooks) == hooked
    optimizer.detach()


class EachBlock(toys.ShermanMorrisonBlock):
    """Its inverse is larger than the vector it is made of."""

    @property
    def parts(self) -> dict[str, Part]:
        return {name: replace(part, by_each=True) for name, part in super().parts.items()}


@dataclass(frozen=True, kw_only=True)
class EachMethod(toys.Toy):
    made = EachBlock


Each = kronfac.register_method(EachMethod)


def each_on_rank(rank: int, scheme: str) -> tuple[Any, Tensor, Any, Tensor]:
    found: list[Any] = []
    with double_precision():
        for method in (Each, toys.ShermanMorrison):
            torch.manual_seed(0)
            model = DistributedDataParallel(layer())
            optimizer = method(model, SGD(model.parameters(), lr=0.1), distribute=scheme)
            for _ in range(3):
                optimizer.zero_grad()
                sample_losses(model(torch.randn(4, 4))).mean().backward()
                optimizer.step()
            found += [optimizer.stats()["bytes"], model.module.weight.detach()]
    return found[0], found[1], found[2], found[3]


@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt", "spd", "replicated"])
def test_parts_that_each_rank_solves_are_not_sent(scheme: str) -> None:
    for own, weight, sent, expected in run(2, each_on_rank, scheme):
        assert_equal(weight, expected)
        assert own["share"] == 0
        assert own["reduce"] == sent["reduce"] == 3 * 8 * 4
        if scheme == "comm-opt":
            assert sent["share"] == 3 * 8 * 4 * 4


class NarrowBlock(toys.RankOneBlock):
    solution_dtype = torch.bfloat16
    full_precision = frozenset({"length"})

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.solution_shapes = {**self.solution_shapes, "length": (1,)}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        narrow = {name: mean.to(self.solution_dtype) for name, mean in given.means.items()}
        return {**narrow, "length": given.means["a"].norm(keepdim=True)}

    def precondition(self, solution: Any, gradient: Tensor, damping: float) -> Tensor:
        wide = {name: value.to(gradient.dtype) for name, value in solution.items()}
        return super().precondition(wide, gradient, damping)


@dataclass(frozen=True, kw_only=True)
class NarrowMethod(toys.Toy):
    made = NarrowBlock


Narrow = kronfac.register_method(NarrowMethod)


def narrow_on_rank(rank: int, scheme: str) -> tuple[Tensor, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(layer())
    optimizer = Narrow(model, SGD(model.parameters(), lr=0.1), distribute=scheme)
    for _ in range(2):
        optimizer.zero_grad()
        sample_losses(model(torch.randn(4, 4))).mean().backward()
        optimizer.step()
    solution = optimizer.layers[0].solution or {}
    return model.module.weight.detach(), {name: one.dtype for name, one in solution.items()}


@pytest.mark.parametrize("scheme", ["comm-opt", "mem-opt"])
def test_solutions_may_be_narrow(scheme: str) -> None:
    (first, kept), (second, others) = run(2, narrow_on_rank, scheme)
    assert torch.equal(first, second)
    half = torch.bfloat16
    assert {**kept, **others} == {"a": half, "b": half, "length": torch.float32}


def test_narrow_solutions_stay_narrow_when_they_are_loaded() -> None:
    model = layer()
    optimizer = Narrow(model, SGD(model.parameters(), lr=0.1))
    take(optimizer, normal(N, 4))
    other = Narrow(model, SGD(model.parameters(), lr=0.1))
    other.load_state_dict(optimizer.state_dict())
    dtypes = {name: one.dtype for name, one in state_of(other).solution.items()}
    assert dtypes == {"a": torch.bfloat16, "b": torch.bfloat16, "length": torch.float64}
    printed = state_of(other).held_bytes
    assert printed == 8 * (4 + 3) + 2 * (4 + 3) + 8


class UngroupedBlock(toys.SampleSpaceBlock):
    """Without samples there is nothing to gather: a vector of each side instead."""

    def __init__(self, layer: Any, grouped: bool) -> None:
        super().__init__(layer)
        if not grouped:
            self.keeps = "none"
            self.statistics = {"b": Statistic((self.d_out,), "output", degree=1)}
            self.solution_shapes = {"b": (self.d_out,)}

    def observe_output(self, outputs: Any, context: Any = None) -> dict[str, Tensor]:
        return {} if self.holds_rows else {"b": outputs.total()}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        return super().solve(part, given) if self.holds_rows else dict(given.means)

    def precondition(self, solution: Any, gradient: Tensor, damping: float) -> Tensor:
        return super().precondition(solution, gradient, damping) if self.holds_rows else gradient


@dataclass(frozen=True, kw_only=True)
class UngroupedMethod(toys.Toy):
    def block(self, layer: Any, grouped: bool = True) -> toys.ToyBlock:
        return UngroupedBlock(layer, grouped)


Ungrouped = kronfac.register_method(UngroupedMethod)


class Mixing(nn.Module):
    """Its layer sees rows that are no longer those of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[: len(x) // 2])


class SometimesMixing(Mixing):
    def forward(self, x: Tensor, mixes: bool = False) -> Tensor:
        return super().forward(x) if mixes else self.linear(x)


def test_rows_that_are_no_longer_those_of_samples() -> None:
    """The solution of the other kind is not used again."""
    model = SometimesMixing()
    optimizer = Ungrouped(model, SGD(model.parameters(), lr=0.0))
    for mixes in (False, True):
        optimizer.zero_grad()
        sample_losses(model(normal(N, 4), mixes)).mean().backward()
        before = model.linear.weight.grad.clone()
        optimizer.step()
    assert_equal(model.linear.weight.grad, before)
    assert list(state_of(optimizer).solution) == ["b"]


def test_a_checkpoint_of_a_layer_without_groups_loads_into_a_fresh_optimizer() -> None:
    model = Mixing()
    optimizer = Ungrouped(model, SGD(model.parameters(), lr=0.1))
    sample_losses(model(normal(N, 4))).mean().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    fresh = Ungrouped(model, SGD(model.parameters(), lr=0.1))
    fresh.load_state_dict(saved)
    assert torch.equal(state_of(fresh).solution["b"], state_of(optimizer).solution["b"])


# --- statistics that make no sense -------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"every": "step"}, "needs every='factor'"),
        ({"source": "gradient", "combine": "gather"}, "nothing to gather"),
        ({"source": "compressed"}, "needs combine='gather'"),
    ],
)
def test_statistics_that_cannot_be(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Statistic((2,), "input"), **change)


class Odd(toys.WeightsBlock):
    """Whose parts a test chooses."""

    chosen: dict[str, Part]

    @property
    def parts(self) -> dict[str, Part]:
        return self.chosen


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"W": Part(("W",), ("W",), 0, every="step")}, "at least one part needs every='refresh'"),
        ({"W": Part((), ("W",), 0)}, "part 'W' is solved from no statistic"),
    ],
)
def test_parts_that_cannot_be_solved_are_refused(chosen: Any, message: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class OddMethod(toys.Toy):
        made = type("Chosen", (Odd,), {"chosen": chosen})

    model = layer()
    with pytest.raises(ValueError, match=message):
        kronfac.register_method(OddMethod)(model, SGD(model.parameters(), lr=0.1))


def compressed_on_rank(rank: int) -> tuple[Tensor, Tensor]:
    """A refresh without new rows finds the same solution again."""
    with double_precision():
        torch.manual_seed(0)
        model = layer()
        wrapped = DistributedDataParallel(model)
        optimizer = toys.CompressedRows(
            wrapped,
            SGD(model.parameters(), lr=0.0),
            distribute="comm-opt",
            factor_every=2,
            refresh_every=2,
        )
        optimizer.factor_every = lambda step: 4  # not advised, but possible
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            sample_losses(wrapped(torch.randn(4, 4))).mean().backward()
            optimizer.step()
            found.append(optimizer.layers[0].solution["inverse"].abs())
        return found[0], found[2]


def test_rows_are_compressed_once() -> None:
    for first, again in run(2, compressed_on_rank):
        assert_equal(first, again)
