"""One step of the optimizer, end to end and in float64, against formulas that share no code with it.

With `SGD(lr=1)`, no rescaling and fresh statistics, the change of a layer's parameters is minus
its preconditioned gradient. What is expected comes from `oracles`: rows cut out one by one, dense
Kronecker products, dense Fisher and GGN blocks by autograd.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from kronfac import KFAC
from kronfac.capture.fisher import sampled_gradient
from tests import oracles
from tests.feature_order import factor_in_library_order
from tests.layers.cases import CASES, DOUBLE, normal

GAMMA = 0.05
C = 3  # outputs of a loss term
FISHERS = ["empirical", "exact", "forward"]
LIKELIHOODS = ["categorical", "bernoulli", "gaussian"]
SHARINGS = ["expand", "reduce"]
STEPS = {
    "eigen": oracles.eigen_step,
    "cholesky": oracles.cholesky_step,
    "newton-schulz": oracles.cholesky_step,
}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

Loss = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    scale = float(expected.norm())
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8 * scale)


# --- models and losses -----------------------------------------------------------------------


def matrix_layers(model: nn.Module) -> list[Any]:
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return [module for module in model.modules() if isinstance(module, kinds)]


def with_head(module: nn.Module, x: Tensor) -> nn.Module:
    """The module, a nonlinearity, and a linear layer to C outputs."""
    width = module(x).flatten(1).shape[1]
    return nn.Sequential(module, nn.Tanh(), nn.Flatten(), nn.Linear(width, C, **DOUBLE))


def small_model(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "linear":
        return with_head(nn.Linear(4, 3, **DOUBLE), normal(1, 4)), normal(5, 4)
    if kind == "sequence":
        module = nn.Linear(3, 2, bias=False, **DOUBLE)
        return with_head(module, normal(1, 4, 3)), normal(5, 4, 3)
    groups = 2 if kind == "grouped" else 1
    module = nn.Conv2d(2, 4, 3, padding=1, groups=groups, **DOUBLE)
    return with_head(module, normal(1, 2, 3, 3)), normal(5, 2, 3, 3)


def loss_terms(outputs: Tensor, likelihood: str) -> Tensor:
    """Negative log-likelihoods of fixed targets: `[N, ..., C] -> [N, ...]`."""
    if likelihood == "categorical":
        targets = torch.arange(outputs[..., 0].numel()).reshape(outputs.shape[:-1]) % C
        return -outputs.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    if likelihood == "bernoulli":
        targets = (torch.arange(outputs.numel()).reshape(outputs.shape) % 2).to(outputs)
        losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return losses.sum(-1)
    return 0.5 * (outputs - 1).square().sum(-1)


def averaged(likelihood: str, divisor: float | None) -> Loss:
    return lambda outputs: loss_terms(outputs, likelihood).sum() / (divisor or 1.0)


# --- what the optimizer does -----------------------------------------------------------------


def make_optimizer(model: nn.Module, lr: float = 1.0, **options: Any) -> KFAC:
    settings: dict[str, Any] = {
        "damping": GAMMA,
        "solver": "eigen",
        "rescale": None,
        "factor_every": 1,
        "refresh_every": 1,
        "decay": 0.0,
    }
    return KFAC(model, SGD(model.parameters(), lr=lr), **(settings | options))


def backward(
    optimizer: KFAC, x: Tensor, loss: Loss, likelihood: str = "categorical", **observing: Any
) -> None:
    """One forward and backward pass, with the call of `observe` that some Fishers need."""
    outputs = optimizer.model(x)
    if optimizer._preconditioner.options.fisher in ("mc", "exact"):
        optimizer.observe(outputs, likelihood, **observing)
    loss(outputs).backward()


def matrix(layer: Any) -> Tensor:
    """The layer's parameters as V, in the reference's order."""
    parts = [layer.weight.detach().flatten(1)]
    if layer.bias is not None and layer.bias.requires_grad:
        parts.append(layer.bias.detach()[:, None])
    joined = torch.cat(parts, dim=1)
    groups = getattr(layer, "groups", 1)
    return joined if groups == 1 else joined.unflatten(0, (groups, -1))


def step_of(optimizer: KFAC) -> list[Tensor]:
    """Minus the change of each layer's matrix."""
    layers = matrix_layers(optimizer.model)
    before = [matrix(layer).clone() for layer in layers]
    optimizer.step()
    return [old - matrix(layer) for old, layer in zip(before, layers, strict=True)]


def running_factors(optimizer: KFAC, layer: Any) -> dict[str, Tensor]:
    running = optimizer._preconditioner.layers[layer.weight, ""].running
    means = {name: one.mean() for name, one in running.items()}
    assert all(mean is not None for mean in means.values())
    return means  # type: ignore[return-value]


def assert_factors(optimizer: KFAC, layer: Any, A: Tensor, G: Tensor | None) -> None:
    means = running_factors(optimizer, layer)
    assert_equal(means["A"], factor_in_library_order(layer, A))
    if G is None:
        assert "G" not in means
    else:
        assert_equal(means["G"], G)


# --- what is expected ------------------------------------------------------------------------


def reference_rows(
    model: nn.Module, modules: Sequence[nn.Module], x: Tensor, send: Callable[..., list[Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Rows of all uses of a weight, side by side: one pair for each gradient that is sent back."""
    by_use = []
    for module in modules:
        outputs, calls = oracles.run_layer(model, module, x)
        for call in calls:
            gradients = send(outputs, call.z)
            by_use.append([oracles.layer_rows(module, call.x, g) for g in gradients])
    return [
        tuple(torch.cat(side, dim=-2) for side in zip(*uses, strict=True))  # type: ignore[misc]
        for uses in zip(*by_use, strict=True)
    ]


def reference_factors(
    model: nn.Module,
    layer: nn.Module | Sequence[nn.Module],
    x: Tensor,
    loss: Loss,
    *,
    fisher: str = "empirical",
    sharing: Any = "expand",
    average: Any = "batch",
    likelihood: Any = "categorical",
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A and G of one weight; several modules that share it may be given."""
    modules = [layer] if isinstance(layer, nn.Module) else layer
    average = len(x) if average == "batch" else average

    def from_loss(outputs: Tensor, z: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss(outputs), z, retain_graph=True))

    def from_model(outputs: Tensor, z: Tensor) -> list[Tensor]:
        return list(oracles.type2_output_gradients(outputs, z, likelihood, mask))

    if fisher != "exact":
        ((a, g),) = reference_rows(model, modules, x, from_loss)
        A, G = oracles.kfac_factors(a, g, sharing, average)
        return A, G if fisher == "empirical" else None
    pairs = reference_rows(model, modules, x, from_model)
    scatter = [oracles.kfac_factors(a, g, sharing, None) for a, g in pairs]
    return scatter[0][0], torch.stack([G for _, G in scatter]).sum(0) / (average or 1.0)


def loss_gradient(model: nn.Module, layer: nn.Module, x: Tensor, loss: Loss) -> Tensor:
    model.zero_grad()
    loss(model(x)).backward()
    gradient = oracles.matrix_gradient(layer)
    model.zero_grad()
    return gradient


def reference_steps(
    model: nn.Module, x: Tensor, loss: Loss, *, solver: str = "eigen", **options: Any
) -> list[Tensor]:
    steps = []
    for layer in matrix_layers(model):
        A, G = reference_factors(model, layer, x, loss, **options)
        V = loss_gradient(model, layer, x, loss)
        steps.append(STEPS[solver](A, G, V, GAMMA))
    return steps


def assert_all_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_equal(one, other)


# --- one step --------------------------------------------------------------------------------

BATCHED = {n: m for n, m in CASES.items() if "unbatched" not in n and n != "linear-vector"}


@pytest.mark.parametrize("make", BATCHED.values(), ids=BATCHED.keys())
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("average", ["batch", None], ids=["mean", "sum"])
def test_every_layer(make: Any, sharing: Any, fisher: Any, average: Any) -> None:
    case = make()
    model, x = with_head(case.module, case.x), case.x
    loss = averaged("categorical", len(x) if average else None)
    options = {"fisher": fisher, "sharing": sharing}
    expected = reference_steps(model, x, loss, average=average, **options)
    optimizer = make_optimizer(model, loss_average=average, **options)
    backward(optimizer, x, loss)
    assert_all_equal(step_of(optimizer), expected)


@pytest.mark.parametrize("make", BATCHED.values(), ids=BATCHED.keys())
@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_layer_with_sampled_labels(make: Any, sharing: Any) -> None:
    case = make()
    model, x = with_head(case.module, case.x), case.x
    loss = averaged("categorical", len(x))
    expected = []
    for layer in matrix_layers(model):
        outputs, (call,) = oracles.run_layer(model, layer, x)
        generator = torch.Generator().manual_seed(3)
        sent = sampled_gradient(outputs.detach(), "categorical", generator)
        (gradient,) = torch.autograd.grad(outputs, call.z, sent)
        A, G = oracles.type2_factors(layer, call.x, gradient[None], sharing)
        expected.append(oracles.eigen_step(A, G, loss_gradient(model, layer, x, loss), GAMMA))
    optimizer = make_optimizer(model, fisher="mc", sharing=sharing)
    backward(optimizer, x, loss, generator=torch.Generator().manual_seed(3))
    assert_all_equal(step_of(optimizer), expected)


@pytest.mark.parametrize("kind", ["linear", "sequence", "conv", "grouped"])
@pytest.mark.parametrize("solver", STEPS)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("average", ["batch", None], ids=["mean", "sum"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_every_solver_and_loss(
    kind: str, solver: Any, fisher: Any, average: Any, likelihood: str
) -> None:
    model, x = small_model(kind)
    loss = averaged(likelihood, len(x) if average else None)
    expected = reference_steps(
        model, x, loss, solver=solver, fisher=fisher, average=average, likelihood=likelihood
    )
    optimizer = make_optimizer(model, solver=solver, fisher=fisher, loss_average=average)
    backward(optimizer, x, loss, likelihood)
    assert_all_equal(step_of(optimizer), expected)


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_factors_themselves(fisher: Any, sharing: Any) -> None:
    model, x = small_model("grouped")
    loss = averaged("categorical", len(x))
    optimizer = make_optimizer(model, fisher=fisher, sharing=sharing)
    expected = [
        reference_factors(model, layer, x, loss, fisher=fisher, sharing=sharing)
        for layer in matrix_layers(model)
    ]
    backward(optimizer, x, loss)
    optimizer.step()
    for layer, (A, G) in zip(matrix_layers(model), expected, strict=True):
        assert_factors(optimizer, layer, A, G)


@pytest.mark.parametrize("solver", STEPS)
def test_wide_sides_keep_their_diagonal(solver: Any) -> None:
    model, x = small_model("linear")
    loss = averaged("categorical", len(x))
    expected = []
    for layer in matrix_layers(model):
        A, G = reference_factors(model, layer, x, loss)
        V = loss_gradient(model, layer, x, loss)
        assert G is not None
        A, G = (m.diag().diag() if len(m) > 3 else m for m in (A, G))
        expected.append(STEPS[solver](A, G, V, GAMMA))
    optimizer = make_optimizer(model, solver=solver, max_dim=3)
    backward(optimizer, x, loss)
    assert_all_equal(step_of(optimizer), expected)


def test_single_precision_follows() -> None:
    model, x = small_model("conv")
    loss = averaged("categorical", len(x))
    expected = reference_steps(model, x, loss)
    optimizer = make_optimizer(model.float())
    backward(optimizer, x.float(), loss)
    for actual, step in zip(step_of(optimizer), expected, strict=True):
        torch.testing.assert_close(actual.double(), step, rtol=1e-3, atol=1e-4)


def test_other_parameters_take_the_plain_step() -> None:
    model = nn.Sequential(nn.PReLU(4, **DOUBLE), nn.Linear(4, C, **DOUBLE))
    x, loss = normal(5, 4), averaged("gaussian", 5)
    optimizer = make_optimizer(model)
    before = model[0].weight.detach().clone()
    backward(optimizer, x, loss)
    raw = model[0].weight.grad.clone()
    optimizer.step()
    assert_equal(before - model[0].weight.detach(), raw)


# --- sampled labels --------------------------------------------------------------------------


def sampled_G(samples: int, generator: torch.Generator, likelihood: str, sharing: Any) -> Tensor:
    torch.manual_seed(0)
    model, x = small_model("conv")
    optimizer = make_optimizer(model, fisher="mc", sharing=sharing, lr=0.0)
    loss = averaged(likelihood, len(x))
    backward(optimizer, x, loss, likelihood, samples=samples, generator=generator)
    optimizer.step()
    return running_factors(optimizer, model[0])["G"]


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_sampled_labels_approach_the_exact_fisher(likelihood: str, sharing: str) -> None:
    actual = sampled_G(1500, torch.Generator().manual_seed(1), likelihood, sharing)
    torch.manual_seed(0)
    model, x = small_model("conv")
    options = {"fisher": "exact", "likelihood": likelihood, "sharing": sharing}
    _, exact = reference_factors(model, model[0], x, averaged(likelihood, 5), **options)
    assert exact is not None
    assert (actual - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_several_draws_are_averaged(likelihood: str, sharing: str) -> None:
    together = sampled_G(4, torch.Generator().manual_seed(1), likelihood, sharing)
    generator = torch.Generator().manual_seed(1)
    alone = [sampled_G(1, generator, likelihood, sharing) for _ in range(4)]
    assert_equal(together, torch.stack(alone).mean(0))


def test_a_generator_decides_the_draws() -> None:
    first, again, other = (
        sampled_G(2, torch.Generator().manual_seed(seed), "categorical", "expand")
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_observing_leaves_no_trace_in_gradients() -> None:
    model, x = small_model("conv")
    optimizer = make_optimizer(model, fisher="mc")
    optimizer.observe(model(x), "categorical", samples=3)
    assert all(p.grad is None for p in model.parameters())


# --- masks and divisors ----------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
IGNORED = -100


def sequence_model() -> tuple[nn.Module, Tensor, Tensor]:
    """A loss term per position, inputs, and targets that are ignored where MASK is 0."""
    layers = [nn.Linear(4, 3, **DOUBLE), nn.Tanh(), nn.Linear(3, C, **DOUBLE)]
    targets = torch.where(MASK.bool(), torch.arange(MASK.numel()).reshape(MASK.shape) % C, IGNORED)
    return nn.Sequential(*layers), normal(5, 4, 4), targets


def masked_loss(targets: Tensor, divisor: float) -> Loss:
    def loss(outputs: Tensor) -> Tensor:
        flat, labels = outputs.flatten(0, -2), targets.flatten()
        terms = F.cross_entropy(flat, labels, ignore_index=IGNORED, reduction="sum")
        return terms / divisor

    return loss


DIVISORS = {"batch": 5.0, "token": float(MASK.sum()), None: 1.0, 7.0: 7.0}


@pytest.mark.parametrize("average", DIVISORS, ids=str)
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("how", ["mask", "bool-mask", "ignore_index"])
def test_masked_terms_in_the_exact_fisher(average: Any, sharing: Any, how: str) -> None:
    model, x, targets = sequence_model()
    loss = masked_loss(targets, DIVISORS[average])
    options = {"fisher": "exact", "sharing": sharing, "mask": MASK, "average": DIVISORS[average]}
    expected = reference_steps(model, x, loss, **options)
    optimizer = make_optimizer(model, fisher="exact", sharing=sharing, loss_average=average)
    observing: dict[str, Any] = {
        "mask": {"mask": MASK},
        "bool-mask": {"mask": MASK.bool()},
        "ignore_index": {"mask": targets, "ignore_index": IGNORED},
    }[how]
    backward(optimizer, x, loss, **observing)
    assert_all_equal(step_of(optimizer), expected)


@pytest.mark.parametrize("average", DIVISORS, ids=str)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_divisor_in_the_empirical_fisher(average: Any, sharing: Any) -> None:
    """`"token"` counts the unmasked terms by itself."""
    model, x, targets = sequence_model()
    loss = masked_loss(targets, DIVISORS[average])
    expected = reference_steps(model, x, loss, sharing=sharing, average=DIVISORS[average])
    optimizer = make_optimizer(model, sharing=sharing, loss_average=average)
    backward(optimizer, x, loss)
    assert_all_equal(step_of(optimizer), expected)


@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_masked_positions_send_nothing_back(fisher: Any) -> None:
    """A mask of zeros everywhere: G = 0, so that the eigen step is the gradient over γ."""
    model, x, targets = sequence_model()
    loss = masked_loss(targets, 5.0)
    expected = [loss_gradient(model, one, x, loss) / GAMMA for one in matrix_layers(model)]
    optimizer = make_optimizer(model, fisher=fisher)
    backward(optimizer, x, loss, mask=torch.zeros_like(MASK))
    assert_all_equal(step_of(optimizer), expected)


def test_tokens_are_the_ones_that_observe_was_told_of() -> None:
    """The loss goes back through a pass of its own, as with a curvature batch of its own."""
    model, x, targets = sequence_model()
    loss, tokens = masked_loss(targets, 5.0), float(MASK.sum())
    options = {"fisher": "exact", "mask": MASK, "average": tokens}
    A, G = reference_factors(model, model[0], x, loss, **options)
    optimizer = make_optimizer(model, fisher="exact", loss_average="token")
    optimizer.observe(model(x), "categorical", mask=MASK)
    with optimizer.no_capture():
        loss(model(x)).backward()
    optimizer.step()
    assert_factors(optimizer, model[0], A, G)


class FlattensPositions(nn.Module):
    """Sees `[N, 4, d]` and calls its layer with `[N·4/w, w, d]`, windows of w positions."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.layer = nn.Linear(4, 3, **DOUBLE)
        self.head = nn.Linear(3, C, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x.reshape(-1, self.window, 4)).tanh().reshape(len(x), 4, 3)
        return self.head(z.mean(1))


@pytest.mark.parametrize("window", [1, 2])
def test_samples_are_those_of_the_model_not_of_the_layer(window: int) -> None:
    model, x = FlattensPositions(window), normal(5, 4, 4)
    loss = averaged("categorical", 5)
    expected = reference_steps(model, x, loss, average=5)
    optimizer = make_optimizer(model)
    backward(optimizer, x, loss)
    assert_all_equal(step_of(optimizer), expected)


@pytest.mark.parametrize("window", [1, 2])
def test_reduce_falls_back_to_expand_where_rows_are_not_grouped_by_sample(window: int) -> None:
    model, x = FlattensPositions(window), normal(5, 4, 4)
    loss = averaged("categorical", 5)
    expected = reference_steps(model, x, loss, average=5)
    optimizer = make_optimizer(model, sharing="reduce")
    backward(optimizer, x, loss)
    assert_all_equal(step_of(optimizer), expected)  # the head has one position
    assert "layer: expand: rows not grouped by sample" in optimizer.summary()


def test_layers_called_outside_the_forward_have_their_own_samples() -> None:
    model, x = small_model("linear")
    loss = averaged("categorical", len(x))
    expected = reference_steps(model, x, loss)
    optimizer = make_optimizer(model)
    z = x
    for module in model:  # type: ignore[attr-defined]
        z = module(z)
    loss(z).backward()
    assert_all_equal(step_of(optimizer), expected)


# --- averages over time ----------------------------------------------------------------------


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("second", [5, 2], ids=["even", "uneven"])
def test_two_batches_are_averaged_by_their_counts(
    sharing: Any, fisher: Any, decay: float, second: int
) -> None:
    model, x = small_model("conv")
    batches = [x, x.flip(0)[:second] + 0.3]
    optimizer = make_optimizer(model, fisher=fisher, sharing=sharing, decay=decay, lr=0.0)
    seen = []
    for batch in batches:
        loss = averaged("categorical", len(batch))
        options = {"fisher": fisher, "sharing": sharing}
        seen.append(reference_factors(model, model[0], batch, loss, **options))
        optimizer.zero_grad()
        backward(optimizer, batch, loss)
        optimizer.step()

    def average(first: Tensor, newest: Tensor) -> Tensor:
        return (decay * 5 * first + second * newest) / (decay * 5 + second)

    (A1, G1), (A2, G2) = seen
    G = None if G1 is None or G2 is None else average(G1, G2)
    assert_factors(optimizer, model[0], average(A1, A2), G)


def test_a_sum_loss_counts_batches_alike() -> None:
    model, x = small_model("linear")
    optimizer = make_optimizer(model, decay=0.5, lr=0.0, loss_average=None)
    loss, seen = averaged("categorical", None), []
    for batch in (x, x[:2] + 1):
        seen.append(reference_factors(model, model[0], batch, loss, average=None)[1])
        optimizer.zero_grad()
        backward(optimizer, batch, loss)
        optimizer.step()
    assert_equal(running_factors(optimizer, model[0])["G"], (0.5 * seen[0] + seen[1]) / 1.5)


# --- gradient accumulation -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "sequence", "conv", "grouped"])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("average", ["batch", None], ids=["mean", "sum"])
def test_micro_batches_are_one_batch(kind: str, sharing: Any, fisher: Any, average: Any) -> None:
    model, x = small_model(kind)
    x = torch.cat([x, x[:1] - 1])  # six samples
    steps = []
    for parts in (1, 3):
        copied = copy.deepcopy(model)
        optimizer = make_optimizer(copied, fisher=fisher, sharing=sharing, loss_average=average)
        for part in x.chunk(parts):
            loss = averaged("gaussian", len(part) if average else None)
            over = parts if average else 1
            backward(optimizer, part, lambda f, loss=loss, over=over: loss(f) / over, "gaussian")
        steps.append(step_of(optimizer))
    assert_all_equal(steps[1], steps[0])


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", FISHERS)
def test_uneven_micro_batches_with_one_divisor_are_one_batch(sharing: Any, fisher: Any) -> None:
    model, x = small_model("conv")
    steps = []
    for sizes in ([5], [1, 4], [2, 1, 2]):
        copied = copy.deepcopy(model)
        optimizer = make_optimizer(copied, fisher=fisher, sharing=sharing)
        for part in x.split(sizes):
            backward(optimizer, part, averaged("gaussian", 5), "gaussian")
        steps.append(step_of(optimizer))
    assert_all_equal(steps[1], steps[0])
    assert_all_equal(steps[2], steps[0])


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_micro_batches_of_tokens_are_one_batch(fisher: Any) -> None:
    model, x, targets = sequence_model()
    x, targets = x[:4], targets[:4]  # 3 + 3 tokens, then 1 + 4: not even
    tokens = int((targets != IGNORED).sum())
    steps = []
    for parts in (1, 2):
        copied = copy.deepcopy(model)
        optimizer = make_optimizer(copied, fisher=fisher, loss_average="token")
        for part, labels in zip(x.chunk(parts), targets.chunk(parts), strict=True):
            observing = {"mask": labels, "ignore_index": IGNORED} if fisher == "exact" else {}
            backward(optimizer, part, masked_loss(labels, tokens), **observing)
        steps.append(step_of(optimizer))
    assert_all_equal(steps[1], steps[0])


@pytest.mark.parametrize("fisher", FISHERS)
def test_forwards_before_one_backward_are_one_batch(fisher: Any) -> None:
    model, x = small_model("conv")
    steps = []
    for sizes in ([5], [2, 3]):
        copied = copy.deepcopy(model)
        optimizer = make_optimizer(copied, fisher=fisher)
        parts = []
        for part in x.split(sizes):
            parts.append(copied(part))
            if fisher == "exact":
                optimizer.observe(parts[-1])
        averaged("categorical", 5)(torch.cat(parts)).backward()
        steps.append(step_of(optimizer))
    assert_all_equal(steps[1], steps[0])


# --- a weight that is used several times -----------------------------------------------------


class Repeats(nn.Module):
    """One layer called twice in a row and once on more positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, **DOUBLE)
        self.head = nn.Linear(3, C, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(self.layer(x[:, 0]).tanh()).tanh()
        return self.head(z + self.layer(x).tanh().mean(1))


class Tied(nn.Module):
    """Two modules with one weight, with one bias or none."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=bias, **DOUBLE)
        self.second = nn.Linear(3, 3, bias=bias, **DOUBLE)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias
        self.head = nn.Linear(3, C, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh().mean(1))


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_further_calls_are_further_positions(sharing: Any, fisher: Any, likelihood: str) -> None:
    model, x = Repeats(), normal(5, 4, 3)
    loss = averaged(likelihood, 5)
    options = {"fisher": fisher, "sharing": sharing, "likelihood": likelihood}
    expected = reference_steps(model, x, loss, **options)
    optimizer = make_optimizer(model, fisher=fisher, sharing=sharing)
    backward(optimizer, x, loss, likelihood)
    assert_all_equal(step_of(optimizer), expected)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("bias", [False, True])
def test_modules_with_one_weight_are_one_layer(sharing: Any, fisher: Any, bias: bool) -> None:
    model, x = Tied(bias), normal(5, 4, 3)
    loss = averaged("categorical", 5)
    modules = [model.first, model.second]
    A, G = reference_factors(model, modules, x, loss, fisher=fisher, sharing=sharing)
    V = loss_gradient(model, model.first, x, loss)
    optimizer = make_optimizer(model, fisher=fisher, sharing=sharing)
    backward(optimizer, x, loss)
    assert_equal(step_of(optimizer)[0], oracles.eigen_step(A, G, V, GAMMA))


# --- where K-FAC is exact --------------------------------------------------------------------


def dense_solve(curvature: Tensor, V: Tensor) -> Tensor:
    damped = curvature + GAMMA * torch.eye(V.numel(), **DOUBLE)
    return torch.linalg.solve(damped, V.flatten()).reshape(V.shape)


def ggn_steps(model: nn.Module, x: Tensor, loss: Loss, likelihood: Any, average: Any) -> Any:
    """`(GGN + γI)⁻¹` of each layer's own block, by dense autograd."""
    steps = []
    for layer in matrix_layers(model):
        block = oracles.dense_ggn_block(layer, model(x), likelihood, average)
        steps.append(dense_solve(block, loss_gradient(model, layer, x, loss)))
    return steps


@pytest.mark.parametrize("average", ["batch", None], ids=["mean", "sum"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_deep_linear_network_with_squared_loss(average: Any, sharing: Any) -> None:
    model = nn.Sequential(*(nn.Linear(i, o, **DOUBLE) for i, o in ((4, 3), (3, 3), (3, C))))
    x, loss = normal(5, 4), averaged("gaussian", 5 if average else None)
    expected = ggn_steps(model, x, loss, "gaussian", average)
    optimizer = make_optimizer(model, fisher="exact", sharing=sharing, loss_average=average)
    backward(optimizer, x, loss, "gaussian")
    assert_all_equal(step_of(optimizer), expected)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_one_sample_is_the_empirical_fisher(likelihood: str) -> None:
    model, x = small_model("linear")
    x, loss = x[:1], averaged(likelihood, 1)
    expected = []
    for layer in matrix_layers(model):
        block = oracles.empirical_fisher_block(layer, loss_terms(model(x), likelihood))
        expected.append(dense_solve(block, loss_gradient(model, layer, x, loss)))
    optimizer = make_optimizer(model)
    backward(optimizer, x, loss)
    assert_all_equal(step_of(optimizer), expected)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_one_sample_is_the_exact_ggn(likelihood: str) -> None:
    model, x = small_model("linear")
    x, loss = x[:1], averaged(likelihood, 1)
    expected = ggn_steps(model, x, loss, likelihood, "batch")
    optimizer = make_optimizer(model, fisher="exact")
    backward(optimizer, x, loss, likelihood)
    assert_all_equal(step_of(optimizer), expected)


@pytest.mark.parametrize("average", ["batch", "token", None], ids=str)
def test_expand_with_a_loss_per_position(average: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3, **DOUBLE), nn.Linear(3, C, **DOUBLE))
    x = normal(5, 4, 4)
    loss = averaged("gaussian", {"batch": 5.0, "token": 20.0, None: None}[average])
    expected = ggn_steps(model, x, loss, "gaussian", average)
    optimizer = make_optimizer(model, fisher="exact", loss_average=average)
    backward(optimizer, x, loss, "gaussian")
    assert_all_equal(step_of(optimizer), expected)


class Pooled(nn.Module):
    """A layer over positions, their mean or sum, and a head."""

    def __init__(self, layer: nn.Module, channels_last: bool, pooling: str) -> None:
        super().__init__()
        self.layer, self.channels_last, self.pooling = layer, channels_last, pooling
        self.head = nn.Linear(3, C, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        z = z.flatten(1, -2) if self.channels_last else z.flatten(2).mT
        return self.head(z.mean(1) if self.pooling == "mean" else z.sum(1))


@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("average", ["batch", None], ids=["mean", "sum"])
def test_reduce_with_pooled_positions(pooling: str, kind: str, average: Any) -> None:
    linear = kind == "linear"
    layer = nn.Linear(4, 3, **DOUBLE) if linear else nn.Conv2d(2, 3, 2, padding=1, **DOUBLE)
    model = Pooled(layer, linear, pooling)
    x = normal(5, 4, 4) if linear else normal(5, 2, 3, 3)
    loss = averaged("gaussian", 5 if average else None)
    expected = ggn_steps(model, x, loss, "gaussian", average)
    optimizer = make_optimizer(model, fisher="exact", sharing="reduce", loss_average=average)
    backward(optimizer, x, loss, "gaussian")
    assert_all_equal(step_of(optimizer), expected)


def relative_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(("damping", "low", "high"), [(1e-1, 1e-2, 1e9), (1e-14, 0.0, 1e-4)])
def test_eigen_and_cholesky_meet_as_damping_vanishes(
    damping: float, low: float, high: float
) -> None:
    model = nn.Sequential(nn.Linear(2, 3, **DOUBLE), nn.Tanh(), nn.Linear(3, C, **DOUBLE))
    x, loss = normal(40, 2), averaged("gaussian", 40)
    steps = []
    for solver in ("eigen", "cholesky"):
        optimizer = make_optimizer(copy.deepcopy(model), solver=solver, damping=damping)
        backward(optimizer, x, loss)
        steps.append(step_of(optimizer))
    for one, other in zip(*steps, strict=True):
        assert low <= relative_difference(one, other) <= high


# --- it does precondition --------------------------------------------------------------------


@pytest.mark.parametrize("solver", STEPS)
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_the_step_of_a_convolution_is_not_parallel_to_its_gradient(
    solver: Any, sharing: Any, fisher: Any
) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, **DOUBLE),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, **DOUBLE),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2, **DOUBLE),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, C, **DOUBLE),
    )
    images = F.avg_pool2d(normal(16, 3, 10, 10), 3, stride=1) + 0.3  # neighbours alike, not centred
    x, loss = images, averaged("categorical", 16)
    raw = [loss_gradient(model, one, x, loss) for one in matrix_layers(model)]
    optimizer = make_optimizer(model, solver=solver, sharing=sharing, fisher=fisher, damping=1e-8)
    backward(optimizer, x, loss)
    for gradient, step, layer in zip(raw, step_of(optimizer), matrix_layers(model), strict=True):
        if isinstance(layer, nn.Conv2d):
            cosine = F.cosine_similarity(gradient.flatten(), step.flatten(), dim=0)
            assert 0 < cosine < 0.95
