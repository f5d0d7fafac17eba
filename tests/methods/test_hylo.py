"""HyLo: exact with all rows, its sketches against a slow reference, and what ranks send."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.methods.hylo import HyLoBlock, mode_at
from kronfac.protocol.block import Given
from tests.distributed.equivalence import double_precision, same_bits
from tests.distributed.ranks import run
from tests.references import empirical_ngd, hylo
from tests.references.per_sample import RATE, assert_follows, batch, descend, net
from tests.training import parameters

ALPHA, SAMPLES = 0.1, 6


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    with double_precision():
        yield


def make(model: nn.Module, base: Any = None, **options: Any) -> Any:
    chosen = {"damping": ALPHA, "rescale": None, "factor_every": 1, "refresh_every": 1, **options}
    return kronfac.HyLo(model, base or SGD(model.parameters(), lr=RATE), **chosen)


def assert_near(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)


# --- one process -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["kid", "kis"])
def test_all_rows_give_the_exact_step(mode: str) -> None:
    def reference(model: nn.Module, x: Tensor, y: Tensor, number: int) -> None:
        empirical_ngd.step(model, x, y, ALPHA)

    assert_follows(partial(make, rank=1.0, mode=mode), reference, "linear")


@pytest.mark.parametrize("mode", ["kid", "kis"])
@pytest.mark.parametrize("kind", ["linear", "sequence", "conv"])
def test_sketches_are_those_of_the_reference(kind: str, mode: str) -> None:
    slow = hylo.HyLo(mode, 0.5, ALPHA)

    def reference(model: nn.Module, x: Tensor, y: Tensor, number: int) -> None:
        slow.step(model, [(x, y)])

    assert_follows(partial(make, rank=0.5, mode=mode), reference, kind)


def test_groups_are_interpolated_each_for_itself() -> None:
    slow = hylo.HyLo("kid", 0.5, ALPHA)

    def reference(model: nn.Module, x: Tensor, y: Tensor, number: int) -> None:
        slow.step(model, [(x, y)])

    assert_follows(partial(make, rank=0.5, mode="kid"), reference, "grouped")


def block_of(mode: str, rank: float) -> HyLoBlock:
    layer = make(nn.Linear(4, 3, bias=False)).layers[0].layer
    return HyLoBlock(layer, 2**30, rank, mode)


def given(rows: dict[str, Tensor], alpha: float = ALPHA, **further: Any) -> Given:
    samples = rows["a"].shape[-2]
    return Given(rows, alpha, counts=dict.fromkeys(("a", "g"), float(samples)), **further)


def some_rows(samples: int = 8) -> dict[str, Tensor]:
    return {"a": torch.randn(samples, 4), "g": torch.randn(samples, 3)}


def test_sampled_rows_estimate_the_fisher_without_bias() -> None:
    block, rows = block_of("kis", 0.5), some_rows()
    U = hylo.gradients(rows["a"], rows["g"])
    total, draws = torch.zeros(12, 12), 1500
    for number in range(draws):
        generator = torch.Generator().manual_seed(number)
        chosen = block.compress(given(rows, rank_generator=generator))
        some = hylo.gradients(chosen["a"], chosen["g"])
        assert some.shape == (4, 12)
        total += some.T @ some / draws
    error = (total - U.T @ U).norm() / (U.T @ U).norm()
    assert error < 0.05  # one draw is off by about 0.5


@pytest.mark.parametrize("mode", ["kid", "kis"])
def test_much_damping_is_plain_descent(mode: str) -> None:
    block, rows, alpha = block_of(mode, 0.5), some_rows(), 1e12
    generator = torch.Generator().manual_seed(0)
    sent = block.compress(given(rows, alpha, rank_generator=generator))
    shards = {"a": [4], "R": [sent["R"].shape[-2] if "R" in sent else 0]}
    counts = {"a": 8.0, "g": 8.0}
    solution = block.solve("", Given(sent, alpha, shards=shards, counts=counts))
    assert solution is not None
    V = torch.randn(3, 4)
    assert_near(block.precondition(solution, V, alpha) * alpha, V)


def test_interpolation_misses_only_what_is_outside_of_the_chosen_rows() -> None:
    """In the span of the chosen rows, and where all rows are in it, the step is exact."""
    block = block_of("kid", 0.5)
    rows = some_rows(4)
    rows = {name: torch.cat([value, value]) for name, value in rows.items()}
    sent = block.compress(given(rows))
    shards = {"a": [4], "R": [10]}
    counts = {"a": 8.0, "g": 8.0}
    solution = block.solve("", Given(sent, ALPHA, shards=shards, counts=counts))
    assert solution is not None
    U, V = hylo.gradients(rows["a"], rows["g"]), torch.randn(3, 4)
    exact = torch.linalg.solve(U.T @ U / 8 + ALPHA * torch.eye(12), V.flatten())
    assert_near(block.precondition(solution, V, ALPHA).flatten(), exact)


# --- ranks -----------------------------------------------------------------------------------


def train_on_rank(rank: int, mode: Any, scheme: str, share: float, kind: str) -> Any:
    with double_precision():
        model, shape = net(kind)
        wrapped = DistributedDataParallel(model)
        base = SGD(model.parameters(), lr=RATE)
        optimizer = make(wrapped, base, rank=share, mode=mode, distribute=scheme)
        same = True
        for number in range(3):
            x, y = batch(shape, number, SAMPLES * dist.get_world_size())
            own = slice(SAMPLES * rank, SAMPLES * (rank + 1))
            descend(optimizer, x[own], y[own])
            same &= same_bits(model)
        return parameters(model), same, optimizer.stats()["bytes"]


@pytest.mark.parametrize(
    ("mode", "scheme", "kind"),
    [
        ("kid", "comm-opt", "linear"),
        ("kid", "mem-opt", "conv"),
        ("kis", "comm-opt", "conv"),
        ("kis", "layer-parallel", "linear"),
    ],
)
def test_ranks_equal_a_reference_that_compresses_the_same_shards(
    mode: str, scheme: str, kind: str
) -> None:
    slow, (model, shape) = hylo.HyLo(mode, 0.5, ALPHA), net(kind)
    for number in range(3):
        x, y = batch(shape, number, 3 * SAMPLES)
        slow.step(model, list(zip(x.chunk(3), y.chunk(3), strict=True)))
    for found, same, _ in run(3, train_on_rank, mode, scheme, 0.5, kind):
        assert same
        assert_near(found, parameters(model))


@pytest.mark.parametrize(
    ("mode", "share"), [("kid", 0.5), ("kis", 0.5), ("kid", 1.0), ([(0, "kid"), (2, "kis")], 0.34)]
)
def test_bytes_that_are_gathered(mode: Any, share: float) -> None:
    """``r(d_in + d_out)`` numbers a layer and refresh, and with KID a triangle of ``r(r + 1)/2``."""
    r = round(share * SAMPLES)
    rows = sum(r * (d_in + d_out) for d_out, d_in in ((5, 5), (3, 6)))
    triangles = 2 * r * (r + 1) // 2 if share < 1 else 0
    times = {"kid": 3, "kis": 0}.get(mode if isinstance(mode, str) else "", 2)
    for _, _, found in run(2, train_on_rank, mode, "mem-opt", share, "linear"):
        assert found["reduce"] == 8 * (3 * rows + times * triangles)
        assert found["share"] == 0


# --- random numbers --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:another K-FAC optimizer")
def test_draws_go_on_from_a_checkpoint() -> None:
    model, shape = net("linear")
    optimizer = make(model, rank=0.5, mode="kis")
    for number in range(2):
        descend(optimizer, *batch(shape, number))
    twin, fresh = copy.deepcopy(model), copy.deepcopy(model)
    resumed, started = (make(one, rank=0.5, mode="kis") for one in (twin, fresh))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(2, 4):
        for one in (optimizer, resumed, started):
            descend(one, *batch(shape, number))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert not torch.equal(model[0].weight, fresh[0].weight)


def test_interpolation_draws_nothing() -> None:
    model, _ = net("linear")
    assert not any(state.block.draws for state in make(model, mode="kid").layers)
    assert not any(state.block.draws for state in make(model, mode="kis", rank=1.0).layers)


# --- options ---------------------------------------------------------------------------------


def test_the_mode_follows_its_schedule() -> None:
    pairs = [(0, "kid"), (10, "kis"), (20, "kid")]
    assert [mode_at(pairs, step) for step in (0, 9, 10, 19, 20, 99)] == [
        *("kid", "kid", "kis", "kis", "kid", "kid")
    ]
    assert mode_at(lambda step: "kis" if step % 2 else "kid", 3) == "kis"


def test_a_schedule_that_returns_something_else() -> None:
    with pytest.raises(ValueError, match=r"mode\(step=4\)='svd' is not supported"):
        mode_at(lambda step: "svd", 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"rank=0 must be a number in \(0, 1\]"),
        ({"rank": 2}, r"rank=2 must be a number"),
        ({"mode": "svd"}, "mode='svd' is not supported; choose one of 'kid', 'kis'"),
        ({"mode": [(5, "kid")]}, "pairs that begin at step 0"),
        ({"mode": [(0, "kid"), (3, "svd")]}, "pairs that begin at step 0"),
        ({"mode": 3}, "a function of the step number"),
        ({"max_bytes": -1}, "max_bytes=-1 must be"),
        ({"fisher": "forward"}, "fisher='forward' does not observe"),
        ({"damping": kronfac.Relative(0.1)}, "a share of the mean curvature"),
    ],
)
def test_options_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(net("linear")[0], **options)


def test_rows_that_would_not_fit_are_refused_with_the_number() -> None:
    model, shape = net("linear")
    with pytest.raises(ValueError, match=r"layer '0' would keep 60 numbers .* 480 bytes"):
        descend(make(model, max_bytes=479), *batch(shape, 0))
