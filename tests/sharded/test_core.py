"""FSDP2 equals one process: the quick core."""

from __future__ import annotations

import torch

from tests.distributed.equivalence import case
from tests.sharded.harness import Way, check


def test_every_kind_of_layer() -> None:
    check(
        2,
        (case("mlp", steps=4), Way("model")),
        (case("cnn", steps=4), Way()),
        (case("transformer", steps=4, base="adamw", momentum=0.9), Way(reshard=False)),
        (case("shared", steps=4, solver="cholesky"), Way("model")),
        (case("positions", steps=4), Way("model")),
        (case("across", steps=4), Way(dim=1)),
    )


def test_options_that_look_at_whole_gradients() -> None:
    check(
        2,
        (case("mlp", steps=4, rescale="kl-clip"), Way()),
        (case("transformer", steps=4, max_grad_norm=0.1), Way()),
        (case("mlp", steps=4, rescale="auto", momentum=0.9, nesterov=True), Way()),
        (case("transformer", steps=3, micro=2, fisher="exact"), Way()),
        (case("mlp", steps=3, method="MLBFGS"), Way()),
        (case("mlp", steps=3, block_dim=3), Way()),
        # A norm whose input is a parameter, of which FSDP2 frees the memory after each draw.
        (case("positions", steps=2, fisher="exact"), Way("model")),
    )


def test_parameters_without_curvature() -> None:
    auto = case("unseen", steps=4, rescale="auto", momentum=0.9, nesterov=True, base="sgd")
    check(2, (auto, Way("model")), (auto, Way()))
    check(3, (auto, Way("model", order="before")))


def test_uneven_and_empty_shards() -> None:
    outcomes = check(3, (case("mlp", steps=4), Way("model")), (case("cnn", steps=4), Way("leaves")))
    assert any(shard.numel() == 0 for shard in outcomes[0][2].shards.values())


def test_replicas_of_shards_are_the_same_bits() -> None:
    (outcomes,) = check(4, (case("transformer", steps=4), Way(replicas=2)))
    for first, second in ((0, 2), (1, 3)):
        for name, shard in outcomes[first].shards.items():
            assert torch.equal(shard, outcomes[second].shards[name]), name
