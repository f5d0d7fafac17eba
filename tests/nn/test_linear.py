"""Kronecker products as layers: the same numbers as the dense matrix, which is never formed."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import kronfac
from kronfac.nn import KroneckerLinear, nearest_kronecker, nearest_kronecker_sum
from kronfac.nn.nearest import all_shapes, default_shapes, num_parameters, relative_error
from tests import layer_oracles
from tests.training import assert_close, factors

pytestmark = pytest.mark.usefixtures("double_precision")

SHAPES = [
    ((2, 3), (5, 4)),
    ((5, 4), (2, 3)),
    ((1, 1), (10, 12)),
    ((10, 12), (1, 1)),
    ((10, 1), (1, 12)),
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_it_is_the_product_with_the_dense_matrix(shapes: object, leading: tuple[int, ...]) -> None:
    layer = KroneckerLinear(12, 10, shapes=shapes)
    x = torch.randn(*leading, 12)
    assert_close(layer.dense(), torch.kron(layer.left.weight, layer.right.weight))
    assert_close(layer(x), x @ layer.dense().T + layer.bias)


@pytest.mark.parametrize("shapes", SHAPES[:2])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_terms_are_added(shapes: object, leading: tuple[int, ...]) -> None:
    layer = KroneckerLinear(12, 10, shapes=shapes, terms=3)
    x = torch.randn(*leading, 12)
    matrix = sum(torch.kron(b, c) for b, c in zip(*layer.factors(), strict=True))
    assert_close(layer.dense(), matrix)
    assert_close(layer(x), x @ matrix.T + layer.bias)
    assert sum(p.numel() for p in layer.parameters()) == 3 * (2 * 3 + 5 * 4) + 10


def test_both_orders_are_among_the_shapes() -> None:
    orders = {KroneckerLinear(12, 10, shapes=one, terms=3).right_first for one in SHAPES[:2]}
    assert orders == {True, False}


class Shapes(TorchDispatchMode):
    """Shapes of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("terms", [1, 3])
def test_the_matrix_is_never_formed(terms: int) -> None:
    layer = KroneckerLinear(12, 10, terms=terms)
    x = torch.randn(7, 12)
    with Shapes() as shapes:
        layer(x).sum().backward()
    assert all(sorted(one) != [10, 12] for one in shapes.seen)


def test_the_cheaper_order_is_taken() -> None:
    for one in all_shapes(12, 30):
        layer = KroneckerLinear(30, 12, shapes=one)
        (m1, n1), (m2, n2) = one
        costs = {True: n1 * n2 * m2 + n1 * m1 * m2, False: m1 * n1 * n2 + m1 * n2 * m2}
        assert costs[layer.right_first] == min(costs.values())


def test_default_shapes_have_the_fewest_parameters_of_full_rank() -> None:
    assert default_shapes(64, 64) == ((8, 8), (8, 8))
    assert num_parameters(default_shapes(12, 12)) == 25
    assert default_shapes(7, 11) in [((1, 1), (7, 11)), ((7, 11), (1, 1))]


@pytest.mark.parametrize("terms", [1, 4])
def test_a_fresh_product_varies_as_much_as_a_fresh_linear_layer(terms: int) -> None:
    torch.manual_seed(0)
    ours = torch.stack([KroneckerLinear(64, 64, terms=terms).dense() for _ in range(30)])
    theirs = torch.stack([nn.Linear(64, 64).weight for _ in range(30)])
    assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.05)


def test_wrong_shapes_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"make a 6 × 4 matrix, and 10 × 12 is needed"):
        KroneckerLinear(12, 10, shapes=((2, 2), (3, 2)))


@pytest.mark.parametrize("terms", [0, 7, 1.5, True])
def test_a_wrong_number_of_terms_is_refused(terms: object) -> None:
    with pytest.raises(ValueError, match=rf"terms={terms} is not .* from 1 to 6"):
        KroneckerLinear(12, 10, shapes=((2, 3), (5, 4)), terms=terms)


@pytest.mark.parametrize("shapes", SHAPES[:2])
def test_a_state_dict_holds_all_terms(shapes: object) -> None:
    layers = [KroneckerLinear(12, 10, shapes=shapes, terms=3) for _ in range(2)]
    content = layers[0].state_dict()
    assert set(content) == {"left.weight", "right.weight", "bias"}
    layers[1].load_state_dict(content)
    x = torch.randn(4, 12)
    assert torch.equal(layers[1](x), layers[0](x))


# --- the nearest product ---------------------------------------------------------------------


def test_a_product_is_found_again() -> None:
    b, c = torch.randn(2, 3), torch.randn(5, 4)
    found = nearest_kronecker(torch.kron(b, c), ((2, 3), (5, 4)))
    assert_close(torch.kron(*found), torch.kron(b, c))
    assert_close(found[0].norm(), found[1].norm())


def test_no_other_product_is_nearer() -> None:
    """Each factor alone is a least-squares problem, and both are solved."""
    matrix = torch.randn(10, 12)
    b, c = nearest_kronecker(matrix, ((2, 3), (5, 4)))
    b.requires_grad_(), c.requires_grad_()
    distance = (matrix - torch.kron(b, c)).norm()
    for slope in torch.autograd.grad(distance, (b, c)):
        assert_close(slope, torch.zeros_like(slope))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        other = [one + 0.3 * torch.randn(one.shape, generator=generator) for one in (b, c)]
        assert (matrix - torch.kron(*other)).norm() > distance
    assert_close(relative_error(matrix, ((2, 3), (5, 4))), (distance / matrix.norm()).detach())


def test_enough_terms_are_the_matrix_itself() -> None:
    matrix, shapes = torch.randn(10, 12), ((2, 3), (5, 4))
    errors = [float(relative_error(matrix, shapes, terms)) for terms in range(1, 7)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0
    for terms, error in enumerate(errors, 1):
        b, c = nearest_kronecker_sum(matrix, shapes, terms)
        found = sum(torch.kron(*one) for one in zip(b, c, strict=True))
        assert_close((matrix - found).norm() / matrix.norm(), torch.tensor(error))


def test_the_first_term_is_the_nearest_product_and_terms_are_orthogonal() -> None:
    matrix, shapes = torch.randn(10, 12), ((2, 3), (5, 4))
    b, c = nearest_kronecker_sum(matrix, shapes, 3)
    for ours, alone in zip((b, c), nearest_kronecker(matrix, shapes), strict=True):
        assert torch.equal(ours[0], alone)
    products = torch.stack([torch.kron(*one).flatten() for one in zip(b, c, strict=True)])
    gram = products @ products.T
    assert_close(gram, gram.diagonal().diag())


@pytest.mark.parametrize("shapes", SHAPES[:2])
def test_the_nearest_layer_of_all_terms_is_the_layer(shapes: object) -> None:
    layer, x = nn.Linear(12, 10), torch.randn(4, 12)
    found = KroneckerLinear.nearest(layer, shapes, terms=6)
    assert_close(found.dense(), layer.weight)
    assert_close(found(x), layer(x))


def test_a_matrix_of_zeros_has_a_nearest_product() -> None:
    b, c = nearest_kronecker(torch.zeros(4, 6), ((2, 2), (2, 3)))
    assert_close(torch.kron(b, c), torch.zeros(4, 6))


def test_the_nearest_layer_keeps_its_bias() -> None:
    layer = nn.Linear(12, 10)
    found = KroneckerLinear.nearest(layer, ((2, 3), (5, 4)))
    assert torch.equal(found.bias, layer.bias)
    assert_close(found.dense(), torch.kron(*nearest_kronecker(layer.weight, ((2, 3), (5, 4)))))


# --- K-FAC -----------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [1, 2])
def test_kfac_preconditions_both_factors(terms: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        KroneckerLinear(12, 12, terms=terms), nn.Tanh(), KroneckerLinear(12, 4, terms=terms)
    )
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    names = {one.name for one in optimizer.layers}
    assert names == {"0.left", "0.right", "2.left", "2.right"}
    assert set(optimizer.left_out()) == {"0.bias", "2.bias"} or len(optimizer.left_out()) == 2
    x, y = torch.randn(32, 12), torch.randint(4, (32,))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("shapes", [((3, 4), (4, 3)), ((2, 2), (6, 6)), ((6, 6), (2, 2))])
def test_the_curvature_of_all_terms_is_that_of_one_linear_layer(shapes: object) -> None:
    """What two terms do together counts too: the factors see the terms side by side."""
    torch.manual_seed(0)
    model = nn.Sequential(KroneckerLinear(12, 12, shapes=shapes, terms=2), nn.Linear(12, 4))
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(8, 12), torch.randint(4, (8,))

    def loss(net: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(net(x), y)

    expected = {
        name: layer_oracles.linear_factors(model, name, loss, len(x))
        for name in ("0.left", "0.right")
    }
    loss(model).backward()
    optimizer.step()
    for name, (a, g) in expected.items():
        assert len(a) == model.get_submodule(name).in_features
        assert_close(factors(optimizer, "A")[name], a)
        assert_close(factors(optimizer, "G")[name], g)
