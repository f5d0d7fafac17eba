"""What a hook sees when others have hooks too, and what it keeps, for how long."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac.layers import find_layers, registry
from tests.training import (
    applied,
    assert_close,
    batch,
    counts,
    factors,
    frozen_kfac,
    gradients,
    kfac,
    layers,
)

pytestmark = pytest.mark.usefixtures("double_precision")


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(4, 2, **options)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0]).mean(1)


def sequences() -> tuple[Tensor, Tensor]:
    return batch(shape=(3, 4))


# --- hooks of others -------------------------------------------------------------------------


def test_a_hook_that_changes_the_output_of_attention_keeps_its_effect() -> None:
    results = []
    for observed in (False, True):
        model = Attention(batch_first=True)
        model.attention.register_forward_hook(lambda m, args, out: (2 * out[0], out[1]))
        if observed:
            frozen_kfac(model)
        x, y = sequences()
        F.cross_entropy(model(x), y).backward()
        results.append(gradients(model))
    assert_close(*results)


def test_output_gradients_are_those_of_the_layer_and_not_of_a_hook_behind_it() -> None:
    results = []
    for by_hook in (False, True):
        torch.manual_seed(0)
        scale = nn.Identity()
        model = nn.Sequential(nn.Linear(4, 3), scale)
        target = model[0] if by_hook else scale
        target.register_forward_hook(lambda m, args, out: 10 * out)
        optimizer = frozen_kfac(model)
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        optimizer.step()
        results.append(factors(optimizer, "G"))
    assert_close(*results)


# --- one module, several layers --------------------------------------------------------------


def test_a_projection_that_joins_later_is_observed_beside_the_others() -> None:
    def run(later: bool) -> dict[str, Tensor]:
        model = Attention(batch_first=True)
        out = list(model.attention.out_proj.parameters())
        first = [p for p in model.parameters() if all(p is not q for q in out)]
        optimizer = kfac(model, SGD(first if later else model.parameters(), lr=0.0))
        if later:
            optimizer.add_param_group({"params": out})
        _, after = applied(model, optimizer, sequences())
        assert optimizer.stats()["without_solution"] == []
        return after

    assert_close(run(later=True), run(later=False))


def test_an_output_projection_of_two_attentions_counts_both() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.MultiheadAttention(4, 2, batch_first=True)
            self.b = nn.MultiheadAttention(4, 2, batch_first=True)
            self.b.out_proj = self.a.out_proj

        def forward(self, x: Tensor) -> Tensor:
            return self.b(*[self.a(x, x, x)[0]] * 3)[0].mean(1)[:, :3]

    model = Shared()
    optimizer = frozen_kfac(model)
    applied(model, optimizer, sequences())
    assert counts(optimizer, "A")["a.out_proj"] == 2 * 8 * 3


# --- weights that are shared between modules of another geometry ------------------------------


@pytest.mark.filterwarnings("ignore:another K-FAC optimizer watches")  # for comparison
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: [nn.Conv1d(2, 2, 3, padding=d, dilation=d) for d in (1, 2)], "dilation"),
        (lambda: [nn.GroupNorm(g, 2) for g in (1, 2)], "groups"),
        (lambda: [nn.LayerNorm(4, eps=e) for e in (1e-5, 1e-1)], "eps"),
    ],
    ids=["dilation", "groups", "eps"],
)
def test_modules_that_share_a_weight_must_have_the_same_rows(make: Any, name: str) -> None:
    first, second = make()
    second.weight, second.bias = first.weight, first.bias
    model = nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(8, 3))
    optimizer = frozen_kfac(model)
    applied(model, optimizer, batch(shape=(2, 4)))
    assert "also used as 2.weight, which is not observed" in optimizer.summary()
    alone = factors(frozen_step(first, model), "A" if name == "dilation" else "F")["0"]
    assert_close(factors(optimizer, "A" if name == "dilation" else "F")["0"], alone)


def frozen_step(first: nn.Module, model: nn.Sequential) -> kronfac.KFAC:
    """The factors of the first module alone, in the same model."""
    optimizer = frozen_kfac(model, exclude="2")
    applied(model, optimizer, batch(shape=(2, 4)))
    return optimizer


# --- layout, empty batches, ids --------------------------------------------------------------


def test_the_output_of_attention_has_the_layout_that_torch_gives_it() -> None:
    for batch_first in (False, True):
        plain, watched = Attention(batch_first=batch_first), Attention(batch_first=batch_first)
        frozen_kfac(watched)
        x = torch.randn(3, 5, 4)
        strides = [m.attention(x, x, x)[0].stride() for m in (plain, watched)]
        assert strides[0] == strides[1]


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.LazyLinear])
def test_a_layer_that_gets_no_samples_adds_nothing(kind: Any) -> None:
    model = nn.Sequential(kind(4))
    model.eval()(torch.zeros(1, 4))
    model.train()
    optimizer = frozen_kfac(model)
    (model(torch.zeros(0, 4)).sum() + 0 * sum(p.sum() for p in model.parameters())).backward()
    optimizer.step()
    assert all(bool(torch.isfinite(grad).all()) for grad in gradients(model).values())


def test_an_embedding_that_gets_no_samples_adds_nothing() -> None:
    model = nn.Sequential(nn.Embedding(5, 4))
    optimizer = frozen_kfac(model)
    model(torch.zeros(0, 3, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert float(layers(optimizer)["0"].running["A"].count or 0) == 0


def test_ids_in_one_dimension_are_samples_even_beside_the_model() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "linear": nn.Linear(4, 3)})
    optimizer = frozen_kfac(model)
    ids = torch.tensor([0, 1, 2, 3, 4, 0])
    F.cross_entropy(model["linear"](model["embedding"](ids)), ids % 3).backward()
    optimizer.step()
    assert set(counts(optimizer, "G").values()) == {6.0}


# --- norms -----------------------------------------------------------------------------------


def test_one_odd_batch_does_not_discard_what_a_norm_knows() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.head, self.flat = nn.LayerNorm(4), nn.Linear(4, 3), False

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x.flatten(0, 1)).view_as(x) if self.flat else self.norm(x)
            return self.head(h).mean(1)

    model = Flat()
    optimizer = frozen_kfac(model, decay=1.0)
    for flat in (False, True, False):
        model.flat = flat
        applied(model, optimizer, sequences())
    assert float(layers(optimizer)["norm"].running["F"].count) == 3 * 8
    assert "each counts as one" in optimizer.summary()


class Overwriting(nn.Module):
    """Overwrites the input of its norm, which autograd allows if the norm has worked on a copy."""

    def __init__(self, overwrites: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 4).bfloat16(), nn.RMSNorm(4).bfloat16()
        self.overwrites = overwrites

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.bfloat16())
        y = self.norm(h)
        z = h.add_(y) if self.overwrites else h + y
        return z.double()[:, :3]


def test_an_input_that_is_overwritten_in_half_precision() -> None:
    results = []
    for overwrites in (False, True):
        model = Overwriting(overwrites)
        optimizer = frozen_kfac(model)
        applied(model, optimizer, batch())
        results.append(factors(optimizer, "F"))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)


def test_inputs_are_kept_no_longer_than_until_the_backward() -> None:
    class Remember(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            kept.append(weakref.ref(y.untyped_storage()))
            return y

    kept: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4), Remember(), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = frozen_kfac(model)
    loss = F.cross_entropy(model(batch()[0]), batch()[1])
    loss.backward()
    gc.collect()
    assert kept[0]() is None  # although the loss, and with it the graph's hooks, is alive
    optimizer.step()
    assert loss.item() > 0


# --- modules that only look like norms -------------------------------------------------------


class ForeignNorm(nn.Module):
    """An RMS norm in a dimension of choice, or a layer norm without a bias."""

    def __init__(self, dim: int, centred: bool, fill: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), fill))
        self.eps, self.dim, self.centred = 1e-6, dim, centred
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x - x.mean(self.dim, keepdim=True) if self.centred else x
        scale = torch.rsqrt(x.square().mean(self.dim, keepdim=True) + self.eps)
        weight = self.weight if self.dim == -1 else self.weight[:, None]
        return x * scale * weight


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (ForeignNorm(-1, centred=False, fill=1.0), True),
        (ForeignNorm(-1, centred=False, fill=0.0), True),
        (ForeignNorm(-1, centred=True, fill=0.0), False),
        (ForeignNorm(-2, centred=False, fill=1.0), False),
    ],
    ids=["rms", "rms-of-zeros", "layer-norm-of-zeros", "channels-first"],
)
def test_a_foreign_norm_is_known_by_what_it_does(module: ForeignNorm, known: bool) -> None:
    assert isinstance(find_layers("norm", module), list) == known
    assert float(module.calls) == 0  # trying it leaves no trace


# --- layers of one's own ---------------------------------------------------------------------


@pytest.fixture
def registered() -> Any:
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


@pytest.mark.usefixtures("registered")
def test_a_layer_without_a_weight_is_refused_in_a_sentence() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.ones(3, 4))

    kronfac.register_layer(Odd, kronfac.layers.LinearLayer)
    with pytest.raises(TypeError, match=r"layer '0': 'weight' of Odd must be a torch\.nn\.Param"):
        frozen_kfac(nn.Sequential(Odd(), nn.Linear(4, 3)))


@pytest.mark.usefixtures("registered")
def test_an_output_that_is_no_tensor_is_refused_in_a_sentence() -> None:
    class Composite(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Composite(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(x)[0]

    kronfac.register_layer(Composite, kronfac.layers.LinearLayer)
    model = Model()
    optimizer = frozen_kfac(model)
    with pytest.raises(TypeError, match=r"layer 'pair' returned a tuple, not a tensor"):
        model(batch()[0])
    assert optimizer.stats()["steps"] == 0
