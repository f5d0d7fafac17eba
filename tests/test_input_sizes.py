"""Steps are shorter where inputs are large."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronfac


def steps_of(scale: float, **options: Any) -> tuple[Tensor, Tensor]:
    """The first step of a linear layer, and its inputs: in front of it stands their scale."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5).double()
    x, y = torch.randn(64, 6).double(), torch.randint(5, (64,))
    options = {"momentum": 0.9, "loss_average": "batch", **options}
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)
    before, inputs = _matrix(model), scale * x / x.square().mean().sqrt()
    nn.functional.cross_entropy(model(inputs), y).backward()
    optimizer.step()
    return before - _matrix(model), inputs


def _matrix(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach()


@pytest.mark.parametrize("scale", [0.1, 1.0, 1.5, 10.0])
@pytest.mark.parametrize("solver", ["eigen", "separable"])
def test_length_is_divided_by_the_root_mean_square_of_inputs(scale: float, solver: str) -> None:
    found, inputs = steps_of(scale, solver=solver)
    with_ones = torch.cat([inputs, torch.ones(64, 1).double()], dim=1)
    share = with_ones.square().mean().sqrt().clamp(1, 2)  # the bias is a column of its own
    assert float(found.norm()) == pytest.approx(2.25 * 5**0.5 / float(share), rel=1e-6)


@pytest.mark.parametrize("scale", [0.5, 8.0])
@pytest.mark.parametrize("options", [{"rescale": "orthogonal"}, {"solver": "cholesky"}])
def test_nothing_is_divided_otherwise(scale: float, options: dict[str, Any]) -> None:
    """Muon's length is that whatever inputs are; a damped inverse does not tell how large they are."""
    found, _ = steps_of(scale, **options)
    length = 1.0 if "rescale" in options else 2.25
    assert float(found.norm()) == pytest.approx(length * 5**0.5, rel=1e-6)


def test_embeddings_and_norms_have_no_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 7))
    model[0].weight.data.mul_(100)
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), momentum=0.9)
    tokens = torch.randint(7, (16,))
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
    known = {state.layer.name: float(state.buffers["inputs"]) for state in optimizer.layers}
    assert known["0"] == known["1"] == 0
    assert known["2"] == pytest.approx(1.0, abs=1e-3)


def _trained(state: dict[str, Any] | None, kind: type = kronfac.KFAC, **options: Any) -> Any:
    """With inputs of size 8, after some steps from a state."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Linear(12, 3)
    ).double()
    options = {"momentum": 0.9, "factor_every": 1, "refresh_every": 1, **options}
    optimizer = kind(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
    if state is not None:
        optimizer.load_state_dict(state)
    for _ in range(3):
        x, y = 8 * torch.randn(64, 6).double(), torch.randint(3, (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer


@pytest.mark.filterwarnings("ignore:.*another solver")
def test_what_a_checkpoint_tells_holds_only_where_somebody_looks() -> None:
    before = _trained(None)
    first = before.layers[0]
    assert float(first.buffers["inputs"]) == pytest.approx(8, rel=0.2)
    assert float(first.buffers["pace"][1]) > 0
    after = _trained(before.state_dict(), solver="cholesky").layers[0]
    assert float(after.buffers["inputs"]) == 0
    after = _trained(before.state_dict(), rescale="orthogonal").layers[0]
    assert float(after.buffers["pace"][1]) == 0


def test_weighted_factors_do_not_tell() -> None:
    assert float(_trained(None, kronfac.TKFAC).layers[0].buffers["inputs"]) == 0
    found = _trained(None, kronfac.EKFAC).layers[0].buffers["inputs"]
    assert float(found) == pytest.approx(8, rel=0.2)
