"""Gradients are clipped by their common norm, before they are preconditioned."""

import pytest
import torch
from torch.optim import SGD

import kronfac
from kronfac.step.clipping import clip_gradients
from tests.training import batch, loss_of, mlp


@pytest.mark.parametrize("bound", [0.01, 0.5, 100.0])
def test_it_is_the_clipping_of_torch(bound: float, double_precision: None) -> None:
    left, right = mlp(), mlp()
    for model in (left, right):
        loss_of(model, batch()).backward()
    clip_gradients(list(left.parameters()), bound, None)
    torch.nn.utils.clip_grad_norm_(right.parameters(), bound)
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)


def test_sparse_gradients_are_clipped_too() -> None:
    dense, sparse = torch.nn.Embedding(5, 3), torch.nn.Embedding(5, 3, sparse=True)
    for table in (dense, sparse):
        table(torch.tensor([1, 1, 2])).sum().backward()  # one row is there twice
        clip_gradients([table.weight], 0.5, None)
    assert float(dense.weight.grad.norm()) == pytest.approx(0.5, rel=1e-5)
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)


def test_norms_of_others_count(double_precision: None) -> None:
    model = mlp()
    loss_of(model, batch()).backward()
    before = [p.grad.clone() for p in model.parameters()]
    own = sum(float(grad.norm() ** 2) for grad in before) ** 0.5
    clip_gradients(list(model.parameters()), own, lambda total: 4 * total)
    for parameter, grad in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, grad / 2, rtol=1e-5, atol=0.0)


def test_a_step_with_the_option_is_a_step_after_clipping(double_precision: None) -> None:
    left, right = mlp(), mlp()
    options = {"rescale": None, "damping": 0.1}
    clipping = kronfac.KFAC(left, SGD(left.parameters(), lr=0.1), max_grad_norm=0.05, **options)
    plain = kronfac.KFAC(right, SGD(right.parameters(), lr=0.1), **options)
    for number in range(3):
        for model, optimizer in ((left, clipping), (right, plain)):
            optimizer.zero_grad()
            loss_of(model, batch(number)).backward()
            if optimizer is plain:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bound", [0, -1.0, float("nan"), "much"])
def test_a_bound_must_be_positive(bound: object) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"max_grad_norm=.* must be a positive finite number"):
        kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), max_grad_norm=bound)


def test_a_detached_optimizer_does_not_clip() -> None:
    left, right = mlp(), mlp()
    optimizer = kronfac.KFAC(left, SGD(left.parameters(), lr=0.1), max_grad_norm=1e-6)
    optimizer.detach()
    for model, one in ((left, optimizer), (right, SGD(right.parameters(), lr=0.1))):
        loss_of(model, batch()).backward()
        one.step()
    assert all(
        torch.equal(p, q) for p, q in zip(left.parameters(), right.parameters(), strict=True)
    )
