"""What holds for every kind of layer: micro-batches, masks, resuming, copies, checkpoints, precision."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import layer_oracles, oracles
from tests.attention_oracle import (
    PROJECTIONS,
    ReferenceAttention,
    attention_gradients,
    with_separate_weights,
)
from tests.layers.kinds import (
    GAMMA,
    LENGTH,
    VOCABULARY,
    Kind,
    N,
    Tagger,
    attending,
    embedded,
    loss_on,
    normed,
    parts_of,
    transposed,
)
from tests.layers.watching import left_out, statistics, stepped, watched
from tests.training import (
    CLASSES,
    assert_close,
    assert_same,
    kfac,
    parameters,
    saved_and_loaded,
    snapshot,
)

pytestmark = pytest.mark.usefixtures("double_precision")


def separate() -> Kind:
    kind = attending("self")
    model = layer_oracles.replaced(kind.model, "attention", with_separate_weights)
    return Kind(model, kind.shapes)


KINDS: dict[str, Callable[[], Kind]] = {
    "embedding": lambda: embedded(uses=2, padding_idx=2),
    "layer-norm": lambda: normed("layer-sequence", uses=2),
    "group-norm": lambda: normed("group"),
    "instance-norm": lambda: normed("instance2d"),
    "rms-norm": lambda: normed("rms"),
    "hugging-face-rms-norm": lambda: normed("hugging-face-rms"),
    "batch-norm": lambda: normed("batch2d"),
    "attention": lambda: attending("cross"),
    "attention-sequence-first": lambda: attending("sequence-first-no-weights"),
    "attention-separate": separate,
    "conv1d": lambda: transposed(uses=2),
}
EVERY = pytest.mark.parametrize("name", KINDS)
NOT_MIXING = pytest.mark.parametrize("name", [name for name in KINDS if name != "batch-norm"])


def train(kind: Kind, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        stepped(kind.model, optimizer, loss_on(kind.data(number)))


@EVERY
def test_nothing_is_left_out(name: str) -> None:
    kind = KINDS[name]()
    optimizer = watched(kind.model)
    before, after = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert left_out(optimizer) == {}
    assert optimizer.stats()["without_solution"] == []
    assert not any(torch.allclose(after[n], before[n], atol=0) for n in before)


# --- several passes in one step --------------------------------------------------------------


@NOT_MIXING
@pytest.mark.parametrize("count", [2, 3])
def test_micro_batches_are_one_batch(name: str, count: int) -> None:
    kind, whole = KINDS[name](), KINDS[name]()
    data = kind.data()
    losses = [loss_on(part, over=count) for part in parts_of(data, count)]
    steps = stepped(kind.model, watched(kind.model), *losses)
    assert_close(steps, stepped(whole.model, watched(whole.model), loss_on(data)))


@NOT_MIXING
def test_uneven_micro_batches_with_one_divisor_are_one_batch(name: str) -> None:
    kind, whole = KINDS[name](), KINDS[name]()
    data = kind.data()
    losses = [
        loss_on(tuple(tensor[piece] for tensor in data), over=N / size)
        for piece, size in ((slice(0, 1), 1), (slice(1, N), N - 1))
    ]
    steps = stepped(kind.model, watched(kind.model), *losses)
    assert_close(steps, stepped(whole.model, watched(whole.model), loss_on(data)))


@NOT_MIXING
def test_two_forwards_before_one_backward_are_one_batch(name: str) -> None:
    kind, whole = KINDS[name](), KINDS[name]()
    data = kind.data()
    halves = [loss_on(part, over=2) for part in parts_of(data, 2)]
    steps = stepped(
        kind.model, watched(kind.model), lambda model: halves[0](model) + halves[1](model)
    )
    assert_close(steps, stepped(whole.model, watched(whole.model), loss_on(data)))


# --- a loss per token, some of them masked ---------------------------------------------------

IGNORED = -100


def tagging() -> tuple[nn.Module, Any, int]:
    """A model with a loss term per token, its loss, and the number of terms that count."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (N, LENGTH))
    targets = torch.randint(CLASSES, (N, LENGTH))
    targets[0, 1] = targets[2] = IGNORED
    targets[4, 2] = IGNORED

    def loss(model: nn.Module) -> Tensor:
        outputs = model(tokens).flatten(0, 1)
        return F.cross_entropy(outputs, targets.flatten(), ignore_index=IGNORED)

    return Tagger(), loss, int((targets != IGNORED).sum())


def test_masked_terms_in_an_embedding() -> None:
    model, loss, terms = tagging()
    A, G, _ = layer_oracles.embedding_factors(model, "embedding", loss, terms)
    before, after = stepped(model, watched(model, loss_average="token"), loss)
    expected = layer_oracles.embedding_step(A, G, before["embedding.weight"].T, GAMMA)
    assert_close(after["embedding.weight"], expected.T)


def test_masked_terms_in_a_norm_layer() -> None:
    model, loss, terms = tagging()
    u = layer_oracles.norm_sample_gradients(model, "norm", loss, N)
    expected = layer_oracles.norm_step(layer_oracles.norm_fisher(u, terms), u.sum(0), GAMMA)
    _, after = stepped(model, watched(model, loss_average="token"), loss)
    assert_close(torch.stack([after["norm.weight"], after["norm.bias"]], dim=-1), expected)


def test_masked_terms_in_attention() -> None:
    model, loss, terms = tagging()
    reference = layer_oracles.replaced(model, "attention", ReferenceAttention)
    expected = {
        name: layer_oracles.linear_step(reference, f"attention.{name}", loss, GAMMA, terms)
        for name in PROJECTIONS
    }
    stepped(model, watched(model, loss_average="token"), loss)
    assert_close(attention_gradients(model.attention), expected)


def test_masked_terms_in_the_head() -> None:
    model, loss, terms = tagging()
    expected = layer_oracles.linear_step(model, "head", loss, GAMMA, terms)
    stepped(model, watched(model, loss_average="token"), loss)
    assert_close(oracles.matrix_gradient(model.head), expected)


# --- resuming and copies ---------------------------------------------------------------------

OPTIONS = [{}, {"solver": "cholesky"}, {"momentum": 0.9, "rescale": "graft"}]


@EVERY
@pytest.mark.parametrize("options", OPTIONS, ids=["eigen", "cholesky", "momentum"])
@pytest.mark.parametrize("interval", [1, 3])
def test_a_resumed_run_is_the_run_that_went_on(name: str, options: Any, interval: int) -> None:
    options = options | {"factor_every": interval, "refresh_every": interval}
    kind = KINDS[name]()
    optimizer = kfac(kind.model, **options)
    train(kind, optimizer, range(2))
    weights, state = copy.deepcopy(kind.model.state_dict()), snapshot(optimizer)
    train(kind, optimizer, range(2, 5))
    resumed = KINDS[name]()
    resumed.model.load_state_dict(saved_and_loaded(weights))
    other = kfac(resumed.model, **options)
    other.load_state_dict(saved_and_loaded(state))
    train(resumed, other, range(2, 5))
    assert_same(parameters(resumed.model), parameters(kind.model))
    assert_same(statistics(other), statistics(optimizer))


@EVERY
def test_a_run_without_its_state_is_another_run(name: str) -> None:
    kind = KINDS[name]()
    optimizer = kfac(kind.model)
    train(kind, optimizer, range(2))
    anew = Kind(copy.deepcopy(kind.model), kind.shapes, kind.tokens)
    train(kind, optimizer, range(2, 3))
    train(anew, kfac(anew.model), range(2, 3))
    left, right = parameters(kind.model), parameters(anew.model)
    assert not any(torch.equal(left[n], right[n]) for n in left)


@EVERY
def test_a_copied_run_goes_on_alike_and_apart(name: str) -> None:
    kind = KINDS[name]()
    optimizer = kfac(kind.model)
    train(kind, optimizer, range(2))
    model, copied = copy.deepcopy((kind.model, optimizer))
    held = statistics(copied)
    train(kind, optimizer, range(2, 4))
    assert_same(statistics(copied), held)
    train(Kind(model, kind.shapes, kind.tokens), copied, range(2, 4))
    assert_same(parameters(model), parameters(kind.model))


@EVERY
def test_a_copied_model_observes_nothing(name: str) -> None:
    kind, alone = KINDS[name](), KINDS[name]()
    optimizer = watched(kind.model)
    teacher = copy.deepcopy(kind.model)
    loss_on(kind.data(7))(teacher).backward()
    steps = stepped(kind.model, optimizer, loss_on(kind.data()))
    assert_same(steps, stepped(alone.model, watched(alone.model), loss_on(kind.data())))


# --- activation checkpointing ----------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_change_nothing(name: str, reentrant: bool) -> None:
    kind, plain = KINDS[name](), KINDS[name]()
    kind.model.reentrant = reentrant
    optimizers = [watched(one.model, decay=0.5) for one in (kind, plain)]
    for number in range(2):
        steps, expected = (
            stepped(one.model, optimizer, loss_on(one.data(number)))
            for one, optimizer in zip((kind, plain), optimizers, strict=True)
        )
        assert_close(steps, expected)


# --- precision -------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
def test_half_precision_parameters_keep_single_precision_statistics(name: str, solver: Any) -> None:
    torch.set_default_dtype(torch.float32)  # the fixture restores it
    kind = KINDS[name]()
    kind.model.bfloat16()
    *inputs, labels = kind.data()
    inputs = [x.bfloat16() if x.is_floating_point() else x for x in inputs]
    optimizer = watched(kind.model, solver=solver)
    _, after = stepped(kind.model, optimizer, loss_on((*inputs, labels)))
    held = [t for t in statistics(optimizer).values() if t.is_floating_point()]
    assert held
    assert all(t.dtype in (torch.float32, torch.float64) for t in held)  # counts are doubles
    assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in after.values())


@EVERY
def test_single_precision_follows_double_precision(name: str) -> None:
    double = KINDS[name]()
    data = double.data()
    _, expected = stepped(double.model, watched(double.model), loss_on(data))
    single = Kind(copy.deepcopy(double.model).float(), double.shapes, double.tokens)
    rounded = tuple(x.float() if x.is_floating_point() else x for x in data)
    _, found = stepped(single.model, watched(single.model), loss_on(rounded))
    for parameter, step in expected.items():
        scale = float(step.abs().max())
        torch.testing.assert_close(found[parameter].double(), step, rtol=1e-3, atol=1e-3 * scale)
