"""Products in bfloat16: where they are taken, what error they have, and how to do without."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronfac
from kronfac.linalg import covariance, narrow
from kronfac.linalg.narrow import in_words, is_faster, matmul
from kronfac.methods.kfac.block import KFACBlock

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any CPU rounds as one that is faster at it."""
    monkeypatch.setattr(narrow, "supported", lambda device: True)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_the_error_of_a_product_is_bounded() -> None:
    left, right = random(2, 160, 200), random(2, 200, 144, seed=1)
    found = matmul(left, right, True)
    exact = left.double() @ right.double()
    assert found.dtype == torch.float32
    assert 1e-4 < error(found, exact) < 4e-3
    difference = (found - exact).flatten(1).norm(dim=1)
    assert (difference <= 2**-7 * left.flatten(1).norm(dim=1) * right.flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (random(160, 200).double(), random(200, 144).double()),
        (random(16, 400), random(400, 400)),  # one side is short
        (random(100, 100), random(100, 100)),  # all are
    ],
)
def test_float64_and_small_matrices_keep_their_precision(left: Tensor, right: Tensor) -> None:
    assert torch.equal(matmul(left, right, True), left @ right)


def test_the_switch_turns_it_off() -> None:
    left, right = random(160, 200), random(200, 144)
    assert torch.equal(matmul(left, right, False), left @ right)
    assert not torch.equal(matmul(left, right, True), left @ right)


def test_hardware_decides_and_ranks_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random(2, 2)
    assert is_faster(tensor, 128, 128, 128)
    assert in_words(True, [tensor]) == "used"
    assert in_words(False, [tensor]).startswith("not used")
    monkeypatch.setattr(narrow, "supported", lambda device: False)
    assert not is_faster(tensor, 128, 128, 128)
    assert in_words(True, [tensor]).startswith("not used")


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((9, 0), None, True), ((8, 0), None, True), ((7, 5), None, False), ((9, 4), "6.0", False)],
)
def test_gpus_need_tensor_cores_for_it(
    capability: tuple[int, int],
    hip: str | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "version", SimpleNamespace(hip=hip))
    narrow.supported.cache_clear()
    assert narrow.supported(torch.device("cuda", 0)) is expected
    assert not narrow.supported(torch.device("meta"))
    narrow.supported.cache_clear()


def solution(width_out: int, width_in: int, spread: float) -> dict[str, Tensor]:
    """An eigen solution whose eigenvalues fall by ``spread`` on each side."""
    found = {}
    for side, width in (("A", width_in), ("G", width_out)):
        found[f"{side}.vectors"] = torch.linalg.qr(random(width, width, seed=width).double())[0]
        found[f"{side}.values"] = torch.logspace(0, -spread, width).double()
    return found


@pytest.mark.parametrize("spread", [0.0, 2.0, 5.0])
def test_preconditioning_loses_half_a_percent_whatever_the_condition(spread: float) -> None:
    block = KFACBlock(
        (136, 130),
        torch.float32,
        solver="eigen",
        max_dim=8192,
        output_factor=True,
        per_sample=False,
    )
    exact = solution(136, 130, spread)
    gradient = random(136, 130).double()
    rounded = {name: value.float() for name, value in exact.items()}
    expected = block.precondition(exact, gradient, 1e-6)
    wide = block.precondition(rounded, gradient.float(), 1e-6)
    block.narrow = True
    found = block.precondition(rounded, gradient.float(), 1e-6)
    assert error(wide, expected) < 2e-4
    assert 1e-4 < error(found, expected) < 5e-3
    assert torch.equal(block.precondition(exact, gradient, 1e-6), expected)  # never in float64
    product = block.multiply(rounded, gradient.float())
    block.narrow = False
    assert torch.equal(product, block.multiply(rounded, gradient.float()))


@pytest.mark.parametrize(
    ("options", "rounds"),
    [({}, False), ({"rescale": "unit"}, True), ({"rescale": "unit", "products": "float32"}, False)],
)
def test_steps_that_become_orthogonal_are_not_rounded_before(
    options: dict[str, str], rounds: bool
) -> None:
    model = nn.Linear(3, 4)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = kronfac.KFAC(model, base, **options)
    [state] = optimizer.layers
    assert state.block.narrow is rounds
    state.reset()
    assert state.block.narrow is rounds


def trained(products: str | None, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 150), nn.Tanh(), nn.Linear(150, 3)).to(dtype)
    options = {} if products is None else {"products": products}
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = kronfac.KFAC(model, base, momentum=0.9, **options)
    for seed in range(3):
        optimizer.zero_grad()
        model(random(32, 160, seed=seed).to(dtype)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_training_differs_by_rounding_and_not_without_it() -> None:
    auto, wide = trained(None), trained("float32")
    assert torch.equal(auto, trained("auto"))
    assert 0 < error(auto, wide) < 3e-2
    assert torch.equal(
        trained("auto", dtype=torch.float64), trained("float32", dtype=torch.float64)
    )


def test_without_the_hardware_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "supported", lambda device: False)
    assert torch.equal(trained("auto"), trained("float32"))


# --- second moments ------------------------------------------------------------------------------


def eigenvalue_change(found: Tensor, exact: Tensor) -> float:
    """The most that an eigenvalue has changed by, as a share of their mean."""
    change = torch.linalg.eigvalsh(found.double() - exact)
    return float(change.abs().max() / exact.diagonal().mean())


@pytest.mark.parametrize("width", [150, 512])
@pytest.mark.parametrize("offset", [0.0, 1.0, 30.0])
def test_rounding_changes_eigenvalues_by_a_hundredth_whatever_the_mean(
    width: int, offset: float
) -> None:
    rows = random(1024, width).relu() + offset
    exact = rows.double().T @ rows.double()
    exact_ones = covariance.with_ones(rows).double()
    found = covariance.gram(rows, True)
    assert torch.equal(found, found.T)
    assert 0 < eigenvalue_change(found, exact) < 0.01
    bordered = covariance.bordered_gram(rows, True)
    assert eigenvalue_change(bordered, exact_ones.T @ exact_ones) < 0.01
    assert error(covariance.gram(rows).double(), exact) < 1e-5


def test_second_moments_are_rounded_on_demand_and_only_large_ones_in_float32() -> None:
    rows = random(1024, 150)
    assert not torch.equal(covariance.gram(rows, True), covariance.gram(rows))
    for small in (rows[:100], rows.double(), rows[:, :60]):
        assert torch.equal(covariance.gram(small, True), covariance.gram(small))


def test_second_moments_that_are_not_finite_say_so() -> None:
    rows = random(1024, 150)
    rows[7, 3] = torch.inf
    assert not torch.isfinite(covariance.gram(rows, True).diagonal().sum())


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ({}, True),
        ({"products": "float32"}, False),
        ({"damping": 1e-3}, False),
        ({"damping": kronfac.Relative(1e-3)}, False),
        ({"damping": kronfac.Relative(1e-3, to="trace")}, False),
    ],
)
def test_statistics_are_rounded_where_damping_hides_it(
    options: dict[str, Any], rounds: bool
) -> None:
    model = nn.Linear(3, 4)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = kronfac.KFAC(model, base, **options)
    [state] = optimizer.layers
    assert state.block.narrow_rows is rounds
    state.reset()
    assert state.block.narrow_rows is rounds
    optimizer.damping = 1e-3
    assert not state.block.narrow_rows
