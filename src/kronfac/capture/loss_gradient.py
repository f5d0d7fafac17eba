"""The model's outputs and the loss's gradient at them, for methods that look at both."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kronfac.capture.capture import Capture
from kronfac.capture.hooks import watch_gradient
from kronfac.layers.shards import whole
from kronfac.statistics.forward_pass import Pass


def watch_outputs(capture: Capture, outputs: Tensor) -> None:
    """Keep the outputs of the newest forward, and the gradient at them once it is there."""
    forward_pass = capture.latest
    if forward_pass is None:
        raise RuntimeError(
            "observe() found no forward pass to observe: call it once after each forward of the whole "
            "model in training mode, and before backward()."
        )
    if outputs.dim() == 0 or outputs.shape[0] != forward_pass.samples:
        raise ValueError(
            f"observe() got outputs of shape {tuple(outputs.shape)} after a forward of "
            f"{forward_pass.samples} samples: give what the model returned, samples first."
        )
    forward_pass.see_outputs(whole(outputs))
    watch_gradient(outputs, partial(_see, capture, forward_pass))


def _see(capture: Capture, forward_pass: Pass, grad: Tensor | None) -> None:
    if grad is not None and not capture.is_paused:
        grad = whole(grad)
        wide = torch.promote_types(grad.dtype, torch.float32)
        forward_pass.see_output_gradient(capture.unscale(grad, wide))
