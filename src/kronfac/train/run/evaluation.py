"""Loss and accuracy on the test set."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kronfac.train.run.setup import Setup
from kronfac.train.run.stepping import cross_entropy


@dataclass(frozen=True)
class Evaluation:
    """One point of the curve; ``seconds`` are those of training, and text has each next byte to guess."""

    step: int
    seconds: float
    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(setup: Setup, step: int, seconds: float) -> Evaluation:
    """Test every sample once, each rank its share."""
    setup.ranks.share_buffers(setup.plain)
    was_training = setup.plain.training
    setup.plain.eval()
    loss = right = terms = 0.0
    half = setup.job.train.precision == "bfloat16"
    share = max(1, setup.job.train.evaluate_batch // setup.ranks.size)
    for inputs, targets in setup.batches.test(share):
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=half):
            outputs = setup.plain(inputs)
        outputs = outputs.float()
        loss += float(cross_entropy(outputs, targets)) * targets.numel()
        right += float((outputs.argmax(-1) == targets).sum())
        terms += targets.numel()
    setup.plain.train(was_training)
    loss, right, terms = setup.ranks.total([loss, right, terms])
    return Evaluation(step, seconds, loss / terms, right / terms)
