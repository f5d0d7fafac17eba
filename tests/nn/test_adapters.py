"""Kronecker adapters: nothing at first, exact when merged, of full rank if need be."""

import pytest
import torch
from torch import nn

import kronfac
from kronfac.nn import KronAAdapter, attach_adapters, compress, merge_adapters
from kronfac.nn.compress import choose_shapes
from kronfac.nn.nearest import full_rank, num_parameters
from tests.training import assert_close

pytestmark = pytest.mark.usefixtures("double_precision")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))


def moved(model: nn.Module) -> None:
    """Give every trainable parameter another value."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()


def test_a_fresh_adapter_changes_nothing() -> None:
    model, x = network(), torch.randn(5, 12)
    before = model(x)
    assert attach_adapters(model) == ["0", "2", "4"]
    assert torch.equal(model(x), before)
    trains = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(".delta." in name for name in trains)


def test_merging_is_exact() -> None:
    model, x = network(), torch.randn(5, 12)
    attach_adapters(model, include=["0", "2"], scale=0.7)
    moved(model)
    with_adapters = model(x)
    assert merge_adapters(model) == ["0", "2"]
    assert all(isinstance(model[i], nn.Linear) for i in (0, 2, 4))
    assert_close(model(x), with_adapters)


def test_a_product_may_have_full_rank() -> None:
    adapter = KronAAdapter(nn.Linear(12, 12))
    moved(adapter)
    assert torch.linalg.matrix_rank(adapter.delta.dense()) == 12
    ranks = [torch.linalg.matrix_rank(f.weight) for f in (adapter.delta.left, adapter.delta.right)]
    assert ranks[0] * ranks[1] == 12


def test_the_number_of_parameters_is_kept_to() -> None:
    model = network()
    attach_adapters(model, parameters=80, exclude="4")
    for index in (0, 2):
        used = sum(p.numel() for p in model[index].delta.parameters())
        assert 24 < used <= 80
    with pytest.raises(ValueError, match="parameters=3 is too few for a layer of 12 × 12"):
        attach_adapters(network(), parameters=3)


def test_no_layer_is_an_error() -> None:
    with pytest.raises(ValueError, match="no linear layer matches include='encoder"):
        attach_adapters(network(), include="encoder.*")


def test_attention_keeps_its_projections() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    x = torch.randn(2, 3, 8)
    before = model(x)
    assert attach_adapters(model) == ["linear1", "linear2"]
    assert_close(model(x), before)


def test_kfac_trains_adapters_only() -> None:
    model = network()
    attach_adapters(model)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trainable = [p for p in model.parameters() if p.requires_grad]
    base = torch.optim.SGD(trainable, lr=0.1)
    optimizer = kronfac.KFAC(model, base, momentum=0.9, nesterov=True)
    x, y = torch.randn(32, 12), torch.randint(4, (32,))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for name, value in frozen.items():
        assert torch.equal(dict(model.named_parameters())[name], value)


# --- compressing -----------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [2.0, 4.0, 16.0])
def test_each_matrix_has_as_few_parameters_as_asked_for(factor: float) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.LSTM(64, 32))
    small = compress(model, factor)
    for before, after in zip(model, small, strict=True):
        matrices = [p for p in before.parameters() if p.dim() == 2]
        factors = [p for p in after.parameters() if p.dim() == 2]
        if matrices:
            assert sum(p.numel() for p in factors) <= sum(p.numel() for p in matrices) / factor
    assert isinstance(model[0], nn.Linear)


def test_of_the_largest_shapes_the_nearest_is_taken() -> None:
    b, c = torch.randn(4, 8), torch.randn(8, 4)
    found, terms = choose_shapes(torch.kron(b, c), 64, 4)
    assert found == ((4, 8), (8, 4))
    assert terms * num_parameters(found) == 64


@pytest.mark.parametrize(("limit", "terms"), [(1, 1), (2, 2), (4, 3)])
def test_products_have_full_rank_and_as_many_terms_as_fit(limit: int, terms: int) -> None:
    """Thin factors are nearer to this matrix, which has rank 4, and would learn less."""
    matrix = torch.randn(64, 4) @ torch.randn(4, 64)
    found, chosen = choose_shapes(matrix, 410, limit)
    assert full_rank(found) == 64
    assert chosen == terms
    small = compress(nn.Linear(64, 64), 10, terms=limit)
    assert small.terms * num_parameters(small.shapes) <= 64 * 64 / 10


@pytest.mark.parametrize(("inputs", "hidden"), [(28, 128), (128, 32), (1, 64)])
def test_the_matrices_of_a_recurrent_layer_share_evenly(inputs: int, hidden: int) -> None:
    """In proportion to their sizes, the smaller one would keep next to nothing."""
    layer = nn.LSTM(inputs, hidden)
    small = compress(layer, 16)
    used = [
        sum(factor.numel() for factor in product.factors())
        for product in (small.inputs[0], small.states[0])
    ]
    total = 4 * hidden * (inputs + hidden) / 16
    smaller = min(4 * hidden * inputs, 4 * hidden * hidden, total)
    assert 0.8 * total <= sum(used) <= total
    assert 0.3 * smaller <= min(used) <= smaller / 2


def test_what_is_excluded_or_too_small_stays() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(3, 2))
    small = compress(model, 4, exclude="1")
    assert [type(one).__name__ for one in small] == ["KroneckerLinear", "Linear", "Linear"]


def test_terms_must_be_a_number() -> None:
    with pytest.raises(ValueError, match="terms=0 must be a whole number from 1"):
        compress(network(), 4, terms=0)


def test_a_factor_that_makes_nothing_smaller_is_refused() -> None:
    with pytest.raises(ValueError, match="factor=1 must be a number above 1"):
        compress(network(), 1)
