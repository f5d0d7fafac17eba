"""Layers whose rows do not mix are preconditioned slice by slice: equal, and without an exchange."""

from __future__ import annotations

from tests.distributed.equivalence import case
from tests.sharded.harness import Way, check


def test_quick() -> None:
    check(
        2,
        (case("transformer", steps=4, momentum=0.9), Way()),
        (case("mlp", steps=4, fisher="forward"), Way()),
        (case("mlp", steps=4, max_dim=4, solver="cholesky", rescale="unit", momentum=0.9), Way()),
        (case("transformer", steps=4, rescale="auto", base="sgd", momentum=0.9), Way()),
        (case("mlp", steps=4, max_dim=4, rescale="kl-clip"), Way()),
    )
