"""The code in the documentation runs, and does what the text around it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kronfac
from kronfac.layers import registry
from tests.training import applied, batch, frozen_kfac, layers

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def registered() -> Iterator[dict[type[nn.Module], Any]]:
    """What a test registers is forgotten after it."""
    before = dict(registry._REGISTERED)
    yield registry._REGISTERED
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


def code_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


@pytest.fixture
def example(registered: Any) -> dict[str, Any]:
    """Names that the example of a layer of one's own defines; its last block checks itself."""
    names: dict[str, Any] = {}
    for block in code_of("layers.md"):
        exec(block, names)
    return names


@pytest.mark.usefixtures("double_precision")
def test_a_layer_of_ones_own_is_preconditioned_like_the_linear_layer_it_stands_for(
    example: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    scaled = example["ScaledLinear"](4, 3)
    model = nn.Sequential(scaled)
    _, after = applied(model, frozen_kfac(model), batch())
    # The same function of s·x, as a plain layer.
    plain = nn.Sequential(nn.Linear(4, 3, bias=False))
    plain[0].weight.data.copy_(scaled.weight.data)
    x, y = batch()
    _, expected = applied(plain, frozen_kfac(plain), (x * scaled.scale, y))
    torch.testing.assert_close(after["0.weight"], expected["0.weight"], rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("double_precision")
def test_a_layer_of_ones_own_under_compile(example: dict[str, Any]) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(example["ScaledLinear"](4, 3))
        optimizer = frozen_kfac(model)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        F.cross_entropy(run(batch()[0]), batch()[1]).backward()
        optimizer.step()
        results.append(model[0].weight.grad.clone())
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
    torch._dynamo.reset()


def test_the_type_itself_is_meant(example: dict[str, Any]) -> None:
    class Other(example["ScaledLinear"]):  # type: ignore[misc]
        pass

    summary = frozen_kfac(nn.Sequential(Other(4, 3), nn.Linear(3, 3))).summary()
    assert "Other is not a known layer type" in summary


def test_a_registered_type_comes_before_ours(registered: Any) -> None:
    class Halved(kronfac.layers.LinearLayer):
        """Stands for nothing: it only has to be found."""

    kronfac.register_layer(nn.Linear, Halved)
    optimizer = frozen_kfac(nn.Sequential(nn.Linear(4, 3)))
    assert isinstance(layers(optimizer)["0"].layer, Halved)


def test_what_is_registered_must_be_a_module_and_a_layer(registered: Any) -> None:
    with pytest.raises(TypeError, match="module_type=3 must be a subclass of torch"):
        kronfac.register_layer(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a subclass of kronfac\.layers\.Layer"):
        kronfac.register_layer(nn.Linear, nn.Linear)  # type: ignore[arg-type]


# --- a method of one's own --------------------------------------------------------------------


def test_a_method_of_ones_own_is_the_diagonal_of_k_fac(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": __name__}
    for block in code_of("methods.md"):
        exec(block, names)
    assert "diagonal" in capsys.readouterr().out
    steps = []
    for make, own in ((kronfac.Diagonal, {}), (kronfac.KFAC, {"max_dim": 1, "solver": "eigen"})):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        options = {"damping": 0.1, "factor_every": 1, "refresh_every": 1, "rescale": None, **own}
        optimizer = make(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*steps)


def test_a_method_of_ones_own_stays_below_a_hundred_lines() -> None:
    assert len(code_of("methods.md")[0].splitlines()) < 70


def test_pages_link_to_pages_that_exist() -> None:
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
