"""Folding what is pending into running averages, and foreseeing it before the step."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import kronfac
from kronfac.state.fold import fold
from kronfac.state.layer_state import LayerState
from kronfac.statistics.normalizer import Normalizer

DECAY = 0.7


def observed(steps: int) -> tuple[LayerState, Normalizer]:
    """A layer after some steps and one more forward and backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    base = SGD(model.parameters(), lr=0.1)
    optimizer = kronfac.KFAC(model, base, factor_every=1, refresh_every=1, decay=DECAY)
    for number in range(steps + 1):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(5, 4)), torch.arange(5) % 3).backward()
        if number < steps:
            optimizer.step()
    ours = optimizer._preconditioner
    (state,) = ours.layers.values()
    return state, Normalizer(ours.capture.passes, "batch", False)


def snapshot(state: LayerState, name: str) -> list[Tensor]:
    running = state.running[name]
    kept = [running.sum, running.count, state.pending.sums[name]]
    return [tensor.clone() for tensor in kept if tensor is not None]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("name", ["A", "G"])
def test_a_preview_is_what_the_fold_leaves(name: str, steps: int) -> None:
    state, normalizer = observed(steps)
    before = snapshot(state, name)
    preview = fold(state, name, DECAY, normalizer, preview=True)
    assert preview is not None
    foreseen = preview.clone()
    after = snapshot(state, name)
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))
    folded = fold(state, name, DECAY, normalizer)
    assert folded is state.running[name].sum
    assert torch.equal(folded, foreseen)


def test_a_preview_without_contribution_only_decays() -> None:
    state, normalizer = observed(2)
    state.pending.clear()
    total = state.running["A"].sum
    preview = fold(state, "A", DECAY, normalizer, preview=True)
    assert total is not None
    assert preview is not None
    torch.testing.assert_close(preview, DECAY * total)
