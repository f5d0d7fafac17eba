"""One weight in several places: an embedding that is also the head, shared linear layers and norms."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import layer_oracles, oracles
from tests.layers.kinds import GAMMA, VOCABULARY, WIDTH, Kind, Loss, N, loss_on
from tests.layers.watching import left_out, stepped, watched
from tests.training import CLASSES, assert_close

pytestmark = pytest.mark.usefixtures("double_precision")

SOLVERS = {"eigen": oracles.eigen_step, "cholesky": oracles.cholesky_step}


# --- an embedding that is also the head ------------------------------------------------------


class Language(nn.Module):
    """Predicts the token that follows the first ones."""

    def __init__(self, head_first: bool, bias: bool) -> None:
        super().__init__()
        embedding = nn.Embedding(VOCABULARY, WIDTH)
        head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        head.weight = embedding.weight
        modules = {"head": head, "embedding": embedding, "mix": nn.Linear(WIDTH, WIDTH)}
        for name in modules if head_first else reversed(modules):
            self.add_module(name, modules[name])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embedding(tokens)).tanh().mean(1))


def language(head_first: bool = False, bias: bool = False) -> Kind:
    torch.manual_seed(0)
    return Kind(Language(head_first, bias), tokens=VOCABULARY)


ORDERS = pytest.mark.parametrize("head_first", [False, True], ids=["embedding-first", "head-first"])


def head_matrix(model: Any) -> Tensor:
    """The gradient of the weight in both roles, as the matrix of the head."""
    return oracles.matrix_gradient(model.head).clone()


def stepped_matrices(kind: Kind, optimizer: Any, loss: Loss) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    loss(kind.model).backward()
    before = head_matrix(kind.model)
    optimizer.step()
    return before, head_matrix(kind.model)


@ORDERS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
def test_curvature_is_that_of_the_linear_use(head_first: bool, bias: bool, solver: Any) -> None:
    kind = language(head_first, bias)
    loss = loss_on(kind.data())
    A, G = layer_oracles.linear_factors(kind.model, "head", loss, N)
    optimizer = watched(kind.model, solver=solver)
    before, after = stepped_matrices(kind, optimizer, loss)
    assert_close(after, SOLVERS[solver](A, G, before, GAMMA))
    assert left_out(optimizer) == {}


@ORDERS
def test_the_other_role_is_in_the_gradient(head_first: bool) -> None:
    kind = language(head_first)
    loss = loss_on(kind.data())
    rows = [
        oracles.gradient_from_rows(*oracles.layer_rows(*call))
        for call in layer_oracles.calls_with_gradients(kind.model, "head", loss)
    ]
    before, _ = stepped_matrices(kind, watched(kind.model), loss)
    assert not torch.allclose(before, rows[0])


@ORDERS
def test_the_summary_notes_the_other_role(head_first: bool) -> None:
    notes = watched(language(head_first).model).summary().partition("Notes:\n")[2]
    assert "embedding" in notes
    assert "head" in notes


@ORDERS
def test_order_makes_no_difference_over_steps(head_first: bool) -> None:
    kind, other = language(head_first), language(not head_first)
    other.model.load_state_dict(kind.model.state_dict())
    steps = []
    for one in (kind, other):
        optimizer = watched(one.model, decay=0.5)
        stepped(one.model, optimizer, loss_on(one.data(0)))
        steps.append(stepped_matrices(one, optimizer, loss_on(one.data(1))))
    assert_close(steps[1], steps[0])


@ORDERS
@pytest.mark.parametrize("max_dim", [VOCABULARY - 1, VOCABULARY])
def test_a_huge_head_keeps_the_diagonal_of_its_outputs(head_first: bool, max_dim: int) -> None:
    kind = language(head_first)
    loss = loss_on(kind.data())
    A, G = layer_oracles.linear_factors(kind.model, "head", loss, N)
    G = G if max_dim == VOCABULARY else G.diag().diag()
    optimizer = watched(kind.model, max_dim=max_dim)
    before, after = stepped_matrices(kind, optimizer, loss)
    assert_close(after, oracles.eigen_step(A, G, before, GAMMA))
    assert ("G diag" in optimizer.summary()) == (max_dim < VOCABULARY)


@pytest.mark.parametrize("excluded", ["head", "embedding"])
def test_excluding_one_role(excluded: str) -> None:
    """Without the head the weight is an embedding's; without the embedding nothing changes."""
    kind = language()
    loss = loss_on(kind.data())
    head = layer_oracles.linear_factors(kind.model, "head", loss, N)
    A, G, _ = layer_oracles.embedding_factors(kind.model, "embedding", loss, N)
    before, after = stepped_matrices(kind, watched(kind.model, exclude=excluded), loss)
    if excluded == "embedding":
        expected = oracles.eigen_step(*head, before, GAMMA)
    else:
        expected = layer_oracles.embedding_step(A, G, before.T, GAMMA).T
    assert_close(after, expected)


# --- layers of one kind ----------------------------------------------------------------------


class Pairs(nn.Module):
    """Two modules with one weight, for each kind of layer that may be shared."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.look, self.look_again = (nn.Embedding(VOCABULARY, WIDTH) for _ in range(2))
        self.mix, self.mix_again = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(2))
        self.norm, self.norm_again = (nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.look_again.weight = self.look.weight
        self.mix_again.weight, self.mix_again.bias = self.mix.weight, self.mix.bias
        self.norm_again.weight, self.norm_again.bias = self.norm.weight, self.norm.bias

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.look(tokens) + self.look_again((tokens + 1) % VOCABULARY).sin()
        z = self.mix_again(self.norm(self.mix(z)).tanh())
        return self.head(self.norm_again(z).tanh().mean(1))


class Single(Pairs):
    """The same with each module called twice."""

    def __init__(self, bias: bool) -> None:
        super().__init__(bias)
        del self.look_again, self.mix_again, self.norm_again

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.look(tokens) + self.look((tokens + 1) % VOCABULARY).sin()
        z = self.mix(self.norm(self.mix(z)).tanh())
        return self.head(self.norm(z).tanh().mean(1))


def pairs(make: type[Pairs], bias: bool = True) -> Kind:
    torch.manual_seed(0)
    return Kind(make(bias), tokens=VOCABULARY)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("make", [Pairs, Single])
def test_uses_of_a_linear_layer_are_further_positions(make: Any, bias: bool, sharing: Any) -> None:
    kind = pairs(make, bias)
    loss = loss_on(kind.data())
    names = ["mix", "mix_again"] if make is Pairs else ["mix"]
    A, G = layer_oracles.linear_factors(kind.model, names, loss, N, sharing)
    optimizer = watched(kind.model, sharing=sharing)
    optimizer.zero_grad()
    loss(kind.model).backward()
    before = oracles.matrix_gradient(kind.model.mix).clone()
    optimizer.step()
    assert_close(oracles.matrix_gradient(kind.model.mix), oracles.eigen_step(A, G, before, GAMMA))


@pytest.mark.parametrize("solver", SOLVERS)
def test_two_modules_with_one_weight_are_one_module_called_twice(solver: Any) -> None:
    both, single = pairs(Pairs), pairs(Single)
    single.model.load_state_dict(both.model.state_dict(), strict=False)
    optimizers = [watched(kind.model, solver=solver) for kind in (both, single)]
    steps = [
        stepped(kind.model, optimizer, loss_on(kind.data()))
        for kind, optimizer in zip((both, single), optimizers, strict=True)
    ]
    assert_close(steps[0], steps[1])
    assert left_out(optimizers[0]) == {}
    _, after = steps[0]
    u = layer_oracles.norm_sample_gradients(single.model, "norm", loss_on(single.data()), N)
    norm = layer_oracles.norm_step(layer_oracles.norm_fisher(u, N), u.sum(0), GAMMA)
    assert_close(torch.stack([after["norm.weight"], after["norm.bias"]], dim=-1), norm)


# --- a huge head alone -----------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_huge_head_without_ties(solver: Any) -> None:
    torch.manual_seed(0)
    kind = Kind(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 40)), ((WIDTH,),))
    loss = loss_on(kind.data())
    A, G = layer_oracles.linear_factors(kind.model, "1", loss, N)
    optimizer = watched(kind.model, solver=solver, max_dim=16)
    optimizer.zero_grad()
    loss(kind.model).backward()
    before = oracles.matrix_gradient(kind.model[1]).clone()
    optimizer.step()
    expected = SOLVERS[solver](A, G.diag().diag(), before, GAMMA)
    assert_close(oracles.matrix_gradient(kind.model[1]), expected)
    assert "G diag" in optimizer.summary()
