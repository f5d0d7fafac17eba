"""Flaws found in the K-FAC library that people use today, each as a test that we do not have it.

That convolutions are scaled so that they are preconditioned at all is in `test_exactness.py`; what
concerns several processes is not here.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import oracles
from tests.test_syncs import CountWaits
from tests.training import (
    applied,
    assert_close,
    assert_same,
    batch,
    cnn,
    counts,
    factors,
    frozen_kfac,
    gradients,
    hooks,
    images,
    kfac,
    loss_of,
    mlp,
    parameters,
    step,
    train,
)

pytestmark = pytest.mark.usefixtures("double_precision")


def is_preconditioned(model: nn.Module, data: tuple[Tensor, Tensor]) -> bool:
    """Whether a step changes the direction of every layer's gradient."""
    optimizer = frozen_kfac(model, damping=1e-3)
    before, after = applied(model, optimizer, data)
    pairs = [(before[n].flatten(), after[n].flatten()) for n in before if n.endswith("weight")]
    return all(float(F.cosine_similarity(a, b, dim=0)) < 0.999 for a, b in pairs)


# --- models that crashed ---------------------------------------------------------------------


def test_channels_last_models_work() -> None:
    model = cnn().to(memory_format=torch.channels_last)
    x, y = images()
    assert is_preconditioned(model, (x.to(memory_format=torch.channels_last), y))


def test_grouped_convolutions_work() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(12, 3))
    assert is_preconditioned(model, batch(shape=(2, 4)))


def test_padding_same_works() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 3, padding="same"), nn.Flatten(), nn.Linear(12, 3))
    assert is_preconditioned(model, batch(shape=(2, 4)))


def test_transposed_inputs_of_linear_layers_work() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(1, 2)).transpose(1, 2).mean(2)

    assert is_preconditioned(Transposed(), batch(shape=(4, 2)))


def test_in_place_activations_work() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    assert is_preconditioned(model, batch())


class Attention(nn.Module):
    """Its output projection is a linear layer whose forward torch never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


def test_the_output_projection_of_attention_is_preconditioned() -> None:
    model = Attention()
    optimizer = frozen_kfac(model, damping=1e-4)
    before, after = applied(model, optimizer, batch(shape=(5, 4)))
    assert optimizer.stats()["without_solution"] == []
    changed, raw = after["attention.out_proj.weight"], before["attention.out_proj.weight"]
    assert F.cosine_similarity(changed.flatten(), raw.flatten(), dim=0) < 0.99


def test_a_layer_that_is_never_called_does_not_crash_the_step() -> None:
    class ByWeight(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self[0](x), self[1].weight, self[1].bias)

    model = ByWeight(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = kfac(model)
    with pytest.warns(UserWarning, match="'1'"):
        step(model, optimizer, batch())
    assert optimizer.stats()["without_solution"] == ["1"]


def test_a_layer_without_any_gradient_does_not_crash_the_step() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3)})
    optimizer = kfac(model)
    F.cross_entropy(model["used"](batch()[0]), batch()[1]).backward()
    optimizer.step()
    assert optimizer.stats()["without_solution"] == ["unused"]


# --- values that were wrong ------------------------------------------------------------------


def test_dilation_is_seen() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2, dilation=2), nn.Flatten(), nn.Linear(9, 3))
    x, y = batch(shape=(2, 5))
    outputs, calls = oracles.run_layer(model, model[0], x)
    (g,) = torch.autograd.grad(F.cross_entropy(outputs, y), calls[0].z)
    expected = oracles.kfac_factors(*oracles.layer_rows(model[0], calls[0].x, g))[0]
    optimizer = frozen_kfac(model)
    step(model, optimizer, (x, y))
    eigenvalues = [torch.linalg.eigvalsh(m) for m in (factors(optimizer, "A")["0"], expected)]
    assert_close(*eigenvalues)  # whatever the order of features


def test_a_module_used_twice_counts_its_samples_once() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(self.cell(x).tanh()).tanh())

    model = Recurrent()
    optimizer = frozen_kfac(model)
    step(model, optimizer, batch())
    assert counts(optimizer, "G") == {"cell": 8, "head": 8}
    assert counts(optimizer, "A") == {"cell": 16, "head": 8}


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, x.requires_grad_(), use_reentrant=reentrant)

    model = Checkpointed()
    optimizer = frozen_kfac(model)
    step(model, optimizer, batch())
    assert counts(optimizer, "A") == {"net.0": 8, "net.2": 8, "net.4": 8}


def test_input_statistics_are_not_computed_under_autocast() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = frozen_kfac(model)
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x.float()), y)
    loss.backward()
    optimizer.step()
    rows = torch.cat([x.float(), torch.ones(8, 1, dtype=torch.float32)], dim=1)
    torch.testing.assert_close(factors(optimizer, "A")["0"], rows.T @ rows / 8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_steps_that_are_not_finite_do_not_pollute_statistics(value: float) -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = frozen_kfac(model, decay=1.0), frozen_kfac(twin, decay=1.0)
    (loss_of(model, batch(0)) * value).backward()
    model.zero_grad()  # the step is skipped
    step(model, optimizer, batch(1))
    step(twin, reference, batch(1))
    assert_same(factors(optimizer, "G"), factors(reference, "G"))


def test_damping_is_not_frozen_into_the_solution() -> None:
    model = mlp()
    optimizer = frozen_kfac(model, solver="eigen", refresh_every=9, damping=0.1)
    step(model, optimizer, batch(0))
    _, small = applied(model, optimizer, batch(1))
    optimizer.damping = 1e6
    before, large = applied(model, optimizer, batch(1))
    assert not torch.equal(small["0.weight"], large["0.weight"])
    torch.testing.assert_close(
        large, {name: value / 1e6 for name, value in before.items()}, rtol=1e-3, atol=0
    )


def test_a_schedule_does_not_compound() -> None:
    model, twin = mlp(), mlp()
    scheduled = kfac(model, damping=lambda t: 0.1 if t < 2 else 0.05)
    by_hand = kfac(twin, damping=0.1)
    train(model, scheduled, range(6))
    train(twin, by_hand, range(2))
    by_hand.damping = 0.05
    train(twin, by_hand, range(2, 6))
    assert_same(parameters(model), parameters(twin))


# --- interfaces that failed ------------------------------------------------------------------


def test_training_without_a_kl_clip_works() -> None:
    model = mlp()
    before, after = applied(model, frozen_kfac(model, rescale=None), batch())
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_the_device_independent_gradient_scaler_works() -> None:
    model, twin = mlp(), mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer, reference = frozen_kfac(model, grad_scaler=scaler), frozen_kfac(twin)
    scaler.scale(loss_of(model, batch())).backward()
    scaler.step(optimizer)
    step(twin, reference, batch())
    assert_close(gradients(model), gradients(twin))


def test_checkpoints_are_matched_by_more_than_the_number_of_layers() -> None:
    other = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"'1\.weight' is not in group 0"):
        kfac(mlp()).load_state_dict(kfac(other).state_dict())


def test_hooks_can_be_removed() -> None:
    model = mlp()
    kfac(model).detach()
    assert hooks(model) == 0


def test_a_step_with_a_kl_clip_reads_nothing_back() -> None:
    model = mlp()
    optimizer = kfac(model, refresh_every=5, rescale="kl-clip")
    step(model, optimizer, batch(0))
    optimizer.zero_grad()
    loss_of(model, batch(1)).backward()
    optimizer.base.param_groups[0]["foreach"] = False
    with CountWaits() as counter:
        optimizer.step()
    assert not counter.waits
